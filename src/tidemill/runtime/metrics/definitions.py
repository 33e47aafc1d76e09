"""The definition of a metric: its name, its kind and its labels, without the library that writes it.

Invariant: a label never has a value that comes from a message, a key, an argument or an error.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

#: The prefix of every name.
PREFIX = "tidemill_"


class Kind(enum.StrEnum):
    """The kinds of metrics."""

    COUNTER = "counter"
    GAUGE = "gauge"
    INFO = "info"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Definition:
    """A metric.

    Attributes:
        name: The metric's name without the prefix, as Prometheus shows it (a counter ends in `_total`).
        kind: The metric's kind.
        help: The description of the metric, in one sentence.
        labels: The names of its labels.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()

    @property
    def full_name(self) -> str:
        """The name with the prefix."""
        return PREFIX + self.name

    def list_series(self) -> list[str]:
        """Return the names under which Prometheus stores the metric.

        Example:
            >>> Definition("wait_seconds", Kind.HISTOGRAM, "").list_series()
            ['tidemill_wait_seconds_bucket', 'tidemill_wait_seconds_sum', 'tidemill_wait_seconds_count']
        """
        if self.kind is Kind.HISTOGRAM:
            return [f"{self.full_name}_{part}" for part in ("bucket", "sum", "count")]
        return [self.full_name]
