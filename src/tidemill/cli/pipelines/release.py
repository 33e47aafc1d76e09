"""`tidemill release`: releases the failure brakes of a running pipeline."""

from __future__ import annotations

from typing import Any

import typer

from tidemill.cli.options import ConfigPath
from tidemill.cli.reporting import reporting


def release(
    config: ConfigPath = None,
) -> None:
    """Dead-letter the messages that the failure brake of a running pipeline holds, so that it continues.

    Applies to the pipeline of CONFIG on this machine. If messages still fail, the brake engages again.
    """
    with reporting():
        from tidemill.config.loading import load_settings
        from tidemill.runtime.sockets.pipeline_socket import release_brakes

        for report in release_brakes(load_settings(config).kafka):
            typer.echo(describe_release(report))


def describe_release(report: dict[str, Any]) -> str:
    """Describe a driver's answer in one line.

    Example:
        >>> describe_release({"worker": "w", "pid": 7, "engines": [{"slot": 0, "held": 3}]})
        'worker w (process 7): engine 0: 3 held messages are dead-lettered'
    """
    if "error" in report and "worker" not in report:  # the answer does not name its worker
        return f"a pipeline: {report['error']}"
    about = f"worker {report['worker']} (process {report['pid']})"
    if "error" in report:
        return f"{about}: {report['error']}"
    released = report["engines"]
    if not released:
        return f"{about}: no failure brake is on, and no message is held"
    parts = [f"engine {engine['slot']}: {_count_held(engine['held'])}" for engine in released]
    return f"{about}: {'; '.join(parts)}"


def _count_held(count: int) -> str:
    return f"{count:,} held message{'s are' if count != 1 else ' is'} dead-lettered"
