"""`tidemill doctor`: checks everything that a pipeline needs and says what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.reporting import reporting
from tidemill.runtime.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.cli.checks import Cluster, Finding
    from tidemill.config.settings import Settings


def doctor(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG]", help="The YAML file; default: what TIDEMILL_CONFIG names."),
    ] = None,
    handler: Annotated[
        str | None, typer.Option("--handler", metavar="MODULE:CLASS", help="Check this handler too.")
    ] = None,
) -> None:
    """Check Java, Spark, the brokers, topics and sinks: each line says ok, or what to do (then exit code 4)."""
    with reporting():
        problems = 0
        for finding in examine(config, handler):
            ok = finding.problem is None
            problems += not ok
            mark = typer.style("ok   ", fg="green") if ok else typer.style("TO DO", fg="red", bold=True)
            # Messages of sinks begin with their name.
            indented = finding.text.removeprefix(f"{finding.name}: ").replace("\n", "\n         ")
            typer.echo(f"{mark}  {finding.name}: {indented}")
        if problems:
            typer.echo(f"{problems} {'thing' if problems == 1 else 'things'} to do", err=True)
            raise typer.Exit(ExitCode.REMOTE)


def examine(config: Path | None, handler: str | None) -> Iterator[Finding]:
    """Yield the finding of each check as soon as it is known."""
    from tidemill.cli.checks import Finding, check_cache_folder, check_handler, check_java, check_spark, run_check
    from tidemill.config.loading import describe_source, load_settings
    from tidemill.core.errors import ConfigError

    settings: Settings | None = None
    try:
        settings = load_settings(config)
        yield Finding("configuration", describe_source(config))
    except ConfigError as error:
        yield Finding("configuration", str(error), error)
    yield run_check("Java", check_java)
    yield run_check("cache folder", check_cache_folder)
    master = settings.spark.master if settings is not None else "local"
    yield run_check("Spark", lambda: check_spark(master))
    if settings is not None:
        yield from _examine_remote(settings)
    if handler is not None:
        yield run_check(f"handler {handler}", lambda: check_handler(handler))


def _examine_remote(settings: Settings) -> Iterator[Finding]:
    from tidemill.cli.checks import Cluster, check_letter_folder, check_program, check_worker, run_check
    from tidemill.spark.session.conf import is_local

    kafka = settings.kafka
    source = Cluster(kafka, "", kafka.client_config, "kafka.brokers")
    yield run_check("worker name", lambda: check_worker(settings))
    # On a cluster it must exist where the engines are, which is not here.
    if settings.executor.binary_path and is_local(settings.spark):
        yield run_check("program", lambda: check_program(settings.executor))
    yield run_check("Kafka", source.check)
    yield run_check("source topic", lambda: source.check_topic(kafka.source_topic, "kafka.source_topic"))
    if settings.dlq.path:
        yield run_check("dead letters", lambda: check_letter_folder(settings.dlq.path))
    else:
        other = Cluster(kafka, settings.dlq_brokers, {}, "dlq.brokers")
        letters = source if settings.dlq_brokers == kafka.brokers else other
        yield run_check("dead letters", lambda: letters.check_dead_letters(settings.dlq_topic))
    yield from _examine_sinks(settings, source)


def _examine_sinks(settings: Settings, source: Cluster) -> Iterator[Finding]:
    from tidemill.cli.checks import Cluster, Finding, check_folder, check_sink, run_check
    from tidemill.config.sink_types import name_sink_section
    from tidemill.core.errors import SinkNotConfiguredError

    if settings.sinks.is_empty():
        text = "none is configured; add one, for example sinks.filesystem.results with a base_path"
        yield Finding("sinks", text, SinkNotConfiguredError(text))
    for name, topic in settings.sinks.kafka.items():
        place = f"sinks.kafka.{name}"
        own = topic.brokers or topic.client_config
        cluster = Cluster(settings.kafka, topic.brokers, topic.client_config, f"{place}.brokers") if own else source
        yield run_check(place, lambda c=cluster, t=topic, p=place: c.check_topic(t.topic, f"{p}.topic"))  # type: ignore[misc]
    for name, folder in settings.sinks.filesystem.items():
        yield run_check(f"sinks.filesystem.{name}", lambda f=folder: check_folder(f))  # type: ignore[misc]
    for kind, named in settings.sinks.group_by_type().items():
        for name in named if kind not in ("kafka", "filesystem") else ():
            yield run_check(f"{name_sink_section(kind)}.{name}", lambda k=kind, n=name: check_sink(settings, k, n))  # type: ignore[misc]
