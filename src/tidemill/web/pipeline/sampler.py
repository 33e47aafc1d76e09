"""Samples a pipeline once a second: the time series that charts, rates and trends need.

Memory is bounded: the last 15 minutes are stored, about 200 bytes a second. Adjusting the wall clock changes neither
rates nor trends; charts move along with it, since only the newest wall clock time is used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from tidemill.spark.progress import PipelineProgress
from tidemill.web.pipeline.models import Lag
from tidemill.web.series import Series, find_quantile

KEPT_SECONDS = 900
#: Rates and percentiles cover this many samples; trends cover a minute.
_RATE_SAMPLES = 10
_TREND_SAMPLES = 60


class Sample(NamedTuple):
    """A sample, at a time in seconds since boot; all values are totals, except lag and in flight."""

    since_boot: float
    consumed: int
    done: int
    delivered: int
    failed: int
    retried: int
    letters: int
    lag: int | None
    in_flight: int
    attempts: tuple[int, ...]
    cpu_seconds: dict[int, float]


def subtract_counts(later: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """Return the difference of two lists of counts; an empty earlier list means zeros."""
    return [count - (earlier[index] if earlier else 0) for index, count in enumerate(later)]


class PipelineSampler:
    """Stores samples; used on one thread."""

    def __init__(self) -> None:
        self._samples: deque[Sample] = deque(maxlen=KEPT_SECONDS + 1)
        self._booted_at = 0.0

    def add(self, at: float, since_boot: float, progress: PipelineProgress) -> None:
        """Add a sample; it replaces an earlier sample of the same moment.

        Args:
            at: Seconds since the epoch, by a clock that may be adjusted at any time.
            since_boot: Seconds since the machine booted, including sleep.
            progress: The totals at that moment.
        """
        self._booted_at = at - since_boot
        if self._samples and since_boot <= self._samples[-1].since_boot:
            self._samples.pop()
        cpu = {engine.slot: engine.progress.cpu_seconds for engine in progress.engines if engine.progress}
        sample = Sample(
            since_boot,
            progress.consumed,
            progress.messages_done,
            progress.delivered,
            progress.tasks_failed,
            progress.tasks_retried,
            progress.dead_lettered,
            sum(progress.lag.values()) if progress.lag else None,
            progress.in_flight,
            tuple(progress.attempts.counts),
            cpu,
        )
        self._samples.append(sample)

    def _pick(self, samples: int) -> tuple[Sample, Sample] | None:
        if len(self._samples) < 2:
            return None
        return self._samples[max(0, len(self._samples) - 1 - samples)], self._samples[-1]

    def rate(self, name: str) -> float:
        """Return the rate of a total, per second, over the last samples."""
        picked = self._pick(_RATE_SAMPLES)
        if picked is None:
            return 0.0
        first, last = picked
        risen: int = getattr(last, name) - getattr(first, name)
        return max(0.0, risen / (last.since_boot - first.since_boot))

    def cpu_percent(self, slot: int) -> float | None:
        """Return an engine's CPU use in percent of a core; None if not known yet."""
        picked = self._pick(_RATE_SAMPLES)
        if picked is None:
            return None
        first, last = picked
        now, before = last.cpu_seconds.get(slot), first.cpu_seconds.get(slot)
        if now is None or before is None or now < before:  # the engine was replaced
            return None
        return 100 * (now - before) / (last.since_boot - first.since_boot)

    def task_quantile(self, share: float) -> float | None:
        """Return a quantile of the durations of attempts over the last minute."""
        picked = self._pick(_TREND_SAMPLES)
        if picked is None:
            return None
        first, last = picked
        return find_quantile(subtract_counts(last.attempts, first.attempts), share)

    def lag(self) -> Lag:
        """Return the lag and its trend."""
        last = self._samples[-1].lag if self._samples else None
        known = [sample for sample in list(self._samples)[-_TREND_SAMPLES:] if sample.lag is not None]
        if last is None or len(known) < 2 or known[-1].lag is None or known[0].lag is None:
            return Lag(messages=last, change_per_second=None, clear_seconds=None)
        change = (known[-1].lag - known[0].lag) / (known[-1].since_boot - known[0].since_boot)
        return Lag(messages=last, change_per_second=change, clear_seconds=last / -change if change < 0 else None)

    def series(self, seconds: int = KEPT_SECONDS) -> Series:
        """Return the time series of the last seconds, with a point per second."""
        kept = list(self._samples)[-seconds - 1 :]
        points = [_compare(before, after, self._booted_at) for before, after in pairwise(kept)]
        columns = zip(*points, strict=True) if points else ([] for _ in Series.model_fields)
        return Series(**dict(zip(Series.model_fields, map(list, columns), strict=True)))


def _compare(before: Sample, after: Sample, booted_at: float) -> tuple[float | None, ...]:
    seconds = after.since_boot - before.since_boot
    counted = (
        (getattr(after, name) - getattr(before, name)) / seconds
        for name in ("consumed", "done", "failed", "retried", "letters")
    )
    attempts = subtract_counts(after.attempts, before.attempts)
    quantiles = (find_quantile(attempts, share) for share in (0.5, 0.95, 0.99))
    return booted_at + after.since_boot, *counted, after.lag, after.in_flight, *quantiles
