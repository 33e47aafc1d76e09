"""Texts of status lines and summaries for a state and a width. Pure.

A line consists of parts. If it does not fit, the least important parts are shortened and then left out; the reasons why
a pipeline waits, and dropped letters, are left out last.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tidemill.core.wording import format_count
from tidemill.runtime.log.console import escape_control

if TYPE_CHECKING:
    from tidemill.spark.bounded.run import BoundedProgress
    from tidemill.spark.progress import PipelineProgress
    from tidemill.spark.run_state import RunState

_SEPARATOR = " | "
#: The narrowest terminal in which the line must be useful.
LEAST_WIDTH = 40


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a line.

    Attributes:
        rank: The importance; parts with the lowest rank are left out first.
        texts: The texts to choose from, longest first.
    """

    rank: int
    texts: tuple[str, ...]


def count_cells(text: str) -> int:
    r"""Return the number of terminal columns that a text takes.

    Example:
        >>> count_cells("ab"), count_cells("漢字"), count_cells("e\u0301")
        (2, 4, 1)
    """
    if text.isascii():
        return len(text)
    wide = sum(unicodedata.east_asian_width(char) in "WF" for char in text)
    return len(text) + wide - sum(bool(unicodedata.combining(char)) for char in text)


def cut(text: str, width: int) -> str:
    """Return a text truncated to a width.

    Example:
        >>> cut("no broker answers", 12)
        'no broker...'
    """
    if count_cells(text) <= width:
        return text
    end = "..." if width > 6 else ""
    while text and count_cells(text) > width - len(end):
        text = text[:-1]
    return text.rstrip() + end


def fit(parts: Sequence[Part], width: int) -> str:
    """Join parts into a line that fits a width.

    Example:
        >>> fit([Part(1, ("2 of 2 engines", "2 engines")), Part(2, ("1,234 messages done",))], 30)
        '1,234 messages done'
    """
    chosen = [0] * len(parts)
    shown = set(range(len(parts)))

    def line() -> str:
        return _SEPARATOR.join(parts[index].texts[chosen[index]] for index in sorted(shown))

    by_rank = sorted(shown, key=lambda index: parts[index].rank)
    for index in by_rank:
        while count_cells(line()) > width and chosen[index] + 1 < len(parts[index].texts):
            chosen[index] += 1
    for index in by_rank[:-1]:
        if count_cells(line()) > width:
            shown.discard(index)
    # Parts that were shortened before others were left out may fit in full now.
    for index in reversed(by_rank):
        while index in shown and chosen[index] > 0:
            chosen[index] -= 1
            if count_cells(line()) > width:
                chosen[index] += 1
                break
    return cut(line(), width)


def format_status(state: RunState, progress: PipelineProgress, rate: float, width: int) -> str:
    """Return the status line of a pipeline.

    Args:
        state: The state of the run.
        progress: The totals over its engines.
        rate: Messages per second.
        width: The number of columns.
    """
    parts: list[Part] = []
    if state.phase.value == "draining":
        parts += _describe_drain(state, progress)
    elif state.phase.value != "running":
        return cut(escape_control(state.describe_step() or state.phase.value), width)
    elif not any(engine.progress for engine in progress.engines):
        return cut(f"the engines are starting ({state.seconds:.0f} s)", width)
    else:
        parts += _describe_work(progress, rate)
    if progress.dead_lettered:
        letters = format_count(progress.dead_lettered, "dead letter")
        parts.append(Part(4, (letters, f"{_short(progress.dead_lettered)} dead")))
    if progress.letters_dropped:
        dropped = progress.letters_dropped
        parts.append(Part(8, (f"{format_count(dropped, 'dead letter')} DROPPED", f"{_short(dropped)} DROPPED")))
    if progress.pauses:
        left = format_seconds(round(max(pause.left_seconds for pause in progress.pauses)))
        parts.append(Part(8, (f"PAUSED by {escape_control(progress.pauses[0].by)}, for another {left}", "PAUSED")))
    if progress.waits:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(progress.waits.items()))
        shortest = max(12, width - 22)
        texts = (f"waiting for {reasons}", cut(f"waiting for {reasons}", shortest))
        parts.append(Part(7, tuple(map(escape_control, texts))))
    return fit(parts, width)


def _describe_drain(state: RunState, progress: PipelineProgress) -> list[Part]:
    tasks = progress.tasks_running + progress.tasks_queued + progress.tasks_retrying
    left = state.left_seconds or 0.0
    text = f"draining, up to {left:.0f} s, {format_count(tasks, 'task')} left"
    return [
        Part(9, (text, f"draining, {left:.0f} s, {_short(tasks)} tasks")),
        Part(
            5, (f"{format_count(progress.in_flight, 'message')} in flight", f"{_short(progress.in_flight)} in flight")
        ),
    ]


def _describe_work(progress: PipelineProgress, rate: float) -> list[Part]:
    running, slots = sum(engine.state == "running" for engine in progress.engines), len(progress.engines)
    engines = f"{running} of {slots} engines"
    partitions = format_count(len(progress.partitions), "partition")
    done, per_second = progress.messages_done, f"{rate:,.0f}/s"
    states = (
        ("queued", progress.tasks_queued),
        ("in backoff", progress.tasks_retrying),
        ("failed", progress.tasks_failed),
    )
    tasks, lag = f"{progress.tasks_running:,} running", format_lag(progress)
    return [
        Part(1 if running == slots else 6, (f"{engines}, {partitions}", engines)),
        Part(9, (f"{format_count(done, 'message')} done, {per_second}", f"{_short(done)} done, {_short(rate)}/s")),
        Part(2, ("tasks: " + ", ".join([tasks, *(f"{n:,} {name}" for name, n in states if n)]), tasks)),
        Part(5, (f"lag {lag}, {progress.in_flight:,} in flight", f"lag {_format_short_lag(progress)}")),
    ]


