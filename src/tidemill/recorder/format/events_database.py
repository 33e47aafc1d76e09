"""The database of a period: searchable events, counts per second, configuration and state.

Invariants:
- One thread writes; any process of the same user may read at the same time (WAL).
- The database stays readable if the writer is killed at any moment: it never leaves a rollback journal, which a reader
  could not roll back.
- Identical texts are stored once.
- The counts per error class are exact even where only a sample of the events is stored.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tidemill.core.errors import escape_surrogates
from tidemill.recorder.format.events import RecordedEvent
from tidemill.recorder.format.schema import MAX_ERROR_CHARS
from tidemill.recorder.format.summary import SegmentSummary

#: The version of the tables below; a reader rejects files of any other version.
VERSION = 1
#: Failures are counted per minute.
COUNT_SECONDS = 60
#: The maximum number of distinct error classes per period; further classes are counted as `OTHERS`.
MAX_CLASSES = 10_000
OTHERS = "(others)"
#: Leaving WAL mode this way writes a single page, so a kill leaves the old or the new state; `delete` would write a
#: rollback journal.
_LEAVE_WAL = "pragma journal_mode = memory"

_TABLES = """
create table events (
  id integer primary key, at_us integer not null, kind text not null, topic text, "partition" integer, "offset" integer,
  task_id text, sink text, text_id integer, class_id integer, data blob);
create index events_at on events (at_us);
create index events_offset on events ("offset", "partition") where "offset" is not null;
create index events_task on events (task_id) where task_id is not null;
create index events_text on events (text_id) where text_id is not null;
create index events_class on events (class_id, at_us) where class_id is not null;
create table texts (id integer primary key, text text not null unique);
create virtual table texts_search using fts5 (text, content='texts', content_rowid='id', tokenize='trigram');
create table classes (id integer primary key, name text not null unique);
create table failures (
  class_id integer not null, kind text not null, minute integer not null, count integer not null,
  first_us integer not null, last_us integer not null, primary key (class_id, kind, minute)) without rowid;
create table counts (id integer primary key, step integer not null, at integer not null, body blob not null);
create index counts_at on counts (step, at);
create table worker_config (at_us integer primary key, body text not null);
create table worker_state (at_us integer primary key, body text not null);
create table segments (
  name text primary key, "table" text not null, "rows" integer not null, size_bytes integer not null,
  first_at integer not null, last_at integer not null, sealed_at integer not null);
create table about (
  version integer not null, "group" text not null, worker text not null, started_at_us integer not null,
  keep_seconds integer not null, bounded integer not null);
