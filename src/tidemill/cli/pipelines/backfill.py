"""`tidemill backfill`: runs a handler over the existing messages of a topic, until all of them are done."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from tidemill.cli.leaving import LEAVE_SECONDS, leave_within
from tidemill.cli.options import ConfigPath, HandlerName
from tidemill.cli.reporting import reporting
from tidemill.runtime.process.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.spark.bounded.run import BoundedProgress
    from tidemill.spark.progress import PipelineProgress
    from tidemill.spark.run_state import RunState

#: The remaining time is estimated from the rate over this period, which spans starts and ends of ranges.
_RATE_SECONDS = 20.0
_WHERE = "an offset, a time with its zone (2026-05-01T00:00:00Z), earliest or latest"


def backfill(
    handler: HandlerName,
    start: Annotated[str, typer.Option("--from", metavar="TIME|OFFSET", help=f"Where to start: {_WHERE}.")],
    outcomes: Annotated[
        Path,
        typer.Option(
            "--outcomes",
            metavar="DIR",
            help="A folder for the outcomes; repeat the folder of a stopped backfill to resume it.",
        ),
    ],
    config: ConfigPath = None,
    end: Annotated[str, typer.Option("--to", metavar="TIME|OFFSET", help="Where to end, in the same form.")] = "latest",
    range_messages: Annotated[
        int | None, typer.Option("--range-messages", metavar="N", min=1, help="At most N messages per range.")
    ] = None,
    whole_partitions: Annotated[
        bool, typer.Option("--whole-partitions", help="Do not split partitions, so that each is processed in order.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Log a line every 10 s, even on a terminal.")] = False,
) -> None:
    """Run a handler over the existing messages of a topic.

    A backfill joins no consumer group and commits no offsets, so a live pipeline can run at the same time. It writes
    outcomes to DIR as Parquet, one row per message. To resume it, repeat the command.
    """
    with reporting():
        from tidemill.config.loading import load_settings

        settings = load_settings(config)
        from tidemill.cli.pipelines.handlers import load_handler

        instance = load_handler(handler)
        from tidemill.cli.terminal.status_text import format_backfill
        from tidemill.cli.terminal.watching import show_summary, watch
        from tidemill.spark.bounded.backfill import Backfill

        run = Backfill(
            instance,
            settings=settings,
            start=start,
            end=end,
            outcomes=outcomes,
            range_messages=range_messages,
            whole_partitions=whole_partitions,
        )

        def describe(rate: float, width: int) -> str:
            return format_backfill(run.state(), run.progress(), rate, width)

        with watch(
            describe, lambda: (run.state(), run.progress()), list_fields, plain=plain, rate_seconds=_RATE_SECONDS
        ):
            code = run.run(tell=False)
        if run.error is None or run.progress().messages_done:
            show_summary(run.progress(), run.state().work_seconds, run.gap)
        run.tell_failure()
        if code is ExitCode.STOPPED and not run.progress().parts:  # startup was interrupted
            leave_within(LEAVE_SECONDS, code)
        raise typer.Exit(code)


def list_fields(state: RunState, progress: PipelineProgress, rate: float) -> dict[str, Any]:
    """Return the fields of a progress log entry."""
    fields: dict[str, Any] = {"state": state.phase.value}
    if state.step:
        fields["waits_for"] = state.describe_step()
    if getattr(progress, "total", 0):
        now = cast("BoundedProgress", progress)
        fields |= {"passed": now.passed, "total": now.total, "per_second": round(rate)}
        if rate > 0:
            fields["left_seconds"] = round((now.total - now.passed) / rate)
        fields |= {"ranges_done": now.parts_done, "ranges": now.parts}
    if progress.dead_lettered:
        fields["dead_lettered"] = progress.dead_lettered
    if progress.waits:
        fields["waits_for"] = progress.waits
    return fields
