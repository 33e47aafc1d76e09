"""Reads messages from the rows of one partition of a DataFrame.

Invariants: rows become messages in their order; no two of one topic and partition have the same offset (a task could
not say which one it is for), so rows that say otherwise are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tidemill.core.errors import HandlerError
from tidemill.runtime.messages import Header, SourceMessage

#: How many rows become messages at once.
BATCH_MESSAGES = 500
#: The topic of rows that name none.
TOPIC = "dataframe"


class RowReader:
    """A `Reader` of rows.

    Args:
        rows: The rows; iterating may block.
        names: What their values are, in order: key and value (binary), and some of topic, partition, offset, timestamp
            (milliseconds) and headers (pairs of key and value).
        partition: The partition of rows that name none; offsets that are not named count from 0.
    """

    gap = 0

    def __init__(self, rows: Iterator[Sequence[Any]], names: Sequence[str], partition: int) -> None:
        """Read nothing yet."""
        self._rows = rows
        self._names = list(names)
        self._partition = partition
        self._count = 0
        self._last: dict[tuple[str, int], int] = {}

    def open(self) -> None:
        """There is nothing to open."""

    def close(self) -> None:
        """There is nothing to close."""

    def describe_stall(self) -> str | None:
        """Return None: what produces the rows reports its own stalls."""
        return None

    def read(self) -> Sequence[SourceMessage] | None:
        """Return the next messages; None at the end.

        Raises:
            HandlerError: Two rows are the same message.
        """
        names = self._names
        messages = [
            self._make_message(**dict(zip(names, row, strict=True))) for row in islice(self._rows, BATCH_MESSAGES)
        ]
        return messages or None

    def _make_message(
        self,
        key: bytes | None,
        value: bytes | None,
        topic: str | None = None,
        partition: int | None = None,
        offset: int | None = None,
        timestamp: int | None = None,
        headers: Sequence[Header] | None = None,
    ) -> SourceMessage:
        place = (TOPIC if topic is None else topic, self._partition if partition is None else partition)
        offset = self._count if offset is None else offset
        self._count += 1
        if self._last.get(place) == offset:
            raise HandlerError(
                f"two rows have topic {place[0]!r}, partition {place[1]} and offset {offset}, so they are one message; "
                "drop the duplicates, or the column offset"
            )
        self._last[place] = offset
        named = tuple((str(name), _to_bytes(text)) for name, text in headers) if headers else ()
        return SourceMessage(
            *place, offset, _to_bytes(key), _to_bytes(value), named, -1 if timestamp is None else timestamp
        )


def _to_bytes(value: bytes | None) -> bytes | None:
    """Return Spark's bytearray as bytes."""
    return None if value is None else bytes(value)
