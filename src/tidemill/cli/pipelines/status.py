"""`tidemill status`: shows the state of this machine's pipelines and trigger hosts; also a container's health check."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.reporting import reporting
from tidemill.cli.terminal.status_text import format_seconds
from tidemill.core.wording import format_count
from tidemill.runtime.log.console import escape_control
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.config.sections.kafka_settings import KafkaSettings
    from tidemill.runtime.sockets.control_socket import ProcessAnswers

#: A process that does not answer within this time hangs, or is suspended.
_ANSWER_SECONDS = 5.0
Report = dict[str, Any]


def status(
    config: Annotated[
        Path | None,
        typer.Argument(
            metavar="CONFIG",
            help="The YAML file of a pipeline, or a list of triggers; default: the file in TIDEMILL_CONFIG, or else "
            "all processes of this user on this machine.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show the state of pipelines and trigger hosts on this machine.

    Exit code 0: running and healthy. 4: not running, still starting, not answering, or an engine is down. Waiting for a
    broker or a sink is shown, but counts as healthy.
    """
    with reporting():
        reports, silent = find_reports(config)
        healthy = bool(reports) and not silent and all(report["healthy"] for report in reports)
        if as_json:
            typer.echo(json.dumps({"healthy": healthy, "silent": silent, "processes": reports}))
        else:
            for report in reports:
                typer.echo(describe_report(report))
            if silent:
                typer.echo(
                    f"{format_count(silent, 'process')} did not answer within {_ANSWER_SECONDS:g} s: hung or suspended",
                    err=True,
                )
            if not reports and not silent:
                typer.echo(_describe_nothing(config), err=True)
        raise typer.Exit(ExitCode.OK if healthy else ExitCode.REMOTE)


def find_reports(config: Path | None) -> tuple[list[Report], int]:
    """Return the answers of a configuration's processes, and how many did not answer in time.

    Args:
        config: The file; see `status`.

    Raises:
        ConfigError: The file is invalid.
    """
    from tidemill.config.loading import CONFIG_VARIABLE, load_settings

    if config is None and not os.environ.get(CONFIG_VARIABLE):
        answers = [_ask_pipelines(None), _ask_hosts(None)]
    elif config is not None and is_trigger_list(config):
        answers = [_ask_hosts(config)]
    else:
        answers = [_ask_pipelines(load_settings(config).kafka)]
    found = [report for answer in answers for report in answer.reports]
    return [complete(report) for report in found], sum(answer.silent for answer in answers)


def _ask_pipelines(kafka: KafkaSettings | None) -> ProcessAnswers:
    from tidemill.runtime.sockets.pipeline_socket import ask_pipelines

    return ask_pipelines(kafka, {"do": "status"}, _ANSWER_SECONDS)


def _ask_hosts(specs: Path | None) -> ProcessAnswers:
    from tidemill.services.triggerer.lists.control import ask_hosts

    return ask_hosts(specs, _ANSWER_SECONDS)


def is_trigger_list(path: Path) -> bool:
    """Return whether a file is a list of triggers, not a configuration."""
    from tidemill.config.document import read_yaml
    from tidemill.core.errors import ConfigError

    try:
        return isinstance(read_yaml(path.read_text(encoding="utf-8-sig"), str(path)).value, list)
    except (OSError, UnicodeDecodeError, RecursionError, ConfigError):
        return False  # the file is read again as a configuration, which reports the error


def complete(report: Report) -> Report:
    """Return a report with `healthy` and `problems`, which trigger hosts leave to this command."""
    if "healthy" in report:
        return report
    if "error" in report:
        return {**report, "healthy": False, "problems": [report["error"]]}
    problems = []
    if report["waits_for"] is None:
        if report["store"] is None:
            problems.append("the host is starting")
        elif report["store"] == "down":
            problems.append("the store cannot be reached")
    return {"kind": "trigger host", **report, "healthy": not problems, "problems": problems}


