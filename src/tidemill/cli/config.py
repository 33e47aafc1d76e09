"""`tidemill config check | show | schema | hash`: checks and shows a configuration without starting anything."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.help import App
from tidemill.cli.options import ConfigPath
from tidemill.cli.reporting import reporting
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.config.settings import Settings

app = App(help="Check and show the configuration.")

#: Sections that only trigger hosts read; most configurations are for pipelines.
_HOST_SECTIONS = ("store", "triggerer")
_LEAST_PASSWORD_CHARS = 8


@app.command()
def check(
    config: ConfigPath = None, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False
) -> None:
    """Check a configuration (file and environment); report every problem with its location.

    Starts nothing and connects to nothing, but checks the folders that a pipeline writes to on this machine.
    """
    with reporting():
        from tidemill.config.loading import describe_source, load_settings
        from tidemill.core.errors import ConfigError

        problems: list[str] = []
        warnings: list[str] = []
        try:
            settings = load_settings(config)
        except ConfigError as error:
            if not as_json:
                raise
            problems = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
        else:
            problems, warnings = _examine(settings)
        source = describe_source(config)
        if as_json:
            typer.echo(json.dumps({"ok": not problems, "config": source, "problems": problems, "warnings": warnings}))
            raise typer.Exit(ExitCode.CONFIG if problems else ExitCode.OK)
        if problems:
            raise ConfigError("the configuration is invalid:" + "".join(f"\n  {problem}" for problem in problems))
        typer.echo(f"ok: {source}")
        for warning in warnings:
            typer.echo(f"warning: {warning}", err=True)


def _examine(settings: Settings) -> tuple[list[str], list[str]]:
    """Return the problems of settings that were loaded, and warnings."""
    from tidemill.cli.doctor.checks import find_refusals
    from tidemill.cli.doctor.folder_checks import find_recording_problem
    from tidemill.config.loading import NO_TOPIC

    warnings = []
    if "source_topic" not in settings.kafka.model_fields_set:
        warnings.append(NO_TOPIC.format(topic=settings.kafka.source_topic))
    if settings.sinks.is_empty():
        warnings.append("no sink is configured; a pipeline needs one, unless on_startup adds it")
    if text := find_recording_problem(settings):
        warnings.append(text)
    return find_refusals(settings), warnings


@app.command()
def show(
    config: ConfigPath = None,
    changed: Annotated[
        bool, typer.Option("--changed", help="Show only settings that differ from the defaults.")
    ] = False,
) -> None:
    """Show the effective configuration, including defaults; secrets are masked.

    Sections that only trigger hosts read (store, triggerer) are shown only if they are set.
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


@app.command("hash")
def hash_(
    token: Annotated[
        bool,
        typer.Option(
            "--token",
            help="Create a token for programs; print the token to standard error, and its hash to standard output.",
        ),
    ] = False,
) -> None:
    """Hash a password for `debug.users`, or create a token for `debug.tokens`.

    The password is read from the terminal, or from standard input.
    """
    with reporting():
        from tidemill.web.access.hashes import hash_password, hash_token, make_token

        if token:
            made = make_token()
            typer.echo(f"token: {made}", err=True)
            typer.echo(hash_token(made))
            return
        typer.echo(hash_password(_read_password()))


def _read_password() -> str:
    import sys

    from tidemill.core.errors import ConfigError

    if sys.stdin.isatty():
        password: str = typer.prompt("password", hide_input=True, confirmation_prompt=True, err=True)
    else:
        password = sys.stdin.readline().rstrip("\r\n")
    if len(password) < _LEAST_PASSWORD_CHARS:
        raise ConfigError(f"the password has fewer than {_LEAST_PASSWORD_CHARS} characters; choose a longer one")
    return password
