"""Output of `tidemill demo`: a live line while it runs, and the summary."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from tidemill.cli.demo import check
from tidemill.deadletters.letter import Letter
from tidemill.spark.progress import PipelineProgress

Show = Callable[[int, str], None]
#: Without a terminal: the interval of progress lines.
_PLAIN_SECONDS = 2.0
#: A narrower terminal shows no bars and no numbers of the input, so that no number is truncated.
_WIDE = 70


@contextmanager
def show_live(console: Console, total: int) -> Iterator[Show]:
    """Yield a function that shows the number of committed lines, and a text next to it."""
    if not console.is_terminal:
        yield _show_plain(console, total)
        return
    bar_columns = () if console.width < _WIDE else (BarColumn(bar_width=16),)
    time_columns = () if console.width < _WIDE else (TimeElapsedColumn(),)
    text_column = TextColumn("{task.description}")
    columns = (SpinnerColumn(), *bar_columns, MofNCompleteColumn(), *time_columns, text_column)
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("", total=total)
        yield lambda done, text: progress.update(bar, completed=done, description=text)


def _show_plain(console: Console, total: int) -> Show:
    started = time.monotonic()
    next_at = 0.0

    def show(done: int, text: str) -> None:
        nonlocal next_at
        now = time.monotonic() - started
        if now >= next_at or done >= total:
            next_at = now + _PLAIN_SECONDS
            line = f"{now:5.1f} s  {done:,} of {total:,} lines committed, {text}"
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return show


def format_progress(progress: PipelineProgress) -> str:
    """Return a short description of the engines' work."""
    running = [engine for engine in progress.engines if engine.progress is not None]
    if not running:
        return "Spark is starting"
    text = f"{progress.tasks_done} tasks done, {progress.tasks_running} running, {progress.tasks_queued} queued"
    if progress.tasks_failed:
        text += f", {progress.tasks_failed} failed"
    stalled = [f"{name}: {reason}" for name, reason in sorted(progress.waits.items())]
    return "; ".join([f"{len(running)} engines: {text}", *stalled])


def show_summary(
    console: Console,
    expected: Mapping[check.Position, check.DemoLine | None],
    outputs: check.Outputs,
) -> None:
    """Show awk's counts next to the counts of the input, the slowest tasks, and the dead letters."""
    wide = console.width >= _WIDE
    console.print(_build_status_table(expected, outputs, wide=wide))
    console.print(_build_slowest_table(check.find_slowest(outputs.reports), wide=wide))
    for letter in outputs.letters:
        _show_letter(console, letter)
    by_partition = ", ".join(f"{number}: {offset:,}" for number, offset in sorted(outputs.committed.items()))
    console.print(f"Offsets committed: {sum(outputs.committed.values()):,} (partition {by_partition})")


def _build_status_table(
    expected: Mapping[check.Position, check.DemoLine | None], outputs: check.Outputs, *, wide: bool
) -> Table:
    want = check.add_up_input(expected)
    found = check.add_up_reports(outputs.reports, outputs.outcomes)
    table = Table("status", title="Counted by awk, per status code", title_justify="left")
    names = ("lines", "bytes", "lines in the input", "bytes in the input") if wide else ("lines", "bytes")
    for name in names:
        table.add_column(name, justify="right")
    for status in sorted(set(want.lines) | set(found.lines)):
        numbers = (found.lines[status], found.bytes[status], want.lines[status], want.bytes[status])
        table.add_row(str(status), *(f"{number:,}" for number in numbers[: len(names)]))
    table.add_section()
    numbers = (found.lines.total(), found.bytes.total(), want.lines.total(), want.bytes.total())
    table.add_row("all", *(f"{number:,}" for number in numbers[: len(names)]))
    return table


def _build_slowest_table(reports: Sequence[check.DemoResult], *, wide: bool) -> Table:
    table = Table(title="Slowest tasks", title_justify="left")
    table.add_column("task", overflow="fold")
    for name in ("status", "partition", "lines", "ms") if wide else ("status", "ms"):
        table.add_column(name, justify="right")
    for report in reports:
        facts = (report.status, report.partition, report.lines) if wide else (report.status,)
        table.add_row(report.task_id, *map(str, facts), f"{report.seconds * 1000:.1f}")
    return table


def _show_letter(console: Console, letter: Letter) -> None:
    positions = ", ".join(f"{source.topic}/{source.partition}/{source.offset}" for source in letter.sources)
    text = f"Dead letter ({letter.kind}) for {positions}: {letter.error}"
    console.print(text, markup=False, highlight=False, soft_wrap=True)
