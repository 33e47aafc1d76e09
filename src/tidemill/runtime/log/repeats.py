"""Merges equal log entries: decides which to write and which to count, without a clock or a thread.

Two entries are equal if all their fields are, except their time and the engine that wrote them. The first entry of a
kind is written at once. Equal ones are counted, and written with the count as `repeated`: after `FIRST_SECONDS`, then
every `AGAIN_SECONDS` while more arrive. Invariant: every entry is written, or counted in one that is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from typing import Any

from tidemill.runtime.log.values import describe_value

Entry = Mapping[str, Any]

FIRST_SECONDS = 1.0
AGAIN_SECONDS = 10.0
#: The limit that keeps entries that never repeat from filling the memory.
MAX_KINDS = 1000
#: The fields for an entry's time and count.
_MOMENT = frozenset({"timestamp", "repeated"})


class _Kind:
    """Equal entries: the last one, and how many were counted since one was written."""

    __slots__ = ("count", "due", "engines", "last", "until")

    def __init__(self, due: float, until: float) -> None:
        self.due = due
        #: When the kind is forgotten if it has not repeated.
        self.until = until
        self.count = 0
        self.last: Entry = {}
        self.engines: set[str] = set()


class Repeats:
    """Decides which log entries are written.

    Args:
        ignored: Fields in which equal entries may differ, for example `engine`.

    Example:
        >>> repeats = Repeats()
        >>> repeats.feed({"event": "no broker"}, 0.0)
        [{'event': 'no broker'}]
        >>> repeats.feed({"event": "no broker"}, 0.1)
        []
        >>> repeats.tell_due(1.0)
        [{'event': 'no broker', 'repeated': 1}]
    """

    def __init__(self, ignored: Collection[str] = ()) -> None:
        self._ignored = _MOMENT | set(ignored)
        self._kinds: dict[bytes, _Kind] = {}

    def feed(self, entry: Entry, now: float) -> list[Entry]:
        """Process an entry; return the entries to write now, in order.

        Args:
            entry: The entry's fields. An entry with `repeated` stands for that many entries of another process.
            now: Seconds on a monotonic clock.
        """
        told = self.tell_due(now)
        key = self._compute_key(entry)
        kind = self._kinds.get(key)
        if kind is not None:
            kind.count += _count(entry)
            kind.last = entry
            engine = entry.get("engine", "")
            kind.engines.add(engine if isinstance(engine, str) else describe_value(engine))
            return told
        if len(self._kinds) >= MAX_KINDS:
            oldest = self._kinds.pop(next(iter(self._kinds)))
            told += _tell(oldest)
        self._kinds[key] = _Kind(now + FIRST_SECONDS, now + AGAIN_SECONDS)
        return [*told, entry]

    @property
    def next_due(self) -> float | None:
        """The time of the next count; None if nothing was counted."""
        # A list, because a finalizer or a signal handler of this thread may log meanwhile.
        return min((kind.due for kind in list(self._kinds.values()) if kind.count), default=None)

    def tell_due(self, now: float) -> list[Entry]:
        """Return the counts that are due, and forget entries that did not repeat in time."""
        told: list[Entry] = []
        for key, kind in list(self._kinds.items()):
            if kind.due > now or self._kinds.get(key) is not kind:
                continue
            if kind.count:
                told += _tell(kind)
                self._kinds[key] = _Kind(now + AGAIN_SECONDS, now + AGAIN_SECONDS)
            elif now < kind.until:
                kind.due = kind.until
            else:
                self._kinds.pop(key, None)
        return told

    def tell_all(self) -> list[Entry]:
        """Return all counts, due or not, and forget everything."""
        kinds, self._kinds = self._kinds, {}
        return [entry for kind in kinds.values() for entry in _tell(kind)]

    def _compute_key(self, entry: Entry) -> bytes:
        fields = sorted((name, describe_value(value)) for name, value in entry.items() if name not in self._ignored)
        return hashlib.blake2b(repr(fields).encode("utf-8", "backslashreplace"), digest_size=16).digest()


def _count(entry: Entry) -> int:
    """Return how many entries an entry stands for; `repeated` may also be a user's field with any value."""
    repeated = entry.get("repeated")
    return repeated if type(repeated) is int and repeated > 0 else 1


def _tell(kind: _Kind) -> list[Entry]:
    count, kind.count = kind.count, 0
    if not count:
        return []
    entry = {**kind.last, "repeated": count}
    if len(kind.engines) > 1:
        entry["engine"] = ",".join(sorted(kind.engines))
    return [entry]
