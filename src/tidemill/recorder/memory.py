"""Gives memory back to the system that reading and sealing needed for a moment: allocators would keep it for later.

A driver lives for months, and seals and answers in bursts.
"""

from __future__ import annotations

import ctypes

from tidemill.runtime.memory import trim_memory

#: `M_ARENA_MAX` of the GNU C library.
_MAX_HEAPS = -8


def use_system_memory() -> None:
    """Let Arrow take its memory from the C library, which gives large pieces back at once, and that from one heap.

    Arrow's own allocator keeps 25 MB more while a segment is sealed, and saves 0.1 µs of CPU time per message. A heap
    for each of the threads that answer requests keeps 40 MB more.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    option = getattr(ctypes.CDLL(None), "mallopt", None)
    if option is not None:
        option(_MAX_HEAPS, 1)


def release_memory() -> None:
    """Give back what Arrow and the C library hold and do not use; takes about a millisecond."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim_memory()
