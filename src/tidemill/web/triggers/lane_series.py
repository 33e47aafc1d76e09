"""Time series of the lanes of shared streams, for charts, from recorded counts."""

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
    """Events per second; each series is a list with null where no value is known."""

    at: list[float] = Field(description="Seconds since the epoch.")
    broadcast: list[float | None] = Field(description="Events sent to subscribers.")
    resolved: list[float | None] = Field(description="Events that all subscribers have resolved.")
    advanced: list[float | None] = Field(description="Events acknowledged to the producer.")


def read_lane_series(
    archive: Archive, recording: str, seconds: int, stream: str | None, lane: str | None
) -> LaneSeries:
    """Return the time series of lanes; blocks.

    Args:
        archive: The recordings.
        recording: The name of the host's recordings.
        seconds: The length of the period up to now.
        stream: The name of a stream; None: all streams.
        lane: The name of a lane of the stream; None: all lanes.
    """
    step, now = choose_step(seconds), time.time()
    since = (int(now) - seconds) // step * step
    chosen = RunFilter(recording=recording)
    counts = archive.read_counts(chosen, since * _MILLION, (int(now) + 1) * _MILLION, step)
    return build_lane_series(counts, step, now, stream, lane)


def build_lane_series(
    counts: Sequence[Counts], step_seconds: int, now: float, stream: str | None, lane: str | None
) -> LaneSeries:
    """Return counts as rates per second; a missing step yields nulls."""
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
