"""The name of a message on a command line and in a URL: TOPIC:PARTITION:OFFSET."""

from __future__ import annotations

import re
from dataclasses import dataclass

_POSITION = re.compile(r"([A-Za-z0-9._-]{1,249}):(\d{1,10}):(\d{1,19})", re.ASCII)
_LARGEST_PARTITION = 2**31 - 1
_LARGEST_OFFSET = 2**63 - 1


@dataclass(frozen=True, slots=True)
class MessagePosition:
    """The topic, partition and offset of a message."""

    topic: str
    partition: int
    offset: int


def parse_position(text: str) -> MessagePosition | None:
    """Return the message that a text names, or None.

    Example:
        >>> parse_position("orders:3:4711")
        MessagePosition(topic='orders', partition=3, offset=4711)
        >>> parse_position("pipeline.yaml") is None
        True
    """
    found = _POSITION.fullmatch(text)
    if found is None:
        return None
    position = MessagePosition(found[1], int(found[2]), int(found[3]))
    return position if position.partition <= _LARGEST_PARTITION and position.offset <= _LARGEST_OFFSET else None
