"""Which topic the offsets of a partition belong to: a topic that is deleted and created again has another id.

The name and the offsets alone do not show that, so the id is committed beside each offset, before any other note. An
offset of another topic is never used, and a partition whose topic was replaced while it was read starts at its
beginning.

Invariants: an offset is distrusted only if both ids are known and differ; while an id is not known, offsets are used
as they are; a text in another format is a note without an id, and no note is changed by the id before it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)

#: 128 bits as Kafka writes them, in base64 without padding.
_ID = r"[A-Za-z0-9+/_-]{22}"
_MARKED = re.compile(rf"topic=({_ID});(.*)", re.ASCII | re.DOTALL)
#: How much longer a note is with an id.
MARK_BYTES = len("topic=;") + 22


def add_mark(topic_id: str | None, note: str) -> str:
    """Return what is committed beside an offset of a topic.

    Example:
        >>> add_mark("taYg+JvuRumb3DRM9XqF/A", "mine"), add_mark(None, "mine")
        ('topic=taYg+JvuRumb3DRM9XqF/A;mine', 'mine')
    """
    return note if topic_id is None else f"topic={topic_id};{note}"


def split_mark(text: str) -> tuple[str | None, str]:
    """Return the id of the topic and the note of a text beside an offset.

    Example:
        >>> split_mark("topic=taYg+JvuRumb3DRM9XqF/A;mine"), split_mark("mine")
        (('taYg+JvuRumb3DRM9XqF/A', 'mine'), (None, 'mine'))
    """
    found = _MARKED.fullmatch(text)
    return (None, text) if found is None else (found[1], found[2])


def is_replaced(before: str | None, now: str | None) -> bool:
    """Return whether a topic is certainly another one than before."""
    return before is not None and now is not None and before != now


class TopicIdentity(Generic[LaneT]):
    """The topic that each partition of one consumer is read from.

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
        """Start to read a partition.

        Args:
            lane: The partition.
            committed: The id beside its committed offset; None: not known.
            now: The id of the topic now; None: not known.

        Returns:
            Whether the committed offset is one of this topic, as far as it is known.
        """
        # Without the present id it is still read as the topic of its offset: once the id is known, they are compared.
        self._ids[lane] = committed if now is None else now
        return not is_replaced(committed, now)

    def forget(self, lane: LaneT) -> None:
        """Read a partition no longer."""
        self._ids.pop(lane, None)

    def find_id(self, lane: LaneT) -> str | None:
        """Return the id of the topic that a partition is read from; None: not known."""
        return self._ids.get(lane)

    def find_replaced(self, now: str | None) -> Collection[LaneT]:
        """Return the partitions whose topic was replaced since they were assigned; others take on the id.

        Args:
            now: The id of the topic now; None: not known.
        """
        if now is None:
            return []
        replaced = [lane for lane, before in self._ids.items() if is_replaced(before, now)]
        for lane, before in self._ids.items():
            if before is None:
                self._ids[lane] = now
        return replaced
