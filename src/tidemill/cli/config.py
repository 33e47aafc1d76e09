"""`tidemill config check | show | schema`: checks and shows a configuration without starting anything."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.reporting import reporting

app = typer.Typer(help="Check and show configuration.", no_args_is_help=True)

#: Sections that only trigger hosts read; most configurations are for pipelines.
_HOST_SECTIONS = ("store", "triggerer")

ConfigPath = Annotated[
    Path | None, typer.Argument(metavar="[CONFIG]", help="The YAML file; default: what TIDEMILL_CONFIG names.")
]


@app.command()
def check(config: ConfigPath = None) -> None:
    """Check a configuration (file and environment); every problem is reported with its place."""
    with reporting():
        from tidemill.config.loading import NO_TOPIC, describe_source, load_settings
        from tidemill.spark.preflight import check_client_config

        settings = load_settings(config)
        check_client_config(settings)
        typer.echo(f"ok: {describe_source(config)}")
        if "source_topic" not in settings.kafka.model_fields_set:
            typer.echo(f"warning: {NO_TOPIC.format(topic=settings.kafka.source_topic)}", err=True)
        if settings.sinks.is_empty():
            typer.echo("warning: no sink is configured; a pipeline needs one, unless on_startup adds it", err=True)


@app.command()
def show(
    config: ConfigPath = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what differs from the defaults.")] = False,
) -> None:
    """Show the whole effective configuration, including defaults; secrets are masked.

    What only a trigger host reads (store, triggerer) is shown where it is set.
    """
    with reporting():
        import yaml

        from tidemill.config.loading import load_settings
        from tidemill.config.redaction import redact

        settings = load_settings(config)
        values = redact(settings.model_dump(mode="json", exclude_defaults=changed))
        set_here = settings.model_dump(include=set(_HOST_SECTIONS), exclude_defaults=True)
        for name in _HOST_SECTIONS:
            if name not in set_here:
                values.pop(name, None)
        typer.echo(yaml.safe_dump(values, sort_keys=False, allow_unicode=True), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON schema of the configuration file, for editors."""
    with reporting():
        from tidemill.config.schema import format_schema

        typer.echo(format_schema(), nl=False)
