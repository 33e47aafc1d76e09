"""The reader: what it finds is what was recorded, in open and sealed segments, on disk and in memory."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.recorder.rows import START, TOPIC, message, messages, task, tasks
from tests.until import wait_until

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.cursor import WrongCursorError
from tidemill.core.recorder.sealing import SealPolicy
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading import event_search
from tidemill.recorder.reading import reader as reader_module
from tidemill.recorder.reading.copying import copy_recordings
from tidemill.recorder.reading.queries import EventQuery, MessageQuery, TaskQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.cleaning import find_expired, remove_recordings
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.link.progress import EngineProgress, SinkStats
from tidemill.runtime.loop.durations import Durations

#: Rows of a segment in these tests.
SEGMENT = 40


def make_rows() -> list[dict[str, Any]]:
    """Return messages of three partitions; many are resolved at the same time, some were reprocessed."""
    shuffle = random.Random(3)
    rows = []
    for number in range(300):
        at = START + number // 7 * 1_000_000
        failed = number % 25 == 3
        rows.append(
            message(
                number // 3,
                number % 3,
                key=None
                if number % 10 == 0
                else bytes([200 + number % 5, 255])
                if number % 2
                else b"k%d" % (number % 9),
                consumed_at=at - shuffle.randrange(1, 5_000_000),
                resolved_at=at,
                status="failed" if failed else "done",
                error="exit: exit code #" if failed else None,
            )
        )
    return [*rows, message(5, 1, resolved_at=START + 90_000_000), message(5, 1, resolved_at=START + 91_000_000)]


def make_key(number: int) -> bytes | None:
    if number % 10 == 0:
        return None
    return bytes([200 + number % 5, 255]) if number % 2 else b"k%d" % (number % 9)


ROWS = make_rows()
TASKS = [
    task(
        f"t-{number}",
        [number, number + 1] if number % 4 == 0 else [number],
        number % 3,
        labels=[("tenant", "acme" if number % 5 else "rare"), ("step", "1")],
        kind="exit" if number % 20 == 7 else "ok",
        ended_at=START + number // 5 * 1_000_000,
    )
    for number in range(150)
]
EVENTS = [
    RecordedEvent(
        START + number // 3 * 1_000_000,
        EventKind.TASK_FAILED if number % 2 else EventKind.SINK_ERROR,
        TOPIC,
        number % 3,
        number,
        f"t-{number}",
        text=f"user {number} was not found: Überweisung" if number % 10 else 'said "no" to 50%_',
        error_class="user # was not found" if number % 10 else "said no",
    )
    for number in range(60)
]


@pytest.fixture(scope="module", params=["disk", "memory"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Read what a running writer has, the last rows of it in open segments."""
    folder = tmp_path_factory.mktemp("recordings") if request.param == "disk" else None
    settings = DebugSettings(db_dir=str(folder or ""))
    with RecordWriter(settings, "g", "w", policy=SealPolicy(max_rows=SEGMENT)) as writer:
        fill(writer)
        memory = writer.recording
        if folder is None:
            assert isinstance(memory, MemoryRecording)
            yield Reader(None, {"g.w": memory})
        else:
            assert list(folder.rglob("*.open"))
            assert len(list(folder.rglob("*.parquet"))) > 5
            yield Reader(folder)


def fill(writer: RecordWriter) -> None:
    """Record everything; each batch is stored before the next is given."""
    seq = 0
    for table, rows, pack in ((RowTable.MESSAGES, ROWS, messages), (RowTable.TASKS, TASKS, tasks)):
        for at in range(0, len(rows), 15):
            seq += 1
            before = writer.statistics.rows
            writer.put_rows("e1", 0, seq, table, pack(*rows[at : at + 15]))
            wait_until(lambda before=before: writer.statistics.rows > before)
    writer.put_events("e1", 0, seq + 1, EVENTS)
    wait_until(lambda: writer.statistics.events == len(EVENTS))


