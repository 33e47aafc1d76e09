"""The message as it came from a source: the one value that all parts of a pipeline pass on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

Header = tuple[str, bytes | None]


class SourceMessage(msgspec.Struct, dict=False):
    """One message of a topic.

    Attributes:
        topic: The topic it was read from.
        partition: The partition it was read from.
        offset: Its offset in that partition.
        key: The raw key, None where there is none.
        value: The raw value, None for a tombstone.
        headers: Pairs of name and raw value, in the order of the record.
        timestamp: Milliseconds since the epoch, UTC; -1 where the broker gave none.
        payload: The parsed value (see `Handler.deserialize_message`), None where it was not parsed.
        parse_error: Why the value could not be parsed; set only with `kafka.on_parse_error: pass`.
        consumed_at: When it was fetched, in microseconds since the epoch, UTC; 0 where nobody noted it.
    """

    topic: str
    partition: int
    offset: int
    key: bytes | None = None
    value: bytes | None = None
    headers: tuple[Header, ...] = ()
    timestamp: int = -1
    payload: Any = None
    parse_error: str | None = None
    consumed_at: int = 0

    @property
    def size_bytes(self) -> int:
        """The bytes of key and value together."""
        return (len(self.key) if self.key else 0) + (len(self.value) if self.value else 0)


def place_of(messages: Sequence[SourceMessage]) -> tuple[str, str]:
    """Return the partition of messages, which is that of all of them, and which they are, for people.

    Example:
        >>> place_of([SourceMessage("t", 3, 17), SourceMessage("t", 3, 20)])
        ('t/3', 'messages 17 to 20')
    """
    if not messages:
        return "", ""
    first, last = messages[0], messages[-1]
    which = f"message {first.offset}" if len(messages) == 1 else f"messages {first.offset} to {last.offset}"
    return f"{first.topic}/{first.partition}", which
