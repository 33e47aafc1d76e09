"""Turns definitions and values into what prometheus-client writes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from tidemill.runtime.metrics.definitions import Definition, Kind


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram.

    Attributes:
        bounds: The upper bounds of its buckets but the last.
        counts: How many observations are in each bucket, the last one included.
        total: The sum of all observations.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


Value = float | Distribution
#: The values of the labels, and what was measured.
Sample = tuple[Sequence[str], Value]


def build_family(definition: Definition, samples: Iterable[Sample]) -> Metric:
    """Return a metric with its samples; the order of the labels is that of the definition."""
    name, text, labels = definition.full_name, definition.help, definition.labels
    if definition.kind is Kind.INFO:
        info = InfoMetricFamily(name.removesuffix("_info"), text)
        for values, _ in samples:
            info.add_metric((), dict(zip(labels, values, strict=True)))
        return info
    if definition.kind is Kind.HISTOGRAM:
        histogram = HistogramMetricFamily(name, text, labels=labels)
        for values, value in samples:
            assert isinstance(value, Distribution)
            histogram.add_metric(values, _accumulate(value), value.total)
        return histogram
    family: Metric
    make = CounterMetricFamily if definition.kind is Kind.COUNTER else GaugeMetricFamily
    family = make(name, text, labels=labels)
    for values, value in samples:
        assert not isinstance(value, Distribution)
        family.add_metric(values, value)
    return family


def _accumulate(value: Distribution) -> list[tuple[str, float]]:
    """Return the buckets as Prometheus wants them: each has all smaller ones."""
    buckets, so_far = [], 0
    for bound, count in zip([*map(repr, value.bounds), "+Inf"], value.counts, strict=True):
        so_far += count
        buckets.append((bound, float(so_far)))
    return buckets
