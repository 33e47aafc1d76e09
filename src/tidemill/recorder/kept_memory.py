"""Gives memory back to the system that reading and sealing needed for a moment: allocators would keep it for later.

A driver lives for months, and seals and answers in bursts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.runtime.process.malloc import keep_memory, trim_memory

_MAPPED_BYTES = 32 * 1024 * 1024
_FREE_BYTES = 256 * 1024 * 1024
#: What sealing needed is given back when nothing was sealed for this long.
KEEP_SECONDS = 10.0
#: And whatever else is not used, this often: the C library gives back nothing by itself.
RELEASE_SECONDS = 60.0


def use_system_memory() -> None:
    """Let Arrow take its memory from the C library, and that from one heap, which keeps it until it is released.

    Arrow's own allocator keeps 25 MB more while a segment is sealed; a heap for each of the threads that answer
    requests keeps 40 MB more. A page that was given back costs a microsecond when it is used again, 0.15 µs per message
    if that happens to all that sealing needs.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    keep_memory(_MAPPED_BYTES, _FREE_BYTES, heaps=1)


def release_memory() -> None:
    """Give back what Arrow and the C library hold and do not use; takes about a millisecond."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim_memory()


class KeptMemory:
    """The memory that sealing needs: kept while segments follow each other, given back afterwards, and once a minute.

    Args:
        clock: Seconds on a clock that never goes back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start with none."""
        self._clock = clock
        self._released_at = clock()
        self._release_at = self._released_at + RELEASE_SECONDS

    def note_use(self) -> None:
        """Take note that something was sealed."""
        self._release_at = min(self._clock() + KEEP_SECONDS, self._released_at + RELEASE_SECONDS)

    def tick(self) -> None:
        """Give it back if that is due."""
        now = self._clock()
        if now >= self._release_at:
            self._released_at, self._release_at = now, now + RELEASE_SECONDS
            release_memory()
