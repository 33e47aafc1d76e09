"""The counts of a mapped task for display: bars, texts and rates. Pure."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from tidemill.store.calls.instance_calls import TaskRecord


class CountsOfElements(Protocol):
    """The counts of a mapped task, as the store and the API give them."""

    @property
    def arrived(self) -> int: ...
    @property
    def closed(self) -> bool: ...
    @property
    def unfinished(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def success(self) -> int: ...
    @property
    def failed(self) -> int: ...
    @property
    def upstream_failed(self) -> int: ...
    @property
    def skipped(self) -> int: ...
    @property
    def stop(self) -> str | None: ...


class BarPart(NamedTuple):
    """A part of a bar: the elements in one state. `start` and `width` are shares of the bar."""

    state: str
    text: str
    elements: int
    start: float
    width: float


def list_parts(counts: CountsOfElements) -> list[BarPart]:
    """Return the parts of the bar of a mapped task that have elements; waiting ones are last."""
    failed = counts.failed + counts.upstream_failed
    ended = counts.success + failed + counts.skipped
    waiting = max(0, counts.arrived - ended - counts.running)
    found = [
        ("success", "success", counts.success),
        ("failed", "failed", failed),
        ("skipped", "skipped", counts.skipped),
        ("running", "running", counts.running),
        ("none", "waiting", waiting),
    ]
    total = sum(count for _, _, count in found) or 1
    parts, start = [], 0.0
    for state, text, count in found:
        if count:
            parts.append(BarPart(state, text, count, start / total, count / total))
        start += count
    return parts


def count_ended(counts: CountsOfElements) -> int:
    """Return how many elements have ended; a source that failed counts as a failed element, but is none."""
    return min(counts.arrived, counts.success + counts.failed + counts.upstream_failed + counts.skipped)


def format_counts(counts: CountsOfElements) -> str:
    """Return the counts of a mapped task in one line.

    Example:
        >>> from tidemill.store.calls.instance_calls import MapCounts
        >>> format_counts(MapCounts(1200, False, 30, 10, 8, 18, 2, 0, 0, None))
        '20 of 1,200 so far: 18 success, 2 failed, 8 running, 1,172 waiting'
        >>> format_counts(MapCounts(0, True, 0, 0, 0, 0, 0, 0, 0, None))
        'no elements'
    """
    if not counts.arrived:
        return "no elements" if counts.closed else "no elements yet"
    parts = ", ".join(f"{part.elements:,} {part.text}" for part in list_parts(counts))
    total = f"{counts.arrived:,}" + ("" if counts.closed else " so far")
    return f"{count_ended(counts):,} of {total}: {parts}"


def compute_rate(task: TaskRecord, run_started_us: int | None, now_us: float) -> float | None:
    """Return how many elements of a mapped task ended per second since it began; None: none has.

    Args:
        task: The mapped task.
        run_started_us: When its run started.
        now_us: The time.
    """
    counts = task.elements
    start_us = task.started_us if task.started_us is not None else run_started_us
    if counts is None or start_us is None:
        return None
    ended = counts.success + counts.failed + counts.upstream_failed + (0 if counts.stop else counts.skipped)
    seconds = ((now_us if task.ended_us is None else task.ended_us) - start_us) / 1e6
    return round(ended / max(seconds, 0.001), 2) if ended else None


def format_rate(rate: float | None) -> str:
    """Return a rate in elements per second; '' if there is none.

    Example:
        >>> format_rate(731.2), format_rate(0.25), format_rate(None)
        ('731/s', '0.25/s', '')
    """
    if rate is None:
        return ""
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.2g}/s"