def in_order(rows: list[dict[str, Any]], matches: Callable[[dict[str, Any]], bool]) -> list[tuple[int, int, int]]:
    found = [row for row in rows if matches(row)]
    found.sort(key=lambda row: (-row["resolved_at"], row["partition"], row["offset"]))
    return [(row["resolved_at"], row["partition"], row["offset"]) for row in found]


QUERIES: list[tuple[MessageQuery, Callable[[dict[str, Any]], bool]]] = [
    (MessageQuery(), lambda row: True),
    (MessageQuery(topic="other"), lambda row: False),
    (MessageQuery(topic=TOPIC, partition=1, offset=5), lambda row: row["partition"] == 1 and row["offset"] == 5),
    (MessageQuery(offset=99), lambda row: row["offset"] == 99),
    (MessageQuery(partition=2, offset=10_000), lambda row: False),
    (MessageQuery(partition=2), lambda row: row["partition"] == 2),
    (MessageQuery(key=b"k4"), lambda row: row["key"] == b"k4"),
    (MessageQuery(key=b"\xcb\xff"), lambda row: row["key"] == b"\xcb\xff"),
    (MessageQuery(key=b"none"), lambda row: False),
    (MessageQuery(statuses=("failed",)), lambda row: row["status"] == "failed"),
    (MessageQuery(statuses=("failed", "done"), partition=0), lambda row: row["partition"] == 0),
    (MessageQuery(statuses=("rejected",)), lambda row: False),
    (MessageQuery(min_seconds=4), lambda row: row["resolved_at"] - row["consumed_at"] >= 4_000_000),
    (MessageQuery(max_seconds=0.5), lambda row: row["resolved_at"] - row["consumed_at"] <= 500_000),
    (MessageQuery(min_seconds=1_000), lambda row: False),
    (
        MessageQuery(since_us=START + 10_000_000, until_us=START + 12_000_000),
        lambda row: START + 10_000_000 <= row["resolved_at"] < START + 12_000_000,
    ),
    (MessageQuery(recording="other"), lambda row: False),
]


