"""How many random examples a test tries, of Hypothesis or of seeds: all with `--long`, a tenth without."""

from __future__ import annotations

from hypothesis import settings

#: What a test without a number of its own has at full length.
FULL = 100
SHORT = 10


def examples(full: int) -> int:
    """Return how many examples a test has in this run, of those that it has at full length."""
    return max(1, full * settings().max_examples // FULL)
