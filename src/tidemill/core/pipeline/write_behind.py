"""A bounded write-behind cache over a store.

The cache in memory is an LRU. A set or deletion is also kept as a change until the store has it, even if the entry has
been evicted from memory, so that reading back a write never depends on the store. Changes are written in batches, one
batch at a time. A load (a read of the store) that was overtaken by a write of its key is ignored.

While writes fail, at most `max_entries` changes are kept; beyond that the oldest are lost, and the store is then stale:
it is not read any more, and has to be emptied before it is written again.

Invariants: a lookup finds the latest value or nothing; it finds nothing only if the key was deleted, has expired, was
never set, or was lost while the store failed; the memory never exceeds its size, nor do the changes while the store
fails.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A value as bytes, and the time at which it expires (infinity: never)."""

    data: bytes
    expires_at: float = math.inf


class Known(enum.Enum):
    """The state of a key whose value is not in memory."""

    ABSENT = "absent"
    #: The store may have it.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class ChangeBatch:
    """Changes for the store.

    Attributes:
        clear: Empty the store first.
        changes: The entry of each key; None: delete the key.
    """

    clear: bool
    changes: Mapping[str, CacheEntry | None]


class PendingLoad:
    """A read of the store in progress, shared by all readers of the same key."""

    __slots__ = ("key", "overtaken", "readers")

    def __init__(self, key: str) -> None:
        self.key = key
        self.readers = 1
        self.overtaken = False


class WriteBehind:
    """The entries in memory, and the changes that the store does not have yet.

    Args:
        max_entries: The maximum number of entries in memory, at least 1.
    """

    __slots__ = (
        "_changes",
        "_complete",
        "_failing",
        "_in_flight",
        "_loads",
        "_max",
        "_memory",
        "_stale",
        "_underway",
        "lost",
    )

    def __init__(self, max_entries: int) -> None:
        self._max = max_entries
        self._memory: OrderedDict[str, CacheEntry] = OrderedDict()
        self._changes: dict[str, CacheEntry | None] = {}
        self._in_flight: ChangeBatch | None = None
        #: The changes of the batch in flight, except for keys that have been lost since.
        self._underway: dict[str, CacheEntry | None] = {}
        self._loads: dict[str, PendingLoad] = {}
        self._complete = False
        self._failing = False
        self._stale = False
        #: The number of changes lost because the store failed for too long.
        self.lost = 0

    def __len__(self) -> int:
        return len(self._memory)

    @property
    def unwritten(self) -> int:
        """The number of changes that the store does not have yet."""
        return len(self._changes) + len(self._underway)

    @property
    def is_full(self) -> bool:
        """Whether enough changes are waiting to be written before the regular flush."""
        return len(self._changes) >= self._max and not self._failing

    def start(self, newest: Iterable[tuple[str, CacheEntry]], everything: bool) -> None:
        """Load the content of the store at startup.

        Args:
            newest: Its latest entries, oldest first, at most as many as fit.
            everything: Whether the store has no other entries.
        """
        self._memory.update(newest)
        self._complete = everything

    # -- reading ------------------------------------------------------------------------------------------------------

    def peek(self, key: str, now: float) -> bytes | Known:
        """Look a key up without changing the LRU order."""
        entry = self._memory.get(key)
        if entry is None:
            found = self._find_unsaved(key)
            if isinstance(found, Known):
                return found
            entry = found
        return entry.data if entry.expires_at > now else Known.ABSENT

    def get(self, key: str, now: float) -> bytes | Known:
        """Look a key up and make it the most recently used one."""
        entry = self._memory.get(key)
        if entry is None:
            found = self._find_unsaved(key)
            if isinstance(found, Known):
                return found
            entry = found
        if entry.expires_at <= now:
            self._memory.pop(key, None)
            return Known.ABSENT
        self._remember(key, entry)
        return entry.data

    def _find_unsaved(self, key: str) -> CacheEntry | Known:
        """Look a key up among the changes, the latest first."""
        for changes in (self._changes, self._underway):
            if key in changes:
                return changes[key] or Known.ABSENT
        stale = self._stale or (self._in_flight is not None and self._in_flight.clear)
        return Known.ABSENT if stale or self._complete else Known.UNKNOWN

    def begin_load(self, key: str) -> PendingLoad:
        """Begin a read of the store."""
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = PendingLoad(key)
        else:
            load.readers += 1
        return load

    def end_load(self, load: PendingLoad, entry: CacheEntry | None, now: float) -> bytes | Known:
        """End a read of the store; return the value, or UNKNOWN if the store has to be read again.

        Args:
            load: The result of `begin_load`.
            entry: The entry in the store, if any.
            now: The current time.
        """
        load.readers -= 1
        if load.readers == 0 and not load.overtaken:
            del self._loads[load.key]
        if not load.overtaken:
            if entry is None:
                return Known.ABSENT
            self._remember(load.key, entry)
        return self.get(load.key, now)

    def _remember(self, key: str, entry: CacheEntry) -> None:
        self._memory[key] = entry
        self._memory.move_to_end(key)
        if len(self._memory) > self._max:
            self._memory.popitem(last=False)
            self._complete = False

    # -- writing ------------------------------------------------------------------------------------------------------

    def set(self, key: str, entry: CacheEntry) -> None:
        """Store an entry and schedule its write."""
        self._remember(key, entry)
        self._change(key, entry)

    def delete(self, key: str) -> None:
        """Delete a key and schedule its deletion from the store."""
        self._memory.pop(key, None)
        self._change(key, None)

    def _change(self, key: str, entry: CacheEntry | None) -> None:
        load = self._loads.pop(key, None)
        if load is not None:
            load.overtaken = True
        self._changes.pop(key, None)  # keeps changes in the order of their last write
        self._changes[key] = entry
        if self._failing:
            self._lose_oldest()

    def take(self) -> ChangeBatch | None:
        """Return the changes to write now; None if there are none, or a batch is in flight."""
        if self._in_flight is not None or not (self._changes or self._stale):
            return None
        self._in_flight = ChangeBatch(self._stale, self._changes)
        self._underway = dict(self._changes)
        self._changes = {}
        self._stale = False
        return self._in_flight

    def note_written(self) -> None:
        """Record that the store has the batch."""
        self._in_flight, self._underway = None, {}
        self._failing = False

    def note_failed(self) -> None:
        """Record that the store did not accept the batch; its changes wait again, as far as they fit."""
        batch, self._in_flight = self._in_flight, None
        if batch is None:
            return
        older = {key: entry for key, entry in self._underway.items() if key not in self._changes}
        self._changes = {**older, **self._changes}
        self._underway = {}
        self._stale = self._stale or batch.clear
        self._failing = True
        self._lose_oldest()

    def _lose_oldest(self) -> None:
        excess = len(self._changes) - self._max
        if excess > 0:
            for key in list(itertools.islice(self._changes, excess)):
                del self._changes[key]
                self._underway.pop(key, None)  # an older value must not come back
            self.lost += excess
            self._stale = True
