"""Answers queries about recordings: of one or all workers below a folder, and of this process in memory.

Files may be read while other processes write them. Damaged parts are skipped and described in `problems`; data that
retention removes during a query is no problem. Safe for any thread.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from tidemill.core.recorder.cursor import Key, decode_cursor, encode_cursor
from tidemill.recorder.format.counts import Counts, add_workers
from tidemill.recorder.format.file_layout import Period, identify_folder, list_periods, list_worker_folders
from tidemill.recorder.format.schema import MAX_KEY_BYTES, RowTable
from tidemill.recorder.kept_memory import release_memory
from tidemill.recorder.reading import event_search, letter_search, row_search
from tidemill.recorder.reading.linked_search import Position, find_linked, link_events, link_tasks, list_cursor_kinds
from tidemill.recorder.reading.message_trace import tell_stories
from tidemill.recorder.reading.queries import (
    CountSeries,
    EventPage,
    EventQuery,
    FailureList,
    MessagePage,
    MessageQuery,
    RecordedEventRow,
    RecordedMessageRow,
    RecordedTaskRow,
    RecordingInfo,
    TaskPage,
    TaskQuery,
    Trace,
)
from tidemill.recorder.reading.recording_info import describe_recording, find_span
from tidemill.recorder.reading.row_filter import KEY_KINDS, RowCriteria
from tidemill.recorder.reading.row_search import FoundRow
from tidemill.recorder.reading.runs import RunChoice, RunFilter, RunNames, StoredRun, list_runs
from tidemill.recorder.reading.segment_store import DiskStore, MemoryStore, SegmentStore, StoreCache
from tidemill.recorder.writing.memory_recording import MemoryRecording

_MILLION = 1_000_000
_ALL = RunFilter()
#: The maximum number of failure groups in an answer; each needs queries of its own in every database.
MAX_GROUPS = 500
RowT = TypeVar("RowT", RecordedMessageRow, RecordedTaskRow)


class Reader:
    """Reads recordings.

    Args:
        db_dir: The folder of all recordings; None if there is none.
        memory: The recordings in this process's memory, by the folder names they would have.

    Example:
        >>> reader = Reader(Path("~/.local/state/tidemill").expanduser())
        >>> page = reader.find_messages(MessageQuery(topic="orders", partition=3, offset=4711))  # doctest: +SKIP
    """

    def __init__(self, db_dir: Path | None, memory: dict[str, MemoryRecording] | None = None) -> None:
        self._db_dir = db_dir
        self._identity = uuid.uuid4().hex
        self._memory = [MemoryStore(name, recording) for name, recording in (memory or {}).items()]
        self._cache = StoreCache()
        self._names = RunNames()
        # Parquet files are cached and shared, and do not support concurrent use.
        self._lock = threading.Lock()

    @property
    def identity(self) -> str:
        """An id common to exactly the readers of the same folder on this machine."""
        return self._identity if self._db_dir is None else identify_folder(self._db_dir) or self._identity

    def _list_stores(self, runs: RunChoice = _ALL) -> list[SegmentStore]:
        """Return the stores of the selected runs, the newest of each first."""
        stores: list[SegmentStore] = [*self._memory]
        if self._db_dir is not None:
            for folder in list_worker_folders(self._db_dir):
                stores += [DiskStore(period, self._cache) for period in reversed(list_periods(folder))]
        return self._names.choose(stores, runs)

    def find_messages(self, query: MessageQuery, cursor: str | None = None, limit: int = 100) -> MessagePage:
        """Return finished messages, those resolved last first.

        A query by task, label or error text orders messages by their latest matching task or error. Its pages may have
        fewer rows than `limit` even if more follow.

        Args:
            query: The selection.
            cursor: The cursor of the previous page; None: the first page.
            limit: The maximum number of rows.

        Raises:
            WrongCursorError: The cursor is damaged, or belongs to another query.
        """
        if query.task_id is not None or query.label is not None or query.error:
            return self._find_linked(query, cursor, limit)
        criteria = _message_criteria(query)
        found, following, problems = self._search(criteria, "messages", query, cursor, limit)
        keys = [each.key for each in found]
        return MessagePage(
            _to_rows(found, RecordedMessageRow), following, problems, keys, _name_query("messages", query)
        )

    def find_dead_lettered(self, rows: Sequence[RecordedMessageRow]) -> list[bool]:
        """Return for each row whether its message left a dead letter although its tasks succeeded."""
        return letter_search.find_dead_lettered(self._list_stores(), rows, []) if rows else []

    def find_tasks(self, query: TaskQuery, cursor: str | None = None, limit: int = 100) -> TaskPage:
        """Return tasks, those that ended last first; see `find_messages`.

        Raises:
            WrongCursorError: The cursor is damaged, or belongs to another query.
        """
        criteria = _task_criteria(query)
        found, following, problems = self._search(criteria, "tasks", query, cursor, limit)
        keys = [each.key for each in found]
        return TaskPage(_to_rows(found, RecordedTaskRow), following, problems, keys, _name_query("tasks", query))

    def _search(
        self,
        criteria: RowCriteria,
        what: str,
        query: MessageQuery | TaskQuery,
        cursor: str | None,
        limit: int,
    ) -> tuple[list[FoundRow], str | None, list[str]]:
        text = _name_query(what, query)
        if cursor is not None:
            after = decode_cursor(cursor, text, KEY_KINDS[criteria.table])
            criteria = msgspec.structs.replace(criteria, after=after)
        problems: list[str] = []
        with self._lock:
            segments = row_search.list_segments(self._list_stores(query), criteria.table, problems)
            found = row_search.search(segments, criteria, limit + 1, problems)
        release_memory()
        return found[:limit], _next_cursor(text, [each.key for each in found], limit), problems

    def _find_linked(self, query: MessageQuery, cursor: str | None, limit: int) -> MessagePage:
        """Return messages found by a task, a label or an error text."""
        problems: list[str] = []
        stores = self._list_stores(query)
        wanted = _message_criteria(query)
        errors = EventQuery(topic=query.topic, partition=query.partition, offset=query.offset, text=query.error)

        def search(criteria: RowCriteria, most: int, names: Sequence[str] | None) -> list[FoundRow]:
            with self._lock:
                segments = row_search.list_segments(stores, criteria.table, problems)
                return row_search.search(segments, criteria, most, problems, names)

        def find_rows(positions: frozenset[Position], after: Key | None, most: int) -> list[FoundRow]:
            if by_task and query.error:
                positions = frozenset(event_search.find_positions(stores, errors, positions, None, problems))
            return (
                search(msgspec.structs.replace(wanted, positions=positions, after=after), most, None)
                if positions
                else []
            )

        by_task = query.task_id is not None or query.label is not None
        links = link_tasks(_task_criteria(query), search) if by_task else link_events(stores, errors, problems)
        text = _name_query("messages", query)
        begin = None if cursor is None else decode_cursor(cursor, text, list_cursor_kinds(links))
        found, following, keys = find_linked(links, find_rows, begin, limit)
        release_memory()
        after = None if following is None else encode_cursor(text, following)
        return MessagePage(_to_rows(found, RecordedMessageRow), after, list(dict.fromkeys(problems)), keys, text)

    def find_events(self, query: EventQuery, cursor: str | None = None, limit: int = 100) -> EventPage:
        """Return events, newest first; see `find_messages`.

        Raises:
            WrongCursorError: The cursor is damaged, or belongs to another query.
        """
        text = _name_query("events", query)
        after = None if cursor is None else decode_cursor(cursor, text, event_search.KEY_KINDS)
        problems: list[str] = []
        found = event_search.search_events(self._list_stores(query), query, after, limit + 1, problems)
        following = _next_cursor(text, [each.key for each in found], limit)
        return EventPage([each.row for each in found[:limit]], following, problems)

    def list_failures(
        self,
        since_us: int | None = None,
        until_us: int | None = None,
        limit: int = 100,
        runs: RunChoice = _ALL,
    ) -> FailureList:
        """Return failures grouped by error class, the most frequent first.

        Args:
            since_us: The minute of the first failures.
            until_us: The minute of the last failures.
            limit: The maximum number of groups, capped at `MAX_GROUPS`.
            runs: Selects the runs.
        """
        stores, problems = self._list_stores(runs), list[str]()
        groups, more = event_search.group_failures(stores, since_us, until_us, min(limit, MAX_GROUPS), problems)
        groups = [
            msgspec.structs.replace(group, example=self._find_example(stores, group.error_class, problems))
            for group in groups
        ]
        return FailureList(groups, more, list(dict.fromkeys(problems)))

    def _find_example(
        self, stores: Sequence[SegmentStore], error_class: str, problems: list[str]
    ) -> RecordedEventRow | None:
        for store in stores:
            found = event_search.search_events([store], EventQuery(error_class=error_class), None, 1, problems)
            if found:
                return found[0].row
        return None

    def read_counts(self, since_us: int, until_us: int, step_seconds: int = 1, runs: RunChoice = _ALL) -> CountSeries:
        """Return counts for charts; steps of whole minutes are the fastest.

        Args:
            since_us: The start of the range.
            until_us: The end of the range, exclusive.
            step_seconds: The length of a step.
            runs: Selects the runs, whose counts are added up.
        """
        problems: list[str] = []
        step = max(1, step_seconds)
        workers: dict[str, list[SegmentStore]] = {}
        for store in self._list_stores(runs):
            workers.setdefault(store.recording, []).append(store)
        points: dict[int, Counts] = {}
        for stores in workers.values():
            first, last = since_us // _MILLION, -(-until_us // _MILLION)
            for point in event_search.add_counts(stores[::-1], first, last, step, problems):
                if point.at in points:
                    add_workers(points[point.at], point)
                else:
                    points[point.at] = point
        return CountSeries([points[at] for at in sorted(points)], step, problems)

    def trace(self, topic: str, partition: int, offset: int, recording: str | None = None) -> Trace:
        """Return all recorded data of a message, one story for each time it was processed."""
        messages = self.find_messages(
            MessageQuery(topic=topic, partition=partition, offset=offset, recording=recording)
        )
        tasks = self.find_tasks(
            TaskQuery(topic=topic, partition=partition, offset=offset, recording=recording), limit=1_000
        )
        events = self.find_events(
            EventQuery(topic=topic, partition=partition, offset=offset, recording=recording), limit=1_000
        )
        problems = [*messages.problems, *tasks.problems, *events.problems]
        stores = self._list_stores(RunFilter(recording=recording))
        rows = list(events.rows)
        if tasks.rows:
            rows += self._find_task_events(stores, topic, partition, offset, tasks.rows)
            rows = _drop_same_letters(rows)

        bounded = [store for store in stores if self._names.find(store).bounded] if messages.rows else []
        others = [store for store in stores if store not in bounded]

        def find_commit(since: int, until: int) -> int | None:
            return event_search.find_commit(others, f"{topic}/{partition}", offset, since, until, problems)

        told = tell_stories(messages.rows, tasks.rows, rows, find_commit, {store.recording for store in bounded})
        first, last = self.find_span()
        return msgspec.structs.replace(
            told, kept_from_us=first, kept_to_us=last, problems=list(dict.fromkeys(problems))
        )

    def _find_task_events(
        self, stores: Sequence[SegmentStore], topic: str, partition: int, offset: int, tasks: Sequence[RecordedTaskRow]
    ) -> list[RecordedEventRow]:
        """Return the events of a message's tasks that name another message: events name only the first message of a
        task.
        """
        messages: dict[tuple[str, str], set[int]] = {}
        for task in tasks:
            messages.setdefault((task.recording, task.task_id), set()).update(task.offsets)
        ids = tuple(dict.fromkeys(task.task_id for task in tasks))
        query = EventQuery(topic=topic, partition=partition, task_ids=ids)
        rows = (each.row for each in event_search.search_events(stores, query, None, 1_000, []))
        # Handlers may use the same id for tasks of different messages, so compare the messages, too.
        return [
            row
            for row in rows
            if row.event.offset != offset
            and (
                row.event.offset is None
                or row.event.offset in messages.get((row.recording, row.event.task_id or ""), ())
            )
        ]

    def find_span(self) -> tuple[int | None, int | None]:
        """Return the times of the oldest and the newest recorded message."""
        with self._lock:
            return find_span(self._list_stores())

    def list_runs(self) -> list[StoredRun]:
        """Return the recorded runs: live ones first, then the most recently written."""
        return list_runs(self._list_stores(), self._names)

    def find_period(self, recording: str, name: str) -> Period | None:
        """Return a period by its names; None if there is none on disk."""
        for store in self._list_stores(RunFilter(recording=recording)):
            if isinstance(store, DiskStore) and store.period.name == name:
                return store.period
        return None

    def list_recordings(self, runs: RunChoice = _ALL) -> list[RecordingInfo]:
        """Return the periods of the selected runs, the newest of each first."""
        with self._lock:
            return [describe_recording(store) for store in self._list_stores(runs)]


def _drop_same_letters(rows: Sequence[RecordedEventRow]) -> list[RecordedEventRow]:
    """Drop repeated events of the same letter, which has one event for each of its messages."""
    letters: set[tuple[str, object]] = set()
    kept = []
    for row in rows:
        letter = row.event.data.get("letter_id")
        if letter is None or (row.recording, letter) not in letters:
            kept.append(row)
            letters.add((row.recording, letter))
    return kept


def split_label(label: str) -> tuple[str, str]:
    """Return name and value of NAME=VALUE."""
    name, _, value = label.partition("=")
    return name, value


def _message_criteria(query: MessageQuery) -> RowCriteria:
    return RowCriteria(
        table=RowTable.MESSAGES,
        topic=query.topic,
        partition=query.partition,
        offset=query.offset,
        key=None if query.key is None else query.key[:MAX_KEY_BYTES],
        kinds=query.statuses,
        min_us=_to_us(query.min_seconds),
        max_us=_to_us(query.max_seconds),
        since_us=query.since_us,
        until_us=query.until_us,
    )


def _task_criteria(query: TaskQuery | MessageQuery) -> RowCriteria:
    """Return the criteria for tasks; for a query for messages, only the conditions on tasks apply."""
    criteria = RowCriteria(
        table=RowTable.TASKS,
        topic=query.topic,
        partition=query.partition,
        offset=query.offset,
        task_id=query.task_id,
        label=None if query.label is None else split_label(query.label),
        until_us=query.until_us,  # no task ends after its message is resolved
    )
    if isinstance(query, MessageQuery):
        return criteria
    return msgspec.structs.replace(
        criteria,
        kinds=query.kinds,
        min_us=_to_us(query.min_seconds),
        max_us=_to_us(query.max_seconds),
        since_us=query.since_us,
    )


def _to_us(seconds: float | None) -> int | None:
    return None if seconds is None else int(seconds * _MILLION)


def _to_rows(found: Sequence[FoundRow], kind: type[RowT]) -> list[RowT]:
    names = kind.__struct_fields__
    rows = []
    for each in found:
        if "labels" in each.row:
            each.row["labels"] = dict(each.row["labels"] or ())
            each.row["offsets"] = each.row["offsets"] or []
            each.row["args"] = each.row["args"] or []
        rows.append(kind(*(each.row[name] for name in names)))
    return rows


def _name_query(what: str, query: msgspec.Struct) -> str:
    return f"{what} {msgspec.json.encode(query).decode()}"


def _next_cursor(text: str, keys: Sequence[Key], limit: int) -> str | None:
    return encode_cursor(text, keys[limit - 1]) if len(keys) > limit > 0 else None
