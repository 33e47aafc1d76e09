"""The cache during a probe: hooks read the values of the engine's cache, and their writes stay in the probe."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tidemill.core.pipeline.write_behind import CacheEntry
from tidemill.pipeline.handler.cache import Cache, check_key


class CacheView:
    """Stands in for the `Cache` during one probe.

    Args:
        cache: The engine's cache.

    Attributes:
        writes: How many values were written or deleted.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        #: By key; None: the value was deleted.
        self._written: dict[str, CacheEntry | None] = {}
        self.writes = 0

    def peek(self, key: str, default: Any = None) -> Any:
        """Return a value if it is in memory."""
        return self._decode(key, default) if check_key(key) in self._written else self._cache.peek(key, default)

    async def get(self, key: str, default: Any = None) -> Any:
        """Return a value."""
        return self._decode(key, default) if check_key(key) in self._written else await self._cache.look(key, default)

    def set(self, key: str, value: Any, ttl: float | None = None) -> None:
        """Store a value for the rest of the probe; see `Cache.set`."""
        self._written[key] = self._cache.make_entry(key, value, ttl)
        self.writes += 1

    def delete(self, key: str) -> None:
        """Delete a value for the rest of the probe."""
        self._written[check_key(key)] = None
        self.writes += 1

    def __contains__(self, key: object) -> bool:
        """Return whether a value is in memory, like `peek`."""
        return self._find(key) is not None if key in self._written else key in self._cache

    def _find(self, key: object) -> CacheEntry | None:
        entry = self._written[key]  # type: ignore[index]  # it is one of them
        return entry if entry is not None and entry.expires_at > time.time() else None

    def _decode(self, key: str, default: Any) -> Any:
        entry = self._find(key)
        return default if entry is None else msgspec.msgpack.decode(entry.data)
