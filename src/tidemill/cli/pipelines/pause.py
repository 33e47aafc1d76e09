"""`tidemill pause`, `resume` and `restart`: control a running pipeline; see also `release`."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer

from tidemill.cli.options import ConfigPath
from tidemill.cli.reporting import reporting
from tidemill.cli.terminal.status_text import format_seconds
from tidemill.core.errors import ConfigError
from tidemill.core.wording import format_count
from tidemill.runtime.process.exitcode import ExitCode

_SPAN = re.compile(r"(\d{1,9})(s|m|h|d)?", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
Partition = Annotated[
    int | None,
    typer.Option("--partition", metavar="N", min=0, help="Only this partition of the source topic; default: all."),
]


def pause(
    config: ConfigPath = None,
    span: Annotated[
        str,
        typer.Option("--for", metavar="TIME", help="The length of the pause, such as 90s, 15m or 4h; from 1s to 7d."),
    ] = "15m",
    partition: Partition = None,
) -> None:
    """Pause reading of the pipeline of CONFIG on this machine for a time.

    Messages in flight continue. Pausing again changes the end of the pause. A pause ends by itself, and when the
    pipeline stops.
    """
    with reporting():
        seconds = parse_span(span)
        _request(config, {"do": "pause", "seconds": seconds, "partition": partition})


def resume(config: ConfigPath = None, partition: Partition = None) -> None:
    """End the pauses of the pipeline of CONFIG on this machine."""
    with reporting():
        _request(config, {"do": "resume", "partition": partition})


def restart(
    engine: Annotated[
        int, typer.Argument(metavar="ENGINE", min=0, help="The number of the engine, from `tidemill status --json`.")
    ],
    config: ConfigPath = None,
) -> None:
    """Restart an engine of the pipeline of CONFIG on this machine.

    The engine finishes its messages and commits; the next engine of its slot takes over its partitions.
    """
    with reporting():
        _request(config, {"do": "restart", "engine": engine})


def parse_span(text: str) -> float:
    """Return a duration in seconds.

    Raises:
        ConfigError: The text is not a duration.

    Example:
        >>> parse_span("90"), parse_span("15m")
        (90.0, 900.0)
    """
    found = _SPAN.fullmatch(text.strip())
    if found is None:
        raise ConfigError(f"--for {text}: not a duration; write for example 90s, 15m, 4h or 1d")
    return float(int(found[1]) * _UNITS[found[2] or "s"])


def _request(config: Any, request: dict[str, Any]) -> None:
    from tidemill.config.loading import load_settings
    from tidemill.runtime.sockets.pipeline_socket import request_action

    reports = request_action(load_settings(config).kafka, {**request, "by": "the command line"})
    for report in reports:
        typer.echo(describe_answer(report))
    if any("error" in report for report in reports):
        raise typer.Exit(ExitCode.REMOTE)


def describe_answer(report: dict[str, Any]) -> str:
    """Describe a driver's answer in one line.

    Example:
        >>> describe_answer({"worker": "w", "pid": 7, "paused": "partition 3", "seconds": 900.0})
        'worker w (process 7): paused partition 3 for 15 min 0 s'
    """
    about = f"worker {report['worker']} (process {report['pid']})" if "worker" in report else "a pipeline"
    if "error" in report:
        return f"{about}: {report['error']}"
    if "paused" in report:
        return f"{about}: paused {report['paused']} for {format_seconds(report['seconds'])}"
    if "resumed" in report:
        return (
            f"{about}: ended {format_count(report['resumed'], 'pause')}"
            if report["resumed"]
            else f"{about}: nothing is paused"
        )
    return f"{about}: engine {report['restarted']} drains and then restarts"
