"""Reads messages from the rows of one partition of a DataFrame.

Invariants: rows become messages in their order. No two messages of a topic and partition have the same offset, because
a task could not distinguish them; rows with a repeated offset are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from tidemill.core.errors import HandlerError
from tidemill.runtime.kafka.source_message import Header, SourceMessage

#: How many rows become messages at once.
BATCH_MESSAGES = 500
#: The topic of rows without one.
TOPIC = "dataframe"


class RowReader:
    """A `RecordReader` of rows.

    Args:
        rows: The rows; iterating may block.
        names: The columns, in order: key and value (binary), and any of topic, partition, offset, timestamp
            (milliseconds) and headers (pairs of key and value).
        partition: The partition of rows without one; rows without an offset are numbered from 0.
    """

    gap = 0

    def __init__(self, rows: Iterator[Sequence[Any]], names: Sequence[str], partition: int) -> None:
        self._rows = rows
        self._names = list(names)
        self._partition = partition
        self._count = 0
        self._last: dict[tuple[str, int], int] = {}

    def open(self) -> None:
        """Do nothing: the rows need no connection."""

    def close(self) -> None:
        """Do nothing: the rows need no connection."""

    def describe_wait(self) -> str | None:
        """Return None: the producer of the rows reports its own stalls."""
        return None

    def read(self) -> Sequence[SourceMessage] | None:
        """Return the next messages; None at the end.

        Raises:
            HandlerError: Two rows have the same topic, partition and offset.
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
        source = (TOPIC if topic is None else topic, self._partition if partition is None else partition)
        offset = self._count if offset is None else offset
        self._count += 1
        if self._last.get(source) == offset:
            raise HandlerError(
                f"two rows have topic {source[0]!r}, partition {source[1]} and offset {offset}; "
                "drop the duplicates, or the column offset"
            )
        self._last[source] = offset
        named = tuple((str(name), _to_bytes(text)) for name, text in headers) if headers else ()
        return SourceMessage(
            *source, offset, _to_bytes(key), _to_bytes(value), named, -1 if timestamp is None else timestamp
        )


def _to_bytes(value: bytes | None) -> bytes | None:
    """Convert Spark's bytearray to bytes."""
    return None if value is None else bytes(value)
