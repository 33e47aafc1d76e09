"""Counts a pipeline once a second: the numbers over time that charts, rates and trends need.

Memory is bounded: the last 15 minutes are kept, about 200 bytes a second. A clock that is set changes neither rates nor
trends, and moves what charts show along with it: only the newest time of day is believed.
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
#: Rates and percentiles are of this time, trends of a minute.
_RATE_SAMPLES = 10
_TREND_SAMPLES = 60


class Sample(NamedTuple):
    """The pipeline at a moment, in seconds since the machine booted; all are totals, except lag and in flight."""

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
    """Return what was counted between two moments; an empty list is zeros."""
    return [count - (earlier[place] if earlier else 0) for place, count in enumerate(later)]


class Sampler:
    """Keeps samples; used on one thread."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: deque[Sample] = deque(maxlen=KEPT_SECONDS + 1)
        self._booted_at = 0.0

    def add(self, at: float, since_boot: float, progress: PipelineProgress) -> None:
        """Take a sample; of two of the same moment, the later one counts.

        Args:
            at: Seconds since the epoch, by a clock that may be set at any time.
            since_boot: Seconds since the machine booted, including those in which it slept.
            progress: The sums at that moment.
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
        """Return how much a total rises per second, over the last seconds."""
        picked = self._pick(_RATE_SAMPLES)
        if picked is None:
            return 0.0
        first, last = picked
        risen: int = getattr(last, name) - getattr(first, name)
        return max(0.0, risen / (last.since_boot - first.since_boot))

    def cpu_percent(self, slot: int) -> float | None:
        """Return how much of a core an engine uses; None: it is not known yet."""
        picked = self._pick(_RATE_SAMPLES)
        if picked is None:
            return None
        first, last = picked
        now, before = last.cpu_seconds.get(slot), first.cpu_seconds.get(slot)
        if now is None or before is None or now < before:  # it has been replaced
            return None
        return 100 * (now - before) / (last.since_boot - first.since_boot)

    def task_quantile(self, share: float) -> float | None:
        """Return a quantile of how long attempts took over the last minute."""
        picked = self._pick(_TREND_SAMPLES)
        if picked is None:
            return None
        first, last = picked
        return find_quantile(subtract_counts(last.attempts, first.attempts), share)

    def lag(self) -> Lag:
        """Return the lag, and where it is going."""
        last = self._samples[-1].lag if self._samples else None
        known = [sample for sample in list(self._samples)[-_TREND_SAMPLES:] if sample.lag is not None]
        if last is None or len(known) < 2 or known[-1].lag is None or known[0].lag is None:
            return Lag(messages=last, change_per_second=None, clear_seconds=None)
        change = (known[-1].lag - known[0].lag) / (known[-1].since_boot - known[0].since_boot)
        return Lag(messages=last, change_per_second=change, clear_seconds=last / -change if change < 0 else None)

    def series(self, seconds: int = KEPT_SECONDS) -> Series:
        """Return the last seconds, a point for each."""
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
