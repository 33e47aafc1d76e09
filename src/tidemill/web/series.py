"""Numbers over time, as charts show them, from what was recorded."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, Field

from tidemill.recorder.format.counts import Counts
from tidemill.runtime.loop.durations import DURATION_BOUNDS

_MINUTE = 60
#: A chart has about this many points.
_POINTS = 480
#: Counts are written once a second, so those of a step's last second come a little after its end.
_LATE_SECONDS = 2


class Series(BaseModel):
    """Numbers over time, a list each; null where nothing is known."""

    at: list[float] = Field(description="Seconds since the epoch.")
    consumed: list[float | None] = Field(description="Messages read per second.")
    done: list[float | None] = Field(description="Messages finished per second.")
    failed: list[float | None] = Field(description="Tasks that failed for good, per second.")
    retried: list[float | None] = Field(description="Attempts that failed and were followed by another, per second.")
    letters: list[float | None] = Field(description="Dead letters per second.")
    lag: list[float | None] = Field(description="Messages behind the end.")
    in_flight: list[float | None]
    task_p50: list[float | None] = Field(description="How long attempts of tasks took, in seconds.")
    task_p95: list[float | None]
    task_p99: list[float | None]


def find_quantile(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of durations that were counted in `DURATION_BOUNDS`; None: there are none.

    Within a bucket it is interpolated; of those beyond the last bound only that bound is known.

    Example:
        >>> find_quantile([0, 0, 10, *[0] * 12], 0.5)
        0.0175
    """
    wanted = sum(counts) * share
    if not wanted:
        return None
    below = 0.0
    for place, count in enumerate(counts):
        if below + count >= wanted and count:
            low = DURATION_BOUNDS[place - 1] if place else 0.0
            high = DURATION_BOUNDS[min(place, len(DURATION_BOUNDS) - 1)]
            return low + (high - low) * (wanted - below) / count
        below += count
    return DURATION_BOUNDS[-1]


def choose_step(seconds: int) -> int:
    """Return the seconds of a step; whole minutes once there are more of them than points.

    Example:
        >>> choose_step(900), choose_step(3600), choose_step(86_400)
        (2, 8, 180)
    """
    step = -(-seconds // _POINTS)
    return step if step < _MINUTE else -(-step // _MINUTE) * _MINUTE


def find_finished(counts: Sequence[Counts], step_seconds: int, now: float) -> list[Counts]:
    """Return the steps that are over; see `build_series`."""
    return [point for point in counts if point.at + step_seconds + _LATE_SECONDS <= now]


def build_series(counts: Sequence[Counts], step_seconds: int, now: float) -> Series:
    """Return counts as numbers per second; where a step is missing, nothing is known.

    A step that is not over is left out: it has the counts of a part of its time, and would look like a drop.

    Args:
        counts: In order of time.
        step_seconds: The time of each.
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
