"""How many random examples a test tries, of Hypothesis or of seeds: all with `--nightly`, a part without."""

from __future__ import annotations

from hypothesis import settings

#: What a test without a number of its own has with `--nightly`, with `--long`, and with neither.
FULL = 100
LONG = 40
SHORT = 10


def examples(full: int) -> int:
    """Return how many examples a test has in this run, of those that it has with `--nightly`."""
    return max(1, full * settings().max_examples // FULL)
