"""How often a file is imported again that has not changed, since what it asks of others may have.

Importing costs time: at most `SHARE` of a core is spent on it, else it happens less often than it was asked for.
"""

from __future__ import annotations

from typing import Final

#: The part of a core.
SHARE: Final = 0.1


def find_interval(asked_seconds: float, cpu_seconds: float) -> float:
    """Return the time from one import to the next.

    Args:
        asked_seconds: `dags.reparse_seconds`.
        cpu_seconds: What one import costs.

    Example:
        >>> find_interval(60.0, 0.5), find_interval(60.0, 30.0)
        (60.0, 300.0)
    """
    return max(asked_seconds, cpu_seconds / SHARE)


def find_pause(cpu_seconds: float) -> float:
    """Return how long to wait after an import before the next file is imported again."""
    return cpu_seconds / SHARE - cpu_seconds