def describe_report(report: Mapping[str, Any]) -> str:
    """Describe a process in a few lines of plain text; control characters from brokers, sinks and hosts are escaped."""
    if "consumer_group" in report:
        lines = _describe_pipeline(report)
    elif "waits_for" in report:
        lines = _describe_host(report)
    else:
        lines = [f"worker {report.get('worker')} (process {report.get('pid')})"]
    return "\n".join(map(escape_control, [*lines, *(f"  PROBLEM: {problem}" for problem in report["problems"])]))


def _describe_pipeline(report: Mapping[str, Any]) -> list[str]:
    engines, tasks, letters = report["engines"], report["tasks"], report["dead_letters"]
    running = sum(engine["state"] == "running" for engine in engines)
    lines = [
        f"pipeline {report['consumer_group']} on {report['brokers']}, worker {report['worker']} (process "
        f"{report['pid']}): {report['state']}, started {format_seconds(report['run_seconds'])} ago"
    ]
    address, web = report.get("metrics"), report.get("web")
    endpoint = [("web", web)] if web else []
    endpoint += [("metrics", f"{address}/metrics")] if address else []
    if not engines:
        return lines + [f"  {name}  {text}" for name, text in endpoint]
    lag = "not known yet" if report["lag"] is None else f"{report['lag']:,}"
    kinds = ", ".join(f"{number:,} {kind}" for kind, number in sorted(letters["kinds"].items()))
    rows = [
        ("engines", f"{running} of {len(engines)} running, {format_count(report['partitions'], 'partition')}"),
        ("messages", f"{report['messages_done']:,} done, {report['messages_per_second']:,.0f}/s"),
        ("lag", f"{lag}, {report['in_flight']:,} in flight"),
        ("tasks", ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in tasks.items())),
        ("dead letters", f"{letters['written']:,}" + (f" ({kinds})" if kinds else "")),
        *(("PAUSED", describe_pause(pause)) for pause in report.get("paused", ())),
        *((f"{name.removeprefix('sinks.')}", _describe_sink(sink)) for name, sink in sorted(report["sinks"].items())),
        *(("waiting for", f"{name}: {why}") for name, why in sorted(report["waits_for"].items())),
        *endpoint,
    ]
    if letters["dropped"]:
        rows.append(("DROPPED", format_count(letters["dropped"], "dead letter")))
    if report["recorder"]["dropped"]:
        rows.append(("not recorded", f"{report['recorder']['dropped']:,} rows and events"))
    width = max(len(name) for name, _ in rows)
    return lines + [f"  {name.ljust(width)}  {text}" for name, text in rows]


def describe_pause(pause: Mapping[str, Any]) -> str:
    """Describe a pause that a user has set.

    Example:
        >>> describe_pause({"partition": 3, "left_seconds": 75.2, "by": "ann"})
        'partition 3 by ann, for another 1 min 15 s'
    """
    what = "all partitions" if pause["partition"] is None else f"partition {pause['partition']}"
    return f"{what} by {pause['by']}, for another {format_seconds(round(pause['left_seconds']))}"


def _describe_sink(sink: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{number:,} {name}"
        for name, number in (("delivered", sink["delivered_payloads"]), ("rejected", sink["refused"]))
        if number or name == "delivered"
    )


def _describe_host(report: Mapping[str, Any]) -> list[str]:
    holder = report["waits_for"]
    about = f"trigger host of {report['list']} (process {report['pid']})"
    address, web = report.get("metrics"), report.get("web")
    endpoint = [f"  web           {web}"] if web else []
    endpoint += [f"  metrics       {address}/metrics"] if address else []
    if holder is not None:
        text = f"{about}: standing by; process {holder['process']} on {holder['host']} runs the list"
        return [text, *endpoint]
    if report["store"] is None:
        return [about, *endpoint]
    rows = [f"  triggers      {report['running']:,}", f"  store         {report['store']}", *endpoint]
    return [f"{about}: running", *rows]


def _describe_nothing(config: Path | None) -> str:
    if config is None:
        return "this user runs no pipeline or trigger host on this machine; to start one, see tidemill run --help"
    return (
        f"this user runs nothing with {config} on this machine; use the file and the environment that the process was "
        "started with"
    )
