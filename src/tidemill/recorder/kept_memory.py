"""Returns memory to the system after bursts of reading and sealing.

A driver runs for months, and its allocators would otherwise hold the memory of the largest burst.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tidemill.runtime.process.malloc import keep_memory, trim_memory

_MAPPED_BYTES = 32 * 1024 * 1024
_FREE_BYTES = 256 * 1024 * 1024
#: Memory used for sealing is released when nothing was sealed for this long.
KEEP_SECONDS = 10.0
#: All unused memory is released this often, because the C library returns none by itself.
RELEASE_SECONDS = 60.0


def use_system_memory() -> None:
    """Make Arrow allocate from the C library, and the C library from one heap that holds memory until it is released.

    Arrow's own allocator holds 25 MB more while a segment is sealed; one heap per request thread holds 40 MB more.
    Reusing a released page costs a microsecond, or 0.15 µs per message if all memory for sealing was released.
    """
    import pyarrow as pa

    pa.set_memory_pool(pa.system_memory_pool())
    keep_memory(_MAPPED_BYTES, _FREE_BYTES, heaps=1)


def release_memory() -> None:
    """Release unused memory that Arrow and the C library hold; takes about a millisecond."""
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    trim_memory()


class KeptMemory:
    """Memory for sealing: held while segments follow each other, released after a pause and at least once a minute.

    Args:
        clock: Returns seconds of a monotonic clock.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._released_at = clock()
        self._release_at = self._released_at + RELEASE_SECONDS

    def note_use(self) -> None:
        """Record that a segment was sealed."""
        self._release_at = min(self._clock() + KEEP_SECONDS, self._released_at + RELEASE_SECONDS)

    def tick(self) -> None:
        """Release unused memory if that is due."""
        now = self._clock()
        if now >= self._release_at:
            self._released_at, self._release_at = now, now + RELEASE_SECONDS
            release_memory()
