"""Ties committed offsets to a topic id, because a topic that is deleted and created again has the same name.

The name and the offsets alone do not show the difference, so the id is committed with each offset, before any other
metadata. An offset of another topic is never used. A partition whose topic is replaced while it is being read restarts
at its beginning.

Invariants: an offset is distrusted only if both ids are known and differ; while an id is unknown, offsets are used as
they are; a text in another format is a note without an id; the id never changes the note after it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)

#: 128 bits as Kafka writes them, in base64 without padding.
_ID = r"[A-Za-z0-9+/_-]{22}"
_MARKED = re.compile(rf"topic=({_ID});(.*)", re.ASCII | re.DOTALL)
#: The additional length of a note with an id.
MARK_BYTES = len("topic=;") + 22


def add_mark(topic_id: str | None, note: str) -> str:
    """Return the metadata to commit with an offset of a topic.

    Example:
        >>> add_mark("taYg+JvuRumb3DRM9XqF/A", "mine"), add_mark(None, "mine")
        ('topic=taYg+JvuRumb3DRM9XqF/A;mine', 'mine')
    """
    return note if topic_id is None else f"topic={topic_id};{note}"


def split_mark(text: str) -> tuple[str | None, str]:
    """Return the topic id and the note in the metadata of an offset.

    Example:
        >>> split_mark("topic=taYg+JvuRumb3DRM9XqF/A;mine"), split_mark("mine")
        (('taYg+JvuRumb3DRM9XqF/A', 'mine'), (None, 'mine'))
    """
    found = _MARKED.fullmatch(text)
    return (None, text) if found is None else (found[1], found[2])


def is_replaced(before: str | None, now: str | None) -> bool:
    """Return whether two topic ids are known and differ."""
    return before is not None and now is not None and before != now


class TopicIdentity(Generic[LaneT]):
    """The topic ids of the partitions that one consumer reads.

    Example:
        >>> identity: TopicIdentity[str] = TopicIdentity()
        >>> identity.assign("a", committed="one", now="two"), identity.assign("b", committed=None, now="two")
        (False, True)
        >>> identity.find_replaced("three")
        ['a', 'b']
    """

    def __init__(self) -> None:
        self._ids: dict[LaneT, str | None] = {}

    def assign(self, lane: LaneT, committed: str | None, now: str | None) -> bool:
        """Start to track a partition.

        Args:
            lane: The partition.
            committed: The id committed with its offset; None: unknown.
            now: The id of the topic now; None: unknown.

        Returns:
            Whether the committed offset belongs to this topic, as far as is known.
        """
        # While the current id is unknown, the committed id is kept and compared with it later.
        self._ids[lane] = committed if now is None else now
        return not is_replaced(committed, now)

    def forget(self, lane: LaneT) -> None:
        """Stop tracking a partition."""
        self._ids.pop(lane, None)

    def find_id(self, lane: LaneT) -> str | None:
        """Return the id of the topic that a partition is read from; None: unknown."""
        return self._ids.get(lane)

    def find_replaced(self, now: str | None) -> Collection[LaneT]:
        """Return the partitions whose topic was replaced since they were assigned. Partitions without an id take `now`.

        Args:
            now: The id of the topic now; None: unknown.
        """
        if now is None:
            return []
        replaced = [lane for lane, before in self._ids.items() if is_replaced(before, now)]
        for lane, before in self._ids.items():
            if before is None:
                self._ids[lane] = now
        return replaced