@pytest.mark.parametrize(("query", "matches"), QUERIES, ids=[str(number) for number in range(len(QUERIES))])
@pytest.mark.parametrize("limit", [7, 1_000])
def test_pages_of_a_query_have_what_was_recorded_in_order_and_nothing_twice(
    reader: Reader, query: MessageQuery, matches: Callable[[dict[str, Any]], bool], limit: int
):
    found, cursor = [], None
    while True:
        page = reader.find_messages(query, cursor, limit)
        assert page.problems == []
        assert len(page.rows) <= limit
        found += [(row.resolved_at, row.partition, row.offset) for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == in_order(ROWS, matches)


def test_a_row_is_what_the_engine_sent(reader: Reader):
    (row,) = reader.find_messages(MessageQuery(partition=0, offset=1)).rows
    sent = next(each for each in ROWS if (each["partition"], each["offset"]) == (0, 1))
    assert {name: getattr(row, name) for name in sent} == sent
    assert (row.recording, row.engine, row.engine_id) == ("g.w", 0, "e1")


def test_tasks_are_found_by_offset_label_id_and_kind(reader: Reader):
    def ids(**query: Any) -> set[str]:
        return {row.task_id for row in reader.find_tasks(TaskQuery(**query), limit=1_000).rows}

    assert ids(partition=1, offset=5) == {f"t-{n}" for n in range(150) if n % 3 == 1 and (n == 5 or (n == 4 and 5))}
    assert ids(offset=5) == {"t-4", "t-5"}
    assert ids(label="tenant=rare") == {f"t-{n}" for n in range(0, 150, 5)}
    assert ids(label="tenant=none") == set()
    assert ids(label="step") == set()
    assert ids(task_id="t-17") == {"t-17"}
    assert ids(kinds=("exit",)) == {f"t-{n}" for n in range(7, 150, 20)}


def test_a_task_row_is_what_the_engine_sent(reader: Reader):
    (row,) = reader.find_tasks(TaskQuery(task_id="t-4")).rows
    sent = TASKS[4] | {"labels": dict(TASKS[4]["labels"])}
    assert {name: getattr(row, name) for name in sent} == sent


def test_pages_of_tasks_have_all_of_them_once(reader: Reader):
    found, cursor = [], None
    while True:
        page = reader.find_tasks(TaskQuery(), cursor, 11)
        found += [row.task_id for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(found) == sorted(row["task_id"] for row in TASKS)


def test_messages_are_found_by_their_tasks_and_errors(reader: Reader):
    def places(**query: Any) -> set[tuple[int, int]]:
        page = reader.find_messages(MessageQuery(**query), limit=1_000)
        return {(row.partition, row.offset) for row in page.rows}

    assert places(task_id="t-4") == {(1, 4), (1, 5)}
    assert places(task_id="none") == set()
    assert places(error="user 17 was") == {(17 % 3, 17)}
    assert (0, 0) not in places(label="tenant=rare", statuses=("failed",))


def read_all(reader: Reader, query: MessageQuery, limit: int) -> list[tuple[int, int, int | None]]:
    """Return the places and times of all messages, page by page."""
    found, cursor = [], None
    while True:
        page = reader.find_messages(query, cursor, limit)
        assert page.problems == []
        assert len(page.rows) <= limit
        found += [(row.partition, row.offset, row.resolved_at) for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            return found


def expect(places: set[tuple[int, int]]) -> list[tuple[int, int, int | None]]:
    rows = [(row["partition"], row["offset"], row["resolved_at"]) for row in ROWS]
    return sorted(row for row in rows if row[:2] in places)


@pytest.mark.parametrize(
    ("label", "limit"),
    [
        *((label, limit) for label in ("tenant=rare", "tenant=acme", "step=1") for limit in (7, 1_000)),
        ("tenant=rare", 1),
        pytest.param("tenant=acme", 1, marks=pytest.mark.long),  # a page for each of hundreds of rows
        pytest.param("step=1", 1, marks=pytest.mark.long),
    ],
)
def test_pages_of_a_label_have_each_message_once_and_no_more_rows_than_asked_for(
    reader: Reader, label: str, limit: int
):
    name, value = label.split("=")
    marked = [row for row in TASKS if (name, value) in row["labels"]]
    places = {(row["partition"], offset) for row in marked for offset in row["offsets"]}
    assert sorted(read_all(reader, MessageQuery(label=label), limit)) == expect(places)


@pytest.mark.parametrize("limit", [1, 7])
def test_pages_of_an_error_text_have_each_message_once(reader: Reader, limit: int):
    places = {(event.partition or 0, event.offset or 0) for event in EVENTS if "not found" in event.text}
    assert sorted(read_all(reader, MessageQuery(error="not FOUND"), limit)) == expect(places)


def test_a_label_and_an_error_text_are_both_asked_of_a_message(reader: Reader):
    found = read_all(reader, MessageQuery(label="tenant=rare", error="user 15 was"), 10)
    assert [row[:2] for row in found] == [(0, 15)]


def test_a_message_with_several_tasks_and_many_rows_is_found_once_for_each_row(tmp_path: Path):
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w", policy=SealPolicy(max_rows=SEGMENT)) as writer:
        rows = [message(1, resolved_at=START + number) for number in range(60)]
        rows += [message(number, resolved_at=START + number) for number in range(2, 20)]
        ran = [task(f"t-{number}", [1], ended_at=START + 1_000 - number) for number in range(30)]
        ran += [task("t-0", [1], attempt=2, ended_at=None)]
        ran += [task(f"u-{number}", [number, 1], ended_at=START + number) for number in range(2, 20)]
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(*rows))
        writer.put_rows("e", 0, 2, RowTable.TASKS, tasks(*ran))
        wait_until(lambda: writer.statistics.rows == len(rows) + len(ran), 30)
        for limit in (1, 4, 25, 500):
            found = read_all(Reader(tmp_path), MessageQuery(label="tenant=acme"), limit)
            assert sorted(found) == sorted((0, row["offset"], row["resolved_at"]) for row in rows), limit


def test_a_trace_of_many_tasks_asks_for_their_events_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked = []
    search = event_search.search_events

    def count(*arguments: Any) -> Any:
        asked.append(arguments[1])
        return search(*arguments)

    monkeypatch.setattr(event_search, "search_events", count)
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        ran = [task(f"t-{number}", [1]) for number in range(40)]
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(1)))
        writer.put_rows("e", 0, 2, RowTable.TASKS, tasks(*ran))
        events = [
            RecordedEvent(
                START + 1, EventKind.TASK_FAILED, TOPIC, 0, number % 2 or None, f"t-{number}", text=str(number)
            )
            for number in range(40)
        ]
        writer.put_events("e", 0, 3, events)
        wait_until(lambda: writer.statistics.events == 40 and writer.statistics.rows == 41, 30)
        traced = Reader(tmp_path).trace(TOPIC, 0, 1)
    (story,) = traced.stories
    assert sorted(event.event.text for event in story.events) == sorted(str(number) for number in range(40))
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("not found", 54),
        ("NOT FOUND", 54),
        ('"no" to 50%_', 6),
        ("50%_", 6),
        ("überweis", 54),
        ("no", 60),
        ("%", 6),
        ("zzz", 0),
        ('"', 6),
        ("a" * 5000, 0),
    ],
)
def test_events_are_found_by_any_part_of_their_text(reader: Reader, text: str, count: int):
    assert len(reader.find_events(EventQuery(text=text), limit=1_000).rows) == count


