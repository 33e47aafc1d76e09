"""Says how much freed memory the C library keeps for later, and gives it back when a burst of work is over.

A page that was given back costs up to a microsecond when it is used again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

#: `M_ARENA_MAX`, `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of the GNU C library.
_MAX_HEAPS, _LEAST_MAPPED, _MOST_FREE = -8, -3, -1


def keep_memory(mapped_bytes: int, free_bytes: int, heaps: int | None = None) -> None:
    """Let the C library keep freed memory for what comes next.

    Args:
        mapped_bytes: What is at least this large is given back when it is freed, and is not part of a heap.
        free_bytes: More than this at the end of a heap is given back.
        heaps: How many heaps the threads of this process share; None: as many as the C library thinks fit.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:  # another C library
        return
    if heaps is not None:
        option(_MAX_HEAPS, heaps)
    option(_LEAST_MAPPED, mapped_bytes)
    option(_MOST_FREE, free_bytes)


def trim_memory() -> None:
    """Give back what the C library holds and does not use; takes about a millisecond."""
    _find_trim()(0)


@functools.cache
def _find_trim() -> Callable[[int], object]:
    """Return `malloc_trim`, which only the GNU C library has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if trim is not None else int