def format_lag(progress: PipelineProgress) -> str:
    """Return the number of uncommitted messages, and how many partitions have no known lag yet."""
    known, owned = len(progress.lag), len(progress.partitions)
    if not known and owned:
        return "not known yet"
    unknown = f" ({owned - known:,} of {owned:,} partitions not known yet)" if known < owned else ""
    return f"{sum(progress.lag.values()):,}{unknown}"


def _format_short_lag(progress: PipelineProgress) -> str:
    return _short(sum(progress.lag.values())) if progress.lag or not progress.partitions else "?"


def format_backfill(state: RunState, progress: BoundedProgress, rate: float, width: int) -> str:
    """Return the status line of a backfill: a bar, the rate, and the remaining time.

    Args:
        state: The state of the run.
        progress: The totals over its engines.
        rate: Messages per second.
        width: The number of columns.
    """
    if not progress.total:
        return cut(escape_control(state.describe_step() or state.phase.value), width)
    share = min(1.0, progress.passed / progress.total)
    percent = f"{share:.0%}"
    of = f"{_short(progress.passed)} of {_short(progress.total)}"
    parts = [
        Part(9, (f"{_draw_bar(share, 20)} {percent}", f"{_draw_bar(share, 10)} {percent}", percent)),
        Part(6, (f"{progress.passed:,} of {progress.total:,} messages", of)),
    ]
    if state.phase.value == "draining":
        parts.insert(0, Part(9, ("stopping after the ranges in flight", "stopping")))
    elif rate > 0:
        left = format_seconds(round((progress.total - progress.passed) / rate))
        parts.append(Part(8, (f"{rate:,.0f}/s, {left} left", f"{_short(rate)}/s, {left}")))
    elif not progress.messages_done and state.phase.value == "running":
        parts.append(Part(8, (f"the engines are starting ({state.seconds:.0f} s)", "starting")))
    parts.append(Part(2, (f"{progress.parts_done} of {progress.parts} ranges",)))
    if progress.dead_lettered:
        letters = format_count(progress.dead_lettered, "dead letter")
        parts.append(Part(4, (letters, f"{_short(progress.dead_lettered)} dead")))
    if progress.waits:
        reasons = "; ".join(f"{name}: {why}" for name, why in sorted(progress.waits.items()))
        parts.append(
            Part(7, (escape_control(f"waiting for {reasons}"), escape_control(cut(f"waiting for {reasons}", 24))))
        )
    return fit(parts, width)


def _draw_bar(share: float, width: int) -> str:
    full = round(share * width)
    return f"[{'#' * full}{'.' * (width - full)}]"


def format_summary(progress: PipelineProgress, seconds: float, gap: int = 0) -> str:
    """Return the summary of a run, in a few lines.

    Args:
        progress: The totals over its engines, at the end.
        seconds: The time during which engines could work.
        gap: How many messages the broker had deleted before they were read.
    """
    done = progress.messages_done
    rate = f", {done / seconds:,.0f}/s" if seconds >= 1.0 and done else ""
    failed = f"{progress.tasks_failed:,} failed, {progress.tasks_retried:,} retried"
    rows = [
        ("messages", f"{done:,} in {format_seconds(seconds)}{rate}"),
        ("tasks", f"{progress.tasks_done:,} done, {failed}"),
    ]
    letters = _format_letters(progress.dead_lettered, progress.letter_kinds)
    if progress.letters_dropped:
        letters += f", {progress.letters_dropped:,} DROPPED"
    rows.append(("dead letters", letters))
    if progress.recorder_dropped:
        rows.append(("not recorded", f"{progress.recorder_dropped:,} rows and events"))
    for name, sink in sorted(progress.sinks.items()):
        counts = [("delivered", sink.delivered_payloads), ("rejected", sink.refused)]
        counts += [("skipped", sink.skipped), ("dead-lettered", sink.dead_lettered)]
        told = ", ".join(f"{number:,} {what}" for what, number in counts if number or what == "delivered")
        rows.append((name.removeprefix("sinks."), told))
    if progress.in_flight:
        rows.append(("left over", f"{format_count(progress.in_flight, 'message')}, which the next run processes again"))
    if gap:
        rows.append(("missing", f"{format_count(gap, 'message')}, deleted by the broker before being read"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(width)}  {text}" for name, text in rows)


def _format_letters(written: int, kinds: Mapping[str, int]) -> str:
    by_kind = ", ".join(f"{number:,} {kind}" for kind, number in sorted(kinds.items()))
    return f"{written:,} ({by_kind})" if by_kind else f"{written:,}"


def format_seconds(seconds: float) -> str:
    """Return a duration in at most two units.

    Example:
        >>> [format_seconds(number) for number in (0.26, 9, 75, 7300)]
        ['0.3 s', '9 s', '1 min 15 s', '2 h 1 min']
    """
    if seconds < 10 and seconds != int(seconds):
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _short(number: float) -> str:
    """Return a number in at most five characters, such as `12.3k`."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size * 10:
            return f"{number / size:.0f}{unit}"
        if number >= size:
            return f"{number / size:.1f}{unit}"
    return f"{number:.0f}"
