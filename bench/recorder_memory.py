"""The memory of this process; loads nothing, so that it can be measured before anything else is loaded."""

from __future__ import annotations

import os


def memory_mb() -> float:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