def test_pages_of_events_have_all_of_them_once_the_newest_first(reader: Reader):
    found, cursor = [], None
    while True:
        page = reader.find_events(EventQuery(), cursor, 7)
        found += [row.event for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    assert found == sorted(EVENTS, key=lambda event: (-event.at_us, -(event.offset or 0)))


def test_failures_are_grouped_by_their_class(reader: Reader):
    listed = reader.list_failures()
    assert [(group.error_class, group.count) for group in listed.groups] == [
        ("user # was not found", 30),
        ("said no", 6),
    ]
    assert listed.groups[0].kinds == {"sink_error": 24, "task_failed": 30}
    assert sum(count for _, count in listed.groups[0].minutes) == 54
    assert listed.groups[1].example is not None
    assert listed.groups[1].example.event.offset == 50
    assert (listed.groups[1].first_us, listed.groups[1].last_us) == (START, START + 16_000_000)
    assert reader.list_failures(limit=1).more == 1


def test_an_answer_has_a_limited_number_of_groups_of_failures(reader: Reader, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reader_module, "MAX_GROUPS", 1)
    listed = reader.list_failures(limit=5_000)
    assert ([group.error_class for group in listed.groups], listed.more) == (["user # was not found"], 1)


def test_a_message_that_was_reprocessed_has_a_story_for_each_time(reader: Reader):
    told = reader.trace(TOPIC, 1, 5)
    assert len(told.stories) == 3
    assert told.stories[0].message.resolved_at < told.stories[1].message.resolved_at
    assert told.problems == []
    assert told.kept_from_us == START


def test_a_message_that_is_not_kept_has_no_story_but_the_time_that_is_kept(reader: Reader):
    told = reader.trace(TOPIC, 1, 5_000)
    assert (told.stories, told.events, told.tasks) == ([], [], [])
    assert (told.kept_from_us, told.kept_to_us) == (START, START + 91_000_000)


def test_a_cursor_of_another_query_is_refused(reader: Reader):
    cursor = reader.find_messages(MessageQuery(partition=1), limit=2).cursor
    assert cursor is not None
    with pytest.raises(WrongCursorError, match="another query"):
        reader.find_messages(MessageQuery(partition=2), cursor)
    with pytest.raises(WrongCursorError, match="another query"):
        reader.find_tasks(TaskQuery(partition=1), cursor)
    with pytest.raises(WrongCursorError, match="damaged"):
        reader.find_events(EventQuery(), cursor[:-4])


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """A recording whose writer has ended."""
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w", policy=SealPolicy(max_rows=SEGMENT)) as writer:
        fill(writer)
    return tmp_path


def damage(recorded: Path, ending: str, how: str) -> Path:
    victim = sorted(recorded.rglob(f"messages-*.{ending}"))[1]
    data = bytearray(victim.read_bytes())
    if how == "changed":
        data[len(data) // 3] ^= 0xFF
    victim.write_bytes(b"" if how == "empty" else data[: len(data) // 2] if how == "cut" else data)
    return victim


@pytest.mark.parametrize("index", ["whole", "empty"])
def test_rows_that_are_gone_while_their_index_is_there_are_named(recorded: Path, index: str):
    victim = sorted(recorded.rglob("messages-*.parquet"))[1]
    victim.unlink()
    if index == "empty":
        victim.with_suffix(".idx").write_bytes(b"")
    reader = Reader(recorded)
    for query in (MessageQuery(), MessageQuery(key=b"nobody"), MessageQuery(topic=TOPIC, partition=0, offset=1)):
        (problem,) = reader.find_messages(query, limit=1_000).problems
        assert f"{victim.name} is missing; its " in problem
        assert (" rows from 20" in problem) == (index == "whole")
    assert victim.name in " ".join(reader.trace(TOPIC, 0, 1).problems)
    assert [victim.name in " ".join(info.problems) for info in reader.list_recordings()] == [True]
    assert reader.find_tasks(TaskQuery()).problems == []


@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_a_damaged_index_is_made_again_and_logged(recorded: Path, how: str):
    victim = damage(recorded, "idx", how)
    with capture_logs() as logs:
        page = Reader(recorded).find_messages(MessageQuery(), limit=1_000)
    assert (len(page.rows), page.problems) == (len(ROWS), [])
    assert str(victim) in [line.get("path") for line in logs]


@pytest.mark.parametrize("how", ["cut", "changed", "empty"])
def test_a_damaged_segment_is_skipped_and_said(recorded: Path, how: str):
    victim = damage(recorded, "parquet", how)
    page = Reader(recorded).find_messages(MessageQuery(), limit=1_000)
    assert len(page.rows) in range(len(ROWS) - 2 * SEGMENT, len(ROWS) - 10)
    assert len(page.problems) == 1
    assert victim.stem in page.problems[0]


@pytest.mark.parametrize("is_copy", [False, True])
def test_an_index_that_is_missing_is_made_again_and_said(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, is_copy: bool
):
    whole = Reader(recorded)
    asked = [MessageQuery(), MessageQuery(key=b"k4"), MessageQuery(label="tenant=rare"), MessageQuery(partition=2)]
    answers = [whole.find_messages(query, limit=1_000).rows for query in asked]
    listed = whole.list_recordings()[0]
    indexes = list(recorded.rglob("*.idx"))
    for path in indexes:
        path.unlink()
    if is_copy:
        folder = tmp_path_factory.mktemp("copy")
        assert copy_recordings([recorded], folder)[1] == []
        recorded = folder
    with capture_logs() as logs:
        reader = Reader(recorded)
        assert [reader.find_messages(query, limit=1_000).rows for query in asked] == answers
    assert len({line["path"] for line in logs if "index" in line["event"]}) == len(indexes)
    found = reader.list_recordings()[0]
    assert (found.messages, found.tasks, found.first_us) == (listed.messages, listed.tasks, listed.first_us)


def test_a_recording_without_its_database_is_read_listed_and_cleaned(recorded: Path):
    (database,) = recorded.rglob("*.db")
    database.unlink()
    reader = Reader(recorded)
    assert len(reader.find_messages(MessageQuery(), limit=1_000).rows) == len(ROWS)
    (info,) = reader.list_recordings()
    assert info.messages == len(ROWS)
    (problem,) = info.problems
    assert "the database is missing" in problem
    expired = find_expired(recorded, time.time(), before=time.time() + 100)
    assert len(remove_recordings(expired)) == 1
    assert list(recorded.iterdir()) == []


def test_a_damaged_open_segment_is_read_up_to_the_damage(tmp_path: Path):
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        fill(writer)
        (path,) = tmp_path.rglob("messages-*.open")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 0xFF
        path.write_bytes(data)
        page = Reader(tmp_path).find_messages(MessageQuery(), limit=1_000)
        assert 0 < len(page.rows) < len(ROWS)
        assert len(page.problems) == 1


def test_a_damaged_database_leaves_the_messages_readable(recorded: Path):
    (database,) = recorded.rglob("*.db")
    database.write_bytes(b"garbage" * 1_000)
    reader = Reader(recorded)
    assert len(reader.find_messages(MessageQuery(), limit=1_000).rows) == len(ROWS)
    assert reader.find_events(EventQuery()).problems
    assert reader.list_failures().problems


@pytest.mark.parametrize("pattern", ["messages-*.parquet", "messages-*.idx", "*.db"])
def test_a_link_in_the_place_of_a_file_is_not_followed(
    recorded: Path, tmp_path_factory: pytest.TempPathFactory, pattern: str
):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    for path in list(recorded.rglob(pattern)):
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    reader = Reader(recorded)
    assert reader.find_messages(MessageQuery(), limit=1_000).rows == []
    assert pattern != "*.db" or reader.find_events(EventQuery()).rows == []


def test_several_workers_show_in_one_list(tmp_path: Path):
    for worker, offset in (("a", 1), ("b", 2), ("a", 3)):
        with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", worker) as writer:
            writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(offset)))
    reader = Reader(tmp_path)
    page = reader.find_messages(MessageQuery(), limit=2)
    rest = reader.find_messages(MessageQuery(), page.cursor, limit=2)
    assert [(row.recording, row.offset) for row in (*page.rows, *rest.rows)] == [("g.a", 3), ("g.b", 2), ("g.a", 1)]
    listed = reader.list_recordings()
    assert [(info.recording, info.messages, info.live) for info in listed] == [
        ("g.a", 1, False),
        ("g.a", 1, False),
        ("g.b", 1, False),
    ]
    assert (listed[0].group, listed[0].worker) == ("g", "a")


def test_what_retention_removes_while_it_is_read_is_not_a_problem(recorded: Path):
    reader = Reader(recorded)
    reader.find_messages(MessageQuery(), limit=1)
    for path in recorded.rglob("messages-*"):
        path.unlink()
    page = reader.find_messages(MessageQuery(statuses=("failed",)))
    assert (page.rows, page.problems) == ([], [])


def test_counts_are_differences_and_add_up_in_steps(tmp_path: Path):
    progress = iter(
        EngineProgress(
            consumed=10 * number,
            flow={"orders/0": (10 * number, 5 * number, 0)},
            committed={"orders/0": 5 * number},
            sinks={"sinks.kafka.out": SinkStats(delivered_payloads=3 * number, sends=Durations([number, 0]))},
            attempts=Durations([number] * 3),
        )
        for number in range(1, 1_000)
    )
    seen: list[EngineProgress] = []

    def read() -> EngineProgress:
        seen.append(next(progress))
        return seen[-1]

    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w", read_progress=read) as writer:
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(7, resolved_at=1_000_000)))
        wait_until(lambda: len(seen) >= 3)
    for step in (1, 60, 3_600):
        series = Reader(tmp_path).read_counts(0, 2**52, step)
        assert sum(point.consumed for point in series.points) == seen[-1].consumed
        assert sum(point.sinks["sinks.kafka.out"].delivered for point in series.points) == 3 * len(seen)
        assert sum(point.attempt_counts[2] for point in series.points) == len(seen)
        assert series.points[-1].partitions["orders/0"].committed_to == 5 * len(seen)
    (database,) = tmp_path.rglob("*.db")
    with sqlite3.connect(database) as db:
        states = db.execute("select body from worker_state order by at_us").fetchall()
    assert [json.loads(body)["consumed"] for (body,) in states] == [10, seen[-1].consumed], "the first and the last"


