"""Controls how much freed memory the C library keeps for reuse, and returns it after a burst of work.

A page that was returned costs up to a microsecond when it is used again.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

#: `M_ARENA_MAX`, `M_MMAP_THRESHOLD` and `M_TRIM_THRESHOLD` of the GNU C library.
_MAX_HEAPS, _LEAST_MAPPED, _MOST_FREE = -8, -3, -1


def keep_memory(mapped_bytes: int, free_bytes: int, heaps: int | None = None) -> None:
    """Let the C library keep freed memory for reuse.

    Args:
        mapped_bytes: Blocks of at least this size are not part of a heap, and are returned to the system when freed.
        free_bytes: More free memory than this at the end of a heap is returned to the system.
        heaps: How many heaps the threads of this process share; None lets the C library decide.
    """
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is None:  # another C library
        return
    if heaps is not None:
        option(_MAX_HEAPS, heaps)
    option(_LEAST_MAPPED, mapped_bytes)
    option(_MOST_FREE, free_bytes)


def trim_memory() -> None:
    """Return the C library's unused memory to the system; takes about a millisecond."""
    _find_trim()(0)


@functools.cache
def _find_trim() -> Callable[[int], object]:
    """Return `malloc_trim`, which only the GNU C library has."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim if trim is not None else int