"""


class SegmentRow(msgspec.Struct, frozen=True):
    """A sealed segment as listed in the database."""

    name: str
    summary: SegmentSummary
    size_bytes: int
    sealed_at_us: int


class EventsDatabase:
    """Writes the database of a period.

    Args:
        path: The path of an existing, empty file, or the URI of a database in memory.
        group: The consumer group.
        worker: The worker's name.
        started_at_us: The start of the period in microseconds since the epoch.
        keep_hours: The retention of the period.
        bounded: Whether a bounded run writes it, which records failures only.

    Raises:
        sqlite3.Error: The database cannot be written.
    """

    def __init__(
        self,
        path: Path | str,
        group: str,
        worker: str,
        started_at_us: int,
        keep_hours: float,
        *,
        bounded: bool = False,
    ) -> None:
        # The writer's thread uses the connection; other threads create and close it.
        if isinstance(path, Path):
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
            self._db.execute("pragma journal_mode = memory")
            self._db.execute("pragma journal_mode = wal")
        else:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, uri=True)
        # A crash of the machine loses what was not flushed; a crash of this process loses nothing.
        self._db.execute("pragma synchronous = off")
        self._db.executescript(f"begin; {_TABLES} pragma user_version = {VERSION}; commit;")
        self._db.execute(
            "insert into about values (?, ?, ?, ?, ?, ?)",
            (VERSION, group, worker, started_at_us, int(keep_hours * 3600), bounded),
        )
        self._classes: dict[str, int] = {}
        self.events = 0

    def add_events(self, events: Sequence[RecordedEvent]) -> None:
        """Store all of the events, or none.

        Raises:
            sqlite3.Error: The database cannot be written.
        """
        known = dict(self._classes)
        try:
            self._db.execute("begin immediate")
            rows = [self._make_row(event) for event in events]
            self._db.executemany(
                'insert into events (at_us, kind, topic, "partition", "offset", task_id, sink, text_id, class_id, '
                "data) values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                rows,
            )
            self._count(events)
            self._db.execute("commit")
        except BaseException:
            self._classes = known
            self._roll_back()
            raise
        self.events += len(events)

    def _make_row(self, event: RecordedEvent) -> tuple[object, ...]:
        text = escape_surrogates(event.text)[:MAX_ERROR_CHARS] if event.text else ""
        return (
            event.at_us,
            event.kind.value,
            event.topic,
            event.partition,
            event.offset,
            None if event.task_id is None else escape_surrogates(event.task_id),
            event.sink,
            self._find_text(text) if text else None,
            self._find_class(escape_surrogates(event.error_class)) if event.error_class else None,
            msgspec.msgpack.encode(event.data) if event.data else None,
        )

    def _count(self, events: Sequence[RecordedEvent]) -> None:
        """Count failures by class, kind and minute; grouped first, because most events of a batch are alike."""
        counted: dict[tuple[int, str, int], list[int]] = {}
        for event in events:
            if not event.error_class:
                continue
            number = event.data.get("count", 1)
            path = (
                self._find_class(escape_surrogates(event.error_class)),
                event.kind.value,
                event.at_us // 1_000_000 // COUNT_SECONDS,
            )
            known = counted.setdefault(path, [0, event.at_us, event.at_us])
            known[0] += number if isinstance(number, int) else 1
            known[1], known[2] = min(known[1], event.at_us), max(known[2], event.at_us)
        self._db.executemany(
            "insert into failures values (?, ?, ?, ?, ?, ?) on conflict do update set count = count + excluded.count, "
            "first_us = min(first_us, excluded.first_us), last_us = max(last_us, excluded.last_us)",
            [(*path, *count) for path, count in counted.items()],
        )

    def _find_class(self, name: str) -> int:
        found = self._classes.get(name)
        if found is not None:
            return found
        if len(self._classes) >= MAX_CLASSES and name != OTHERS:
            return self._find_class(OTHERS)
        number = self._db.execute("insert into classes (name) values (?)", (name,)).lastrowid
        assert number is not None
        self._classes[name] = number
        return number

    def _find_text(self, text: str) -> int:
        found = self._db.execute("select id from texts where text = ?", (text,)).fetchone()
        if found is not None:
            return int(found[0])
        number = self._db.execute("insert into texts (text) values (?)", (text,)).lastrowid
        assert number is not None
        self._db.execute("insert into texts_search (rowid, text) values (?, ?)", (number, text))
        return number

    def remove_oldest(self, number: int) -> None:
        """Remove the oldest events, and texts that no other event uses.

        Raises:
            sqlite3.Error: The database cannot be written.
        """
        try:
            self._db.execute("begin immediate")
            gone = self._db.execute(
                "delete from events where id in (select id from events order by at_us, id limit ?)", (number,)
            ).rowcount
            lost = self._db.execute(
                "select id, text from texts where not exists (select 1 from events where text_id = texts.id)"
            ).fetchall()
            self._db.executemany("insert into texts_search (texts_search, rowid, text) values ('delete', ?, ?)", lost)
            self._db.executemany("delete from texts where id = ?", [(number,) for number, _ in lost])
            self._db.execute("commit")
        except BaseException:
            self._roll_back()
            raise
        self.events -= gone

    def add_counts(self, step: int, at: int, body: bytes) -> None:
        """Store the counts of `step` seconds from `at` on, in seconds since the epoch."""
        self._db.execute("insert into counts (step, at, body) values (?, ?, ?)", (step, at, body))

    @property
    def is_empty(self) -> bool:
        """Whether the database has neither events nor counts."""
        return not self.events and self._db.execute("select 1 from counts limit 1").fetchone() is None

    def add_config(self, at_us: int, body: str) -> None:
        """Store the configuration, whose secrets the caller has masked."""
        self._db.execute("insert or replace into worker_config values (?, ?)", (at_us, body))

    def add_state(self, at_us: int, body: str) -> None:
        self._db.execute("insert or replace into worker_state values (?, ?)", (at_us, body))

    def trim(self, now: float, keep_seconds: float, keep_count_seconds: float) -> None:
        """Remove expired counts and failures, and all states but the newest; events stay.

        Args:
            now: Seconds since the epoch.
            keep_seconds: The maximum age of failures and of counts per minute.
            keep_count_seconds: The maximum age of counts per second.
        """
        oldest = now - keep_seconds
        self._db.execute("delete from counts where step = 1 and at < ?", (now - keep_count_seconds,))
        self._db.execute("delete from counts where step > 1 and at < ?", (oldest,))
        self._db.execute("delete from worker_state where at_us < (select max(at_us) from worker_state)")
        self._db.execute("delete from failures where last_us < ?", (int(oldest * 1_000_000),))

    def add_segment(self, row: SegmentRow) -> None:
        """Add a sealed segment to the list of segments."""
        about = row.summary
        self._db.execute(
            "insert or replace into segments values (?, ?, ?, ?, ?, ?, ?)",
            (row.name, about.table, about.rows, row.size_bytes, about.first_at, about.last_at, row.sealed_at_us),
        )

    def remove_segment(self, name: str) -> None:
        """Remove a segment from the list of segments."""
        self._db.execute("delete from segments where name = ?", (name,))

    def flush(self) -> None:
        """Checkpoint the WAL into the database file and force it to disk."""
        self._db.execute("pragma synchronous = full")
        self._db.execute("pragma wal_checkpoint(passive)")
        self._db.execute("pragma synchronous = off")

    def close(self) -> None:
        """Close the database, and merge the WAL into its file unless a reader has it open."""
        try:
            self._db.execute(_LEAVE_WAL)
        except sqlite3.Error:
            self._db.close()
            return
        self._db.close()

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("rollback")


def list_in_database(database: Path, rows: Sequence[SegmentRow]) -> None:
    """List segments in the database that a killed process left behind.

    Raises:
        sqlite3.Error: The database is incomplete or cannot be written.
    """
    db = sqlite3.connect(f"{database.absolute().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=5.0)
    try:
        for row in rows:
            about = row.summary
            db.execute(
                "insert or replace into segments values (?, ?, ?, ?, ?, ?, ?)",
                (row.name, about.table, about.rows, row.size_bytes, about.first_at, about.last_at, row.sealed_at_us),
            )
        db.execute(_LEAVE_WAL)
    finally:
        db.close()