def test_the_time_of_a_commit_is_found_in_the_counts(tmp_path: Path):
    now = [EngineProgress(committed={"orders/0": 7}, flow={"orders/0": (9, 7, 0)})]
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w", read_progress=lambda: now[0]) as writer:
        reader = Reader(tmp_path)
        wait_until(lambda: reader.read_counts(0, 2**52).points)
        at = reader.read_counts(0, 2**52).points[0].at * 1_000_000
        writer.put_rows("e", 0, 1, RowTable.MESSAGES, messages(message(6, resolved_at=at), message(7, resolved_at=at)))
        wait_until(lambda: writer.statistics.rows == 2)
        assert reader.trace(TOPIC, 0, 6).stories[0].committed_us == at
        assert reader.trace(TOPIC, 0, 7).stories[0].committed_us is None
        now[0] = EngineProgress(committed={"orders/0": 8}, flow={"orders/0": (9, 8, 0)})
        committed = wait_until(lambda: reader.trace(TOPIC, 0, 7).stories[0].committed_us)
        assert committed is not None
        assert committed >= at


def test_every_confirmed_row_is_found_exactly_once_at_any_moment_while_segments_are_sealed(tmp_path: Path):
    confirmed: list[int] = []
    settings = DebugSettings(db_dir=str(tmp_path), rotation_interval_minutes=0.005)
    reader, looks = Reader(tmp_path), 0
    with RecordWriter(
        settings, "g", "w", stored=lambda _, seq: confirmed.append(seq), policy=SealPolicy(max_rows=15)
    ) as writer:
        for seq in range(150):
            writer.put_rows("e1", 0, seq + 1, RowTable.MESSAGES, messages(message(seq)))
            if seq % 4 == 0:
                least = len(confirmed)
                page = reader.find_messages(MessageQuery(), limit=1_000)
                found = [row.offset for row in page.rows]
                assert page.problems == []
                assert len(found) == len(set(found)), "a row was found twice"
                assert set(range(least)) <= set(found), "a confirmed row was not found"
                looks += 1
        wait_until(lambda: len(confirmed) == 150)
        wait_until(lambda: len(reader.list_recordings()) > 1)  # a fast machine writes all of it in one period
        rows = reader.find_messages(MessageQuery(), limit=1_000).rows
        assert [row.offset for row in rows] == list(range(149, -1, -1))
    assert looks == 38


