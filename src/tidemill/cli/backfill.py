"""`tidemill backfill`: runs a handler over the existing messages of a topic, until all of them are done."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tidemill.cli.leaving import LEAVE_SECONDS, leave_within
from tidemill.cli.options import ConfigPath, HandlerName
from tidemill.cli.reporting import print_error, reporting
from tidemill.core.errors import TidemillError
from tidemill.runtime.exitcode import ExitCode

if TYPE_CHECKING:
    from tidemill.spark.bounded.run import BoundedProgress

_REFRESH_SECONDS = 0.25
_WHERE = "an offset, a time with its zone (2026-05-01T00:00:00Z), earliest or latest"


def backfill(
    handler: HandlerName,
    start: Annotated[str, typer.Option("--from", metavar="TIME|OFFSET", help=f"Where to begin: {_WHERE}.")],
    outcomes: Annotated[
        Path,
        typer.Option(
            "--outcomes", metavar="DIR", help="A folder for the outcomes; the folder of a stopped backfill resumes it."
        ),
    ],
    config: ConfigPath = None,
    end: Annotated[str, typer.Option("--to", metavar="TIME|OFFSET", help="Where to end, in the same form.")] = "latest",
    range_messages: Annotated[
        int | None, typer.Option("--range-messages", metavar="N", min=1, help="The most messages in a range.")
    ] = None,
    whole_partitions: Annotated[
        bool, typer.Option("--whole-partitions", help="Do not split partitions, so that each is processed in order.")
    ] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No progress bar, even on a terminal.")] = False,
) -> None:
    """Run a handler over the existing messages of a topic.

    Joins no consumer group and commits nothing: a live pipeline can run at the same time. Outcomes are written to DIR
    as Parquet, one row per message; the same command again does what is left.
    """
    with reporting():
        from tidemill.config.loading import load_settings

        settings = load_settings(config)
        from tidemill.cli.handlers import load_handler

        instance = load_handler(handler)
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
        with show_progress(run.progress, plain=plain):
            code = run.run()
        if isinstance(run.error, TidemillError):
            # It was logged as well, but the log may go elsewhere.
            print_error(run.error)
        else:
            typer.echo(summarize(run.progress(), run.gap), err=True)
        if code is ExitCode.STOPPED and not run.progress().parts:  # the start was ended
            leave_within(LEAVE_SECONDS, code)
        raise typer.Exit(code)


def summarize(progress: BoundedProgress, gap: int) -> str:
    """Describe in one line what a run did."""
    parts = [f"{progress.messages_done:,} messages done", f"{progress.dead_lettered:,} dead letters"]
    if gap:
        parts.append(f"{gap:,} offsets were deleted by the broker before they could be read")
    return ", ".join(parts)


@contextlib.contextmanager
def show_progress(progress: Callable[[], BoundedProgress], *, plain: bool = False) -> Iterator[None]:
    """Show a bar while the block runs, if standard error is a terminal.

    Args:
        progress: Returns the run's progress; called from a thread.
        plain: Show nothing.
    """
    if plain or not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    ended = threading.Event()
    # Log lines go through sys.stderr, which the display replaces: they appear above the bar.
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting Spark and the engines", total=None)

        def refresh() -> None:
            while not ended.wait(_REFRESH_SECONDS):
                # A failing display must not make the run fail.
                with contextlib.suppress(Exception):
                    now = progress()
                    if now.total:
                        bar.update(task, description=_describe(now), completed=now.passed, total=now.total)

        thread = threading.Thread(target=refresh, name="tidemill-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)


def _describe(now: BoundedProgress) -> str:
    text = f"part {now.parts_done} of {now.parts}"
    if now.dead_lettered:
        text += f", {now.dead_lettered:,} dead letters"
    if now.stalled:
        text += ", waiting for " + "; ".join(f"{name}: {why}" for name, why in sorted(now.stalled.items()))
    return text
