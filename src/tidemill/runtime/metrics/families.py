"""Metrics with their values, as collectors return them; `exposition` writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.runtime.metrics.definitions import Definition


@dataclass(frozen=True, slots=True)
class Distribution:
    """The value of a histogram.

    Attributes:
        bounds: The upper bounds of its buckets but the last.
        counts: How many observations are in each bucket, including the last.
        total: The sum of all observations.
    """

    bounds: Sequence[float]
    counts: Sequence[int]
    total: float


Value = float | Distribution
#: The values of the labels, in the order of the definition, and the measured value.
Sample = tuple[Sequence[str], Value]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with all of its series.

    Attributes:
        definition: The metric's definition.
        samples: The values; can be iterated once.
    """

    definition: Definition
    samples: Iterable[Sample]