def test_events_of_the_same_moment_in_several_periods_are_on_one_page_each(tmp_path: Path):
    for period in range(4):
        with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
            events = [RecordedEvent(START, EventKind.PAUSED, text=f"{period} {number}") for number in range(5)]
            writer.put_events("e", 0, 1, events)
    reader, found, cursor = Reader(tmp_path), [], None
    while True:
        page = reader.find_events(EventQuery(), cursor, limit=3)
        found += [row.event.text for row in page.rows]
        cursor = page.cursor
        if cursor is None:
            break
    assert sorted(found) == [f"{period} {number}" for period in range(4) for number in range(5)]


def test_a_database_that_was_just_begun_is_no_problem(recorded: Path):
    (tmp := recorded / "g.w" / "w-20270101T000000Z").mkdir(mode=0o700)
    tmp.with_name(f"{tmp.name}.db").touch(mode=0o600)
    reader = Reader(recorded)
    assert reader.find_events(EventQuery()).problems == []
    assert len(reader.find_messages(MessageQuery(), limit=1_000).rows) == len(ROWS)


def test_a_file_that_is_cut_while_it_is_read_is_skipped_and_does_not_end_the_process(recorded: Path):
    """Files are not mapped: on NFS another host may remove or cut them at any moment."""
    reader = Reader(recorded)
    assert reader.find_messages(MessageQuery(), limit=1_000).rows
    for path in recorded.rglob("messages-*"):
        os.truncate(path, 10)
    page = reader.find_messages(MessageQuery(), limit=1_000)
    assert page.rows == []
    assert page.problems
    assert f"{recorded}/g.w/w-" not in Path("/proc/self/maps").read_text()


