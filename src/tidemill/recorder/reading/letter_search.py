"""Finds the finished messages that left a dead letter. Rows have the outcome of the tasks; letters are recorded as
events.

A letter belongs to a message if it was written between the message's consumption and its resolution.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence

from tidemill.recorder.format.events import EventKind
from tidemill.recorder.format.file_layout import name_start
from tidemill.recorder.reading.event_search import ask_database
from tidemill.recorder.reading.queries import RecordedMessageRow
from tidemill.recorder.reading.segment_store import DiskStore, SegmentStore

#: SQLite limits the number of values in a statement.
_MOST_OFFSETS = 500
#: Topic, partition and offset of a message, and the time of its letter.
_Letter = tuple[str, int, int, int]


def find_dead_lettered(
    stores: Sequence[SegmentStore], rows: Sequence[RecordedMessageRow], problems: list[str]
) -> list[bool]:
    """Return for each row whether its message left a dead letter.

    Args:
        stores: The stores of all recordings, the newest of each first.
        rows: The messages.
        problems: Receives descriptions of data that cannot be read.
    """
    letters: dict[str, set[_Letter]] = {}
    for recording in dict.fromkeys(row.recording for row in rows):
        mine = [row for row in rows if row.recording == recording and row.status == "done"]
        letters[recording] = _read_letters([store for store in stores if store.recording == recording], mine, problems)
    return [_has_letter(row, letters[row.recording]) for row in rows]


def _read_letters(
    stores: Iterable[SegmentStore], rows: Sequence[RecordedMessageRow], problems: list[str]
) -> set[_Letter]:
    found: set[_Letter] = set()
    if not rows:
        return found
    offsets = list(dict.fromkeys(row.offset for row in rows))
    first = name_start(min(row.consumed_at or 0 for row in rows) / 1_000_000)

    def look(db: sqlite3.Connection) -> None:
        for start in range(0, len(offsets), _MOST_OFFSETS):
            some = offsets[start : start + _MOST_OFFSETS]
            found.update(
                db.execute(
                    'select topic, "partition", "offset", at_us from events '  # noqa: S608 - placeholders only
                    f'where "offset" in ({", ".join("?" * len(some))}) and kind = ?',
                    (*some, EventKind.DEAD_LETTERED.value),
                )
            )

    for store in stores:
        ask_database(store, look, problems)
        if isinstance(store, DiskStore) and store.period.started < first:
            break  # older periods ended before the first of these messages was consumed
    return found


def _has_letter(row: RecordedMessageRow, letters: Iterable[_Letter]) -> bool:
    position = (row.topic, row.partition, row.offset)
    first, last = row.consumed_at or 0, row.resolved_at or 0
    return any(letter[:3] == position and first <= letter[3] <= last for letter in letters)
