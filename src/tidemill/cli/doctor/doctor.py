"""`tidemill doctor`: checks everything that a pipeline needs, and says how to fix problems."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.completion import complete_handlers
from tidemill.cli.options import ConfigPath
from tidemill.cli.reporting import divert_prints, reporting
from tidemill.core.wording import format_count
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.cli.doctor.checks import Cluster, Finding
    from tidemill.config.settings import Settings


def doctor(
    config: ConfigPath = None,
    handler: Annotated[
        str | None,
        typer.Option(
            "--handler", metavar="MODULE:CLASS", help="Also check this handler.", autocompletion=complete_handlers
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Check everything that a pipeline needs: Java, Spark, brokers, topics, folders, sinks.

    Each line says ok, or FAIL and how to fix it. After a FAIL the exit code is 4.
    """
    with reporting(), divert_prints(as_json) as output:
        findings = []
        for finding in examine(config, handler):
            findings.append(finding)
            if not as_json:
                _print(finding)
        problems = sum(finding.problem is not None for finding in findings)
        if as_json:
            checks = [
                {"name": finding.name, "ok": finding.problem is None, "text": _describe(finding)}
                for finding in findings
            ]
            typer.echo(json.dumps({"ok": not problems, "checks": checks}), file=output)
        elif problems:
            typer.echo(f"{format_count(problems, 'problem')} found", err=True)
        if problems:
            raise typer.Exit(ExitCode.REMOTE)


def _print(finding: Finding) -> None:
    good = finding.problem is None
    mark = typer.style("ok  ", fg="green") if good else typer.style("FAIL", fg="red", bold=True)
    indented = _describe(finding).replace("\n", "\n        ")
    typer.echo(f"{mark}  {finding.name}: {indented}")


def _describe(finding: Finding) -> str:
    # Messages of sinks begin with the sink's name.
    return finding.text.removeprefix(f"{finding.name}: ")


def examine(config: Path | None, handler: str | None) -> Iterator[Finding]:
    """Yield the finding of each check as soon as it is available."""
    from tidemill.cli.doctor.checks import (
        Finding,
        check_cache_folder,
        check_handler,
        check_java,
        check_spark,
        run_check,
    )
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
        yield run_check("handler", lambda: check_handler(handler))


def _examine_remote(settings: Settings) -> Iterator[Finding]:
    from tidemill.cli.doctor.checks import (
        Cluster,
        check_group,
        check_program,
        check_worker,
        load_kafka_client,
        run_check,
    )
    from tidemill.cli.doctor.folder_checks import check_folder, list_folders
    from tidemill.spark.session.conf import is_local

    kafka = settings.kafka
    source = Cluster(kafka, "", kafka.client_config, "kafka.brokers")
    worker = run_check("worker name", lambda: check_worker(settings))
    yield worker
    # On a cluster the program must exist on the engines' machines, not here.
    if settings.executor.binary_path and is_local(settings.spark):
        yield run_check("program", lambda: check_program(settings.executor))
    yield run_check("Kafka", source.check, prepare=load_kafka_client)
    yield run_check("source topic", lambda: source.check_topic(kafka.source_topic, "kafka.source_topic"))
    if source.answers and worker.problem is None:
        yield run_check("consumer group", lambda: check_group(settings))
    if not settings.dlq.path:
        other = Cluster(kafka, settings.dlq_brokers, {}, "dlq.brokers")
        letters = source if settings.dlq_brokers == kafka.brokers else other
        yield run_check("dead letters", lambda: letters.check_dead_letters(settings.dlq_topic))
    for folder in list_folders(settings):
        yield run_check(folder.setting, lambda folder=folder: check_folder(folder))  # type: ignore[misc]
    yield from _examine_sinks(settings, source)


def _examine_sinks(settings: Settings, source: Cluster) -> Iterator[Finding]:
    from tidemill.cli.doctor.checks import Cluster, Finding, check_sink, run_check
    from tidemill.config.sink_types import name_sink_section
    from tidemill.core.errors import SinkNotConfiguredError
    from tidemill.sinks.build import build_sink

    if settings.sinks.is_empty():
        text = "no sink is configured; add one, for example sinks.filesystem.results with a base_path"
        yield Finding("sinks", text, SinkNotConfiguredError(text))
    for name, topic in settings.sinks.kafka.items():
        section = f"sinks.kafka.{name}"
        own = topic.brokers or topic.client_config
        cluster = Cluster(settings.kafka, topic.brokers, topic.client_config, f"{section}.brokers") if own else source
        yield run_check(section, lambda c=cluster, t=topic, p=section: c.check_topic(t.topic, f"{p}.topic"))  # type: ignore[misc]
    for kind, named in settings.sinks.group_by_type().items():
        for name in named if kind not in ("kafka", "filesystem") else ():
            yield run_check(
                f"{name_sink_section(kind)}.{name}",
                partial(check_sink, settings, kind, name),
                prepare=partial(build_sink, settings, kind, name),  # which imports its driver
            )