def test_a_letter_belongs_to_the_time_at_which_its_message_was_processed(tmp_path: Path) -> None:
    minute = 60_000_000

    def letter(offset: int, at: int, partition: int = 0, topic: str = TOPIC) -> RecordedEvent:
        return RecordedEvent(at, EventKind.DEAD_LETTERED, topic, partition, offset, text="refused")

    rows = [message(offset, consumed_at=START, resolved_at=START + 1_000) for offset in range(6)]
    rows += [message(0, consumed_at=START + minute, resolved_at=START + minute + 1_000)]
    rows += [message(6, consumed_at=START, resolved_at=START + 1_000, status="failed")]
    events = [letter(0, START + minute + 500), letter(1, START), letter(2, START + 1_000), letter(3, START + 1_001)]
    events += [letter(4, START + 5, 1), letter(4, START + 5, 0, "other"), letter(6, START + 5)]
    events += [RecordedEvent(START + 5, EventKind.TASK_FAILED, TOPIC, 0, 5, text="refused")]
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*rows))
        writer.put_events("e1", 0, 2, events)
        wait_until(lambda: writer.statistics.rows == len(rows))
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "other") as writer:
        writer.put_events("e2", 0, 1, [letter(5, START + 5)])
    reader = Reader(tmp_path)
    page = reader.find_messages(MessageQuery(topic=TOPIC, recording="g.w"))
    found = reader.find_dead_lettered(page.rows)
    dead = {(row.offset, row.consumed_at) for row, has in zip(page.rows, found, strict=True) if has}
    assert dead == {(0, START + minute), (1, START), (2, START)}, "a failed one is failed"
    assert reader.find_dead_lettered([]) == []
    assert reader.find_dead_lettered(page.rows * 600)[: len(found)] == found


