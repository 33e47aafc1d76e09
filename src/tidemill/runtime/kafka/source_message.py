"""The source message: the one value that all parts of a pipeline pass on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

Header = tuple[str, bytes | None]

#: Sets an attribute of a read-only struct by its name, for its own checks and for parsers.
set_field = msgspec.structs.force_setattr


class SourceMessage(msgspec.Struct, dict=False):
    """One message of a topic: the immutable data of its source, and the parsed payload.

    Attributes:
        topic: The topic it was read from.
        partition: The partition it was read from.
        offset: Its offset in that partition.
        key: The raw key, None if there is none.
        value: The raw value, None for a tombstone.
        headers: Pairs of name and raw value, in the order of the record; empty if they cannot be read.
        timestamp: Milliseconds since the epoch, UTC; -1 without a timestamp.
        payload: The parsed value (see `Handler.deserialize_message`), None if it was not parsed.
        parse_error: Why the value could not be parsed; set only with `kafka.on_parse_error: pass`.
        consumed_at: When it was fetched, in microseconds since the epoch, UTC; 0 if unknown.
        headers_error: Why its headers cannot be read (a name is not UTF-8); None if they can.
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
    headers_error: str | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set the payload.

        Raises:
            AttributeError: The attribute is not the payload. The others are read-only, because the pipeline commits,
                orders and records the message by them.
        """
        if name != "payload":
            raise AttributeError(f"{name} of a message cannot be changed, only its payload")
        set_field(self, name, value)

    def __delattr__(self, name: str) -> None:
        """Refuse to remove an attribute.

        Raises:
            AttributeError: Always.
        """
        raise AttributeError(f"{name} of a message cannot be removed")

    @property
    def size_bytes(self) -> int:
        """The size of key and value together, in bytes."""
        return (len(self.key) if self.key else 0) + (len(self.value) if self.value else 0)


def list_sizes(messages: Iterable[SourceMessage]) -> list[int]:
    """Return the size of each message, like `size_bytes` but faster."""
    return [
        (len(message.key) if message.key else 0) + (len(message.value) if message.value else 0) for message in messages
    ]


class MessageSpan(NamedTuple):
    """The partition and messages that a call of a handler's code works for.

    Attributes:
        partition: The partition's name; '' for none.
        messages: The messages, for people to read.
        first: The offset of the first message; -1 for none.
        last: The offset of the last message.
    """

    partition: str = ""
    messages: str = ""
    first: int = -1
    last: int = -1


def span_messages(messages: Sequence[SourceMessage]) -> MessageSpan:
    """Return the common partition of messages, and their offsets.

    Example:
        >>> span_messages([SourceMessage("t", 3, 17), SourceMessage("t", 3, 20)])
        MessageSpan(partition='t/3', messages='messages 17 to 20', first=17, last=20)
    """
    if not messages:
        return MessageSpan()
    first, last = messages[0], messages[-1]
    which = f"message {first.offset}" if len(messages) == 1 else f"messages {first.offset} to {last.offset}"
    return MessageSpan(f"{first.topic}/{first.partition}", which, first.offset, last.offset)
