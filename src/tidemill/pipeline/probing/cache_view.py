"""The cache as hooks see it during a probe: they read what the engine's cache has, and what they write stays here."""

from __future__ import annotations

import time
from typing import Any

import msgspec

from tidemill.core.pipeline.write_behind import CacheEntry
from tidemill.pipeline.handler.cache import Cache, check_key


class CacheView:
    """Takes the place of a `Cache` for one probe.

    Args:
        cache: The engine's.

    Attributes:
        writes: How many values were written or deleted.
    """

    def __init__(self, cache: Cache) -> None:
        """Start with nothing written."""
        self._cache = cache
        #: None: it was deleted.
        self._written: dict[str, CacheEntry | None] = {}
        self.writes = 0

    def peek(self, key: str, default: Any = None) -> Any:
        """Return a value if it is in memory now."""
        return self._decode(key, default) if check_key(key) in self._written else self._cache.peek(key, default)

    async def get(self, key: str, default: Any = None) -> Any:
        """Return a value."""
        return self._decode(key, default) if check_key(key) in self._written else await self._cache.look(key, default)

    def set(self, key: str, value: Any, ttl: float | None = None) -> None:
        """Keep a value for the rest of the probe; see `Cache.set`."""
        self._written[key] = self._cache.make_entry(key, value, ttl)
        self.writes += 1

    def delete(self, key: str) -> None:
        """Forget a value for the rest of the probe."""
        self._written[check_key(key)] = None
        self.writes += 1

    def __contains__(self, key: object) -> bool:
        """Tell whether a value is in memory now, as `peek` sees it."""
        return self._find(key) is not None if key in self._written else key in self._cache

    def _find(self, key: object) -> CacheEntry | None:
        entry = self._written[key]  # type: ignore[index]  # it is one of them
        return entry if entry is not None and entry.expires_at > time.time() else None

    def _decode(self, key: str, default: Any) -> Any:
        entry = self._find(key)
        return default if entry is None else msgspec.msgpack.decode(entry.data)