def test_the_story_of_each_message_of_a_letter_has_it_once(tmp_path: Path) -> None:
    rows = [message(offset, consumed_at=START, resolved_at=START + 1_000) for offset in (1, 2, 3)]
    about: dict[str, str | int | float] = {"letter_id": "l", "messages": 3}
    events = [
        RecordedEvent(START + 500, EventKind.DEAD_LETTERED, TOPIC, 0, offset, "all", text="no", data=about)
        for offset in (1, 2, 3)
    ]
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*rows))
        ran = task("all", [1, 2, 3], queued_at=START + 1, started_at=START + 2, ended_at=START + 3)
        writer.put_rows("e1", 0, 2, RowTable.TASKS, tasks(ran))
        writer.put_events("e1", 0, 3, events)
        wait_until(lambda: writer.statistics.rows == 4)
    for offset in (1, 2, 3):
        (story,) = Reader(tmp_path).trace(TOPIC, 0, offset).stories
        assert [row.event.offset for row in story.events] == [offset]
        assert story.is_dead_lettered


def test_the_story_of_a_message_has_no_events_of_others_whose_tasks_have_the_same_id(tmp_path: Path) -> None:
    rows = [message(offset, consumed_at=START, resolved_at=START + 1_000) for offset in (1, 2, 3, 4)]
    events = [
        RecordedEvent(START + 500, EventKind.TASK_FAILED, TOPIC, 0, offset, "run", text=f"of {offset}")
        for offset in (1, 2, 3)
    ]
    with RecordWriter(DebugSettings(db_dir=str(tmp_path)), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*rows))
        times = {"queued_at": START + 1, "started_at": START + 2, "ended_at": START + 600}
        ran = [task("run", offsets, **times) for offsets in ([1], [2], [3, 4])]
        writer.put_rows("e1", 0, 2, RowTable.TASKS, tasks(*ran))
        writer.put_events("e1", 0, 3, events)
        wait_until(lambda: writer.statistics.rows == 7)
    for offset, texts in ((1, ["of 1"]), (2, ["of 2"]), (3, ["of 3"]), (4, ["of 3"])):
        traced = Reader(tmp_path).trace(TOPIC, 0, offset)
        (story,) = traced.stories
        assert [row.event.text for row in (*story.events, *traced.events)] == texts
