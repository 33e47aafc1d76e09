"""Searches events, failures and counts in the databases of many periods."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from tidemill.core.recorder.cursor import Key
from tidemill.core.recorder.failure_count import count_failures, rank_failures
from tidemill.core.wording import to_one_line
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.events_database import COUNT_SECONDS
from tidemill.recorder.reading.queries import EventQuery, FailureGroup, RecordedEventRow
from tidemill.recorder.reading.segment_store import SegmentStore

_COLUMNS = (
    'at_us, kind, topic, "partition", "offset", task_id, sink, '
    "coalesce((select text from texts where id = text_id), ''), "
    "coalesce((select name from classes where id = class_id), ''), data, events.id"
)
_SELECT = f"select {_COLUMNS} from events"  # noqa: S608
_ORDER = "order by at_us desc, events.id desc limit ?"
#: The newest events that are scanned before the index is used.
_RECENT = 2_000
#: The shortest text that the index can find; for shorter ones, all texts are scanned.
_TRIGRAM = 3
#: The types of a sort key: negated time, period, negated id of the event.
KEY_KINDS: tuple[type[int] | type[str], ...] = (int, str, int)
_MINUTE = 60


class FoundEvent(msgspec.Struct, frozen=True):
    """An event with its sort key."""

    key: tuple[int, str, int]
    row: RecordedEventRow


def ask_database(store: SegmentStore, read: Callable[[sqlite3.Connection], None], problems: list[str]) -> None:
    """Call a function with the database of a period; errors of the database are described in `problems`."""
    try:
        with contextlib.closing(store.connect()) as db:
            read(db)
    except FileNotFoundError:
        return  # retention has removed it
    except (OSError, sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
        problems.append(
            f"{store.recording}: a database is damaged or incomplete and was skipped: {to_one_line(str(error))}"
        )


def search_events(
    stores: Iterable[SegmentStore], query: EventQuery, after: Key | None, limit: int, problems: list[str]
) -> list[FoundEvent]:
    """Return the newest events that match, at most `limit`."""
    found: list[FoundEvent] = []
    for store in stores:
        where, values = _make_where(query, after, store.location)
        if query.text and query.text.isascii() and len(query.text) >= _TRIGRAM:
            # A frequent text is found among the newest events; the index would list all its events first.
            few = _search_recent(store, query, after, limit, problems)
            if len(few) == limit:
                found += few
                continue
        _collect(store, f"{_SELECT} {where} {_ORDER}", (*values, limit), found, problems)
    return sorted(found, key=lambda each: each.key)[:limit]


def _collect(
    store: SegmentStore, statement: str, values: Sequence[Any], found: list[FoundEvent], problems: list[str]
) -> None:
    def read(db: sqlite3.Connection) -> None:
        for row in db.execute(statement, values):
            event = RecordedEventRow(store.recording, _make_event(row))
            found.append(FoundEvent((-row[0], store.location, -row[-1]), event))

    ask_database(store, read, problems)


def find_positions(
    stores: Iterable[SegmentStore],
    query: EventQuery,
    positions: Iterable[tuple[str, int, int]],
    until: Key | None,
    problems: list[str],
) -> set[tuple[str, int, int]]:
    """Return the positions that have a matching event, at or before a sort key if one is given."""
    found: set[tuple[str, int, int]] = set()
    wanted = msgspec.structs.replace(query, text="")
    text = query.text.lower()
    for store in stores:

        def look(db: sqlite3.Connection, store: SegmentStore = store) -> None:
            for topic, partition, offset in set(positions) - found:
                here = msgspec.structs.replace(wanted, topic=topic, partition=partition, offset=offset)
                where, values = _make_where(here, None, store.location)
                for row in db.execute(f"{_SELECT} {where} {_ORDER}", (*values, -1)):
                    key = (-row[0], store.location, -row[-1])
                    if (until is None or key <= until) and text in row[7].lower():
                        found.add((topic, partition, offset))
                        break

        ask_database(store, look, problems)
    return found


def _make_event(row: Sequence[Any]) -> RecordedEvent:
    at_us, kind, topic, partition, offset, task_id, sink, text, error_class, data, _ = row
    facts = msgspec.msgpack.decode(data, type=dict[str, str | int | float]) if data is not None else {}
    return RecordedEvent(at_us, EventKind(kind), topic, partition, offset, task_id, sink, text, error_class, facts)


def _search_recent(
    store: SegmentStore, query: EventQuery, after: Key | None, limit: int, problems: list[str]
) -> list[FoundEvent]:
    """Search the newest `_RECENT` events that match everything but the text."""
    where, values = _make_where(msgspec.structs.replace(query, text=""), after, store.location)
    newest = f"select * from events {where} {_ORDER}"  # noqa: S608
    found: list[FoundEvent] = []
    statement = (
        f"select {_COLUMNS} from ({newest}) as events "  # noqa: S608
        f"where instr((select lower(text) from texts where id = text_id), lower(?)) > 0 {_ORDER}"
    )
    _collect(store, statement, (*values, _RECENT, query.text, limit), found, problems)
    return found


def _make_where(query: EventQuery, after: Key | None, location: str) -> tuple[str, list[Any]]:
    clauses: list[tuple[str, list[Any]]] = []
    for column, wanted in (
        ("topic", query.topic),
        ('"partition"', query.partition),
        ('"offset"', query.offset),
        ("task_id", query.task_id),
        ("sink", query.sink),
    ):
        if wanted is not None:
            clauses.append((f"{column} = ?", [wanted]))
    if query.task_ids:
        clauses.append((f"task_id in ({', '.join('?' * len(query.task_ids))})", list(query.task_ids)))
    if query.kinds:
        clauses.append((f"kind in ({', '.join('?' * len(query.kinds))})", list(query.kinds)))
    if query.error_class is not None:
        clauses.append(("class_id = (select id from classes where name = ?)", [query.error_class]))
    if query.since_us is not None:
        clauses.append(("at_us >= ?", [query.since_us]))
    if query.until_us is not None:
        clauses.append(("at_us < ?", [query.until_us]))
    if query.text:
        clauses.append(_match_text(query.text))
    if after is not None:
        clauses.append(_make_after(after, location))
    where = " and ".join(f"({clause})" for clause, _ in clauses)
    return (f"where {where}" if where else ""), [value for _, values in clauses for value in values]


def _match_text(text: str) -> tuple[str, list[Any]]:
    if len(text) < _TRIGRAM:
        return "text_id in (select id from texts where instr(lower(text), lower(?)) > 0)", [text]
    phrase = '"{}"'.format(text.replace('"', '""').replace("\0", " "))
    return "text_id in (select rowid from texts_search where texts_search match ?)", [phrase]


def _make_after(after: Key, location: str) -> tuple[str, list[Any]]:
    at_us, where, number = -int(after[0]), str(after[1]), -int(after[2])
    if location != where:
        return ("at_us <= ?" if location > where else "at_us < ?"), [at_us]
    return "at_us < ? or (at_us = ? and events.id < ?)", [at_us, at_us, number]


class _Group(msgspec.Struct):
    """A group while its counts are summed."""

    kinds: dict[str, int]
    first_us: int
    last_us: int
    minutes: dict[int, int] = {}


def group_failures(
    stores: Sequence[SegmentStore], since_us: int | None, until_us: int | None, limit: int, problems: list[str]
) -> tuple[list[FailureGroup], int]:
    """Return the most frequent groups without examples, and how many others there are; times are rounded to minutes."""
    groups: dict[str, _Group] = {}
    first = 0 if since_us is None else since_us // 1_000_000 // COUNT_SECONDS
    last = 2**62 if until_us is None else (until_us - 1) // 1_000_000 // COUNT_SECONDS

    def add_up(db: sqlite3.Connection) -> None:
        for name, kind, count, first_us, last_us in db.execute(
            "select name, kind, sum(count), min(first_us), max(last_us) from failures join classes on id = class_id "
            "where minute between ? and ? group by class_id, kind",
            (first, last),
        ):
            group = groups.setdefault(name, _Group({}, first_us, last_us))
            group.kinds[kind] = group.kinds.get(kind, 0) + count
            group.first_us, group.last_us = min(group.first_us, first_us), max(group.last_us, last_us)

    for store in stores:
        ask_database(store, add_up, problems)
    ranked = sorted(groups.items(), key=lambda each: rank_failures(each[0], each[1].kinds))
    shown = dict(ranked[:limit])

    def add_minutes(db: sqlite3.Connection) -> None:
        for name, group in shown.items():
            for minute, count in db.execute(
                "select minute, sum(count) from failures where class_id = (select id from classes where name = ?) "
                "and minute between ? and ? group by minute",
                (name, first, last),
            ):
                group.minutes[minute] = group.minutes.get(minute, 0) + count

    for store in stores:
        ask_database(store, add_minutes, problems)
    return [
        FailureGroup(
            name, group.kinds, count_failures(group.kinds), group.first_us, group.last_us, sorted(group.minutes.items())
        )
        for name, group in shown.items()
    ], len(ranked) - len(shown)


def add_counts(
    stores: Iterable[SegmentStore], since: int, until: int, step_seconds: int, problems: list[str]
) -> list[Counts]:
    """Return the counts of each step from `since` to `until`, in seconds since the epoch."""
    points: dict[int, Counts] = {}

    def add(db: sqlite3.Connection) -> None:
        start = since
        if step_seconds % _MINUTE == 0:
            for at, body in _read_counts(db, _MINUTE, since // _MINUTE * _MINUTE, until):
                _add_point(points, at, body, step_seconds)
                start = at + _MINUTE
        for at, body in _read_counts(db, 1, start, until):
            _add_point(points, at, body, step_seconds)

    for store in stores:
        ask_database(store, add, problems)
    return [points[at] for at in sorted(points)]


def _read_counts(db: sqlite3.Connection, step: int, since: int, until: int) -> list[tuple[int, bytes]]:
    return db.execute(
        "select at, body from counts where step = ? and at >= ? and at < ? order by at, id", (step, since, until)
    ).fetchall()


def _add_point(points: dict[int, Counts], at: int, body: bytes, step_seconds: int) -> None:
    start = at // step_seconds * step_seconds
    points.setdefault(start, Counts(start, step_seconds)).add(msgspec.msgpack.decode(body, type=Counts))


def find_commit(
    stores: Iterable[SegmentStore], partition: str, offset: int, since: int, until: int, problems: list[str]
) -> int | None:
    """Return the time (seconds since the epoch) of the first sample with an offset of "topic/partition" committed."""
    found: list[int] = []

    def look(db: sqlite3.Connection) -> None:
        for at, body in _read_counts(db, 1, since, until):
            counts = msgspec.msgpack.decode(body, type=Counts).partitions.get(partition)
            if counts is not None and counts.committed_to is not None and counts.committed_to > offset:
                found.append(at)
                return

    for store in stores:
        ask_database(store, look, problems)
    return min(found, default=None)
