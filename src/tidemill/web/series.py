"""Time series for charts, computed from recorded counts."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from tidemill.recorder.format.counts import Counts
from tidemill.runtime.loop.durations import DURATION_BOUNDS

_MINUTE = 60
#: Charts have about this many points.
_POINTS = 480
#: Counts are written once a second, so the counts of a step's last second arrive shortly after the step's end.
_LATE_SECONDS = 2


class Series(BaseModel):
    """Time series; each is a list with null where no value is known."""

    at: list[float] = Field(description="Seconds since the epoch.")
    consumed: list[float | None] = Field(description="Messages read per second.")
    done: list[float | None] = Field(description="Messages finished per second.")
    failed: list[float | None] = Field(description="Tasks that failed for good, per second.")
    retried: list[float | None] = Field(description="Failed attempts that were retried, per second.")
    letters: list[float | None] = Field(description="Dead letters per second.")
    lag: list[float | None] = Field(description="Messages of the topic that are not read yet.")
    in_flight: list[float | None] = Field(description="Messages being processed.")
    task_p50: list[float | None] = Field(description="Median duration of task attempts, in seconds.")
    task_p95: list[float | None] = Field(description="95th percentile, in seconds.")
    task_p99: list[float | None] = Field(description="99th percentile, in seconds.")


def find_quantile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of durations counted in the buckets of `DURATION_BOUNDS`; None without any durations.

    Interpolates within a bucket; returns the last bound for durations beyond it.

    Example:
        >>> find_quantile([0, 0, 10, *[0] * 12], 0.5)
        0.0175
    """
    wanted = sum(counts) * share
    if not wanted:
        return None
    below = 0.0
    for bucket, count in enumerate(counts):
        if below + count >= wanted and count:
            low = DURATION_BOUNDS[bucket - 1] if bucket else 0.0
            high = DURATION_BOUNDS[min(bucket, len(DURATION_BOUNDS) - 1)]
            return low + (high - low) * (wanted - below) / count
        below += count
    return DURATION_BOUNDS[-1]


def choose_step(seconds: int) -> int:
    """Return the length of a step in seconds, rounded up to whole minutes from one minute on.

    Example:
        >>> choose_step(900), choose_step(3600), choose_step(86_400)
        (2, 8, 180)
    """
    step = -(-seconds // _POINTS)
    return step if step < _MINUTE else -(-step // _MINUTE) * _MINUTE


def find_finished(counts: Sequence[Counts], step_seconds: int, now: float) -> list[Counts]:
    """Return the steps that are complete; see `build_series`."""
    return [point for point in counts if point.at + step_seconds + _LATE_SECONDS <= now]


def build_series(counts: Sequence[Counts], step_seconds: int, now: float) -> Series:
    """Return counts as rates per second; a missing step yields nulls.

    An unfinished step is left out: its counts cover only a part of its time and would look like a drop.

    Args:
        counts: The counts, in order of time.
        step_seconds: The length of each step.
        now: Seconds since the epoch.
    """
    over = find_finished(counts, step_seconds, now)
    columns: dict[str, list[float | None]] = {name: [] for name in Series.model_fields}
    before: int | None = None
    for point in over:
        if before is not None and point.at > before + step_seconds:
            _add(columns, {"at": float(before + step_seconds)})
        before = point.at
        _add(columns, _describe(point, step_seconds))
    return Series(**columns)


def _add(columns: dict[str, list[float | None]], values: dict[str, float | None]) -> None:
    for name, column in columns.items():
        column.append(values.get(name))


def _describe(point: Counts, step_seconds: int) -> dict[str, float | None]:
    return {
        "at": float(point.at),
        "consumed": point.consumed / step_seconds,
        "done": point.messages_done / step_seconds,
        "failed": point.tasks_failed / step_seconds,
        "retried": point.tasks_retried / step_seconds,
        "letters": point.dead_lettered / step_seconds,
        "lag": point.lag,
        "in_flight": point.in_flight,
        "task_p50": find_quantile(point.attempt_counts, 0.5),
        "task_p95": find_quantile(point.attempt_counts, 0.95),
        "task_p99": find_quantile(point.attempt_counts, 0.99),
    }
