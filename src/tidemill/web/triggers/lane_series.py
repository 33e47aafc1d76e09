"""What happened in the lanes of shared streams over time, for charts, from what was recorded."""

from __future__ import annotations

import time
from collections.abc import Sequence

from pydantic import BaseModel, Field

from tidemill.recorder.format.counts import Counts, name_stream_lane
from tidemill.recorder.reading.runs import RunFilter
from tidemill.web.recorded.archive import Archive
from tidemill.web.series import choose_step, find_finished

_MILLION = 1_000_000


class LaneSeries(BaseModel):
    """Events per second, a list each; null where nothing is known."""

    at: list[float] = Field(description="Seconds since the epoch.")
    broadcast: list[float | None] = Field(description="Events that were handed to subscribers.")
    resolved: list[float | None] = Field(description="Events with which all subscribers have dealt.")
    advanced: list[float | None] = Field(description="Events that the producer was told about.")


def read_lane_series(
    archive: Archive, recording: str, seconds: int, stream: str | None, lane: str | None
) -> LaneSeries:
    """Return a series; blocks.

    Args:
        archive: What was recorded.
        recording: The name of the host's recordings.
        seconds: How far back.
        stream: Of one stream, by its name; None: of all.
        lane: Of one lane of it, by its name; None: of all.
    """
    step, now = choose_step(seconds), time.time()
    since = (int(now) - seconds) // step * step
    chosen = RunFilter(recording=recording)
    counts = archive.read_counts(chosen, since * _MILLION, (int(now) + 1) * _MILLION, step)
    return build_lane_series(counts, step, now, stream, lane)


def build_lane_series(
    counts: Sequence[Counts], step_seconds: int, now: float, stream: str | None, lane: str | None
) -> LaneSeries:
    """Return counts as numbers per second; where a step is missing, nothing is known."""
    series = LaneSeries(at=[], broadcast=[], resolved=[], advanced=[])
    before: int | None = None
    for point in find_finished(counts, step_seconds, now):
        if before is not None and point.at > before + step_seconds:
            _add(series, before + step_seconds, (None, None, None))
        before = point.at
        lanes = [found for name, found in point.lanes.items() if _is_wanted(name, stream, lane)]
        sums = [sum(numbers) for numbers in zip(*((x.broadcast, x.resolved, x.advanced) for x in lanes), strict=True)]
        broadcast, resolved, advanced = (number / step_seconds for number in sums or (0, 0, 0))
        _add(series, point.at, (broadcast, resolved, advanced))
    return series


def _is_wanted(name: str, stream: str | None, lane: str | None) -> bool:
    if stream is None:
        return True
    return name == name_stream_lane(stream, lane) if lane is not None else name.startswith(name_stream_lane(stream, ""))


def _add(series: LaneSeries, at: int, values: tuple[float | None, float | None, float | None]) -> None:
    series.at.append(float(at))
    for column, value in zip((series.broadcast, series.resolved, series.advanced), values, strict=True):
        column.append(value)
