"""Engines that end by themselves: what they report is done, the rest is left for the next run."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from tests.jsonl import read_lines
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.errors import HandlerError
from tidemill.core.ranges import OffsetRange, find_remaining
from tidemill.core.recorder.outgoing import EVENTS
from tidemill.pipeline.bounded import BoundedEngine, make_bounded_settings
from tidemill.pipeline.build import build_history
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.pipeline.reports import outcomes as outcomes_module
from tidemill.pipeline.reports.outcomes import Outcomes, find_finished_ranges, name_range
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable, decode_rows
from tidemill.runtime.identity import EngineIdentity, new_engine_id
from tidemill.runtime.link.progress import EngineSummary, StopReason
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.sources.bounded import BUFFER_MESSAGES, BoundedSource
from tidemill.sources.rows import RowReader
from tidemill.testing.kafka import consume, unique_name

Row = tuple[bytes, bytes | None, str, int, int]
NAMES = ("key", "value", "topic", "partition", "offset")


class Copy(Handler[Any, Any]):
    """Each message into a file; the window says how many it had."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(
                f"{m.partition}-{m.offset}",
                source_offsets=(m.offset,),
                precomputed=PrecomputedResult(),
                metadata={"at": [m.partition, m.offset]},
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out", data=result.task.metadata)])


class Windows(Copy):
    async def on_window_complete(self, results, messages):
        await asyncio.sleep(0.01)
        return CollectResult(files=[FilePayload(path="windows", data={"count": len(messages)})])


class Stuck(Copy):
    """Stops at one message until it is drained."""

    at = (0, 150)

    async def arrange(self, messages, pending):
        if any((m.partition, m.offset) == self.at for m in messages):
            await asyncio.Event().wait()
        return await super().arrange(messages, pending)


class Refusing(Copy):
    async def arrange(self, messages, pending):
        if any(m.offset % 10 == 3 for m in messages):
            raise ValueError("not this one")
        return await super().arrange(messages, pending)


class Place:
    """A folder, and engines that run to their end in this process."""

    def __init__(self, broker: Any, folder: Path) -> None:
        self.broker = broker
        self.folder = folder
        self.outcomes = folder / "outcomes"
        self.topic = unique_name("bounded")
        self.reports: list[Outcomes] = []

    def settings(self, **more: Any) -> Settings:
        config: dict[str, Any] = {
            "kafka": {"brokers": self.broker.bootstrap, "source_topic": self.topic},
            "sinks": {"filesystem": {"out": {"base_path": str(self.folder / "out")}}},
            "executor": {"window_size": 50, "drain_timeout_seconds": 1, "max_executors": 50},
            **more,
        }
        return make_bounded_settings(Settings.model_validate(config))

    def engine(self, handler: Handler[Any, Any], reader: Any, settings: Settings, **outcomes: Any) -> BoundedEngine:
        identity = EngineIdentity("w", 0, new_engine_id(), "g", 1)
        source = BoundedSource(reader, settings.executor.max_queued_bytes)
        report = Outcomes(self.outcomes, identity, build_history(settings, identity), **outcomes)
        self.reports.append(report)
        return BoundedEngine(settings, handler, identity, source, report)

    def rows(self, *ranges: OffsetRange) -> list[Row]:
        return [(b"k", b"{}", self.topic, part.partition, n) for part in ranges for n in range(part.start, part.end)]

    def over_ranges(self, handler: Handler[Any, Any], *ranges: OffsetRange, **more: Any) -> BoundedEngine:
        return self.engine(
            handler,
            RowReader(iter(self.rows(*ranges)), NAMES, 0),
            self.settings(**more),
            ranges={(self.topic, part.partition): part for part in ranges},
        )

    def lines(self, name: str = "out") -> list[dict[str, Any]]:
        path = self.folder / "out" / name
        return read_lines(path)

    def names(self) -> list[str]:
        return sorted(path.name for path in self.outcomes.iterdir()) if self.outcomes.exists() else []

    def told(self) -> list[dict[str, Any]]:
        return [row for path in sorted(self.outcomes.glob("part-*")) for row in pq.read_table(path).to_pylist()]


async def at_once() -> None:
    pass


async def finish(engine: BoundedEngine, seconds: float = 30.0) -> EngineSummary:
    return await asyncio.wait_for(engine.run(at_once), seconds)


@pytest.fixture
def place(embedded_kafka: Any, tmp_path: Path) -> Place:
    return Place(embedded_kafka, tmp_path)


def first_lines(place: Place) -> Counter[tuple[int, int]]:
    return Counter((line["at"][0], line["at"][1]) for line in place.lines())


async def test_an_engine_ends_by_itself_and_writes_a_file_for_each_range(place: Place) -> None:
    ranges = (OffsetRange(0, 100, 400), OffsetRange(1, 0, 7))
    engine = place.over_ranges(Copy(), *ranges)
    summary = await finish(engine)
    assert (summary.reason, engine.complete) == (StopReason.DRAINED, True)
    assert place.names() == [name_range(part) for part in ranges]
    wanted = {(0, n) for n in range(100, 400)} | {(1, n) for n in range(7)}
    assert Counter((row["partition"], row["offset"]) for row in place.told()) == Counter(wanted)
    assert first_lines(place) == Counter(wanted)


async def test_a_range_without_messages_is_reported_too(place: Place) -> None:
    engine = place.engine(
        Copy(), RowReader(iter(()), NAMES, 0), place.settings(), ranges={(place.topic, 4): OffsetRange(4, 0, 9)}
    )
    await finish(engine)
    assert place.names() == [name_range(OffsetRange(4, 0, 9))]
    assert place.told() == []


async def test_what_windows_deliver_is_delivered_before_the_end(place: Place) -> None:
    engine = place.over_ranges(Windows(), OffsetRange(0, 0, 120))
    await finish(engine)
    assert engine.complete
    assert sum(line["count"] for line in place.lines("windows")) == 120


async def test_an_engine_that_is_drained_reports_what_it_did_and_the_rest_is_left(place: Place) -> None:
    ranges = [OffsetRange(0, 0, 300), OffsetRange(1, 0, 40)]
    engine = place.over_ranges(Stuck(), *ranges)
    running = asyncio.ensure_future(engine.run(at_once))
    await until(lambda: engine.progress().committed == {f"{place.topic}/0": 150, f"{place.topic}/1": 40})
    engine.drain()
    await asyncio.wait_for(running, 30)
    assert not engine.complete
    left = find_remaining(ranges, find_finished_ranges(place.names()))
    assert left == [OffsetRange(0, 150, 300)]
    assert Counter((row["partition"], row["offset"]) for row in place.told()) == Counter(
        {(0, n) for n in range(150)} | {(1, n) for n in range(40)}
    )
    await finish(place.over_ranges(Copy(), *left))
    assert find_remaining(ranges, find_finished_ranges(place.names())) == []
    assert set(first_lines(place)) == {(0, n) for n in range(300)} | {(1, n) for n in range(40)}


async def test_an_engine_that_nobody_supervises_reports_no_part(place: Place) -> None:
    engine = place.over_ranges(Stuck(), OffsetRange(0, 0, 300))
    running = asyncio.ensure_future(engine.run(at_once))
    await until(lambda: engine.progress().committed == {f"{place.topic}/0": 150})
    engine.abandon()
    engine.drain()
    await asyncio.wait_for(running, 30)
    assert place.names() == []


async def test_memory_does_not_grow_with_the_range(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes_module, "ROWS", 500)
    most = 0

    class Watching(Copy):
        async def arrange(self, messages, pending):
            nonlocal most
            report = place.reports[0]
            most = max([most, *(len(part.rows) for part in report._parts.values())])
            return await super().arrange(messages, pending)

    engine = place.over_ranges(Watching(), OffsetRange(0, 0, 12_000), executor={"max_uncommitted": 1000})
    await finish(engine)
    assert 0 < most < BUFFER_MESSAGES
    (path,) = place.outcomes.iterdir()
    assert pq.ParquetFile(path).num_row_groups > 2
    assert [row["offset"] for row in place.told()] != []
    assert sorted(row["offset"] for row in place.told()) == list(range(12_000))


async def test_a_disk_that_refuses_ends_the_engine(place: Place) -> None:
    place.outcomes.write_text("no folder")
    engine = place.over_ranges(Copy(), OffsetRange(0, 0, 100))
    summary = await finish(engine)
    assert summary.reason is StopReason.FAILED
    assert "outcomes cannot be written" in (summary.error or "")
    assert not engine.complete


async def test_dead_letters_and_history_are_those_of_a_live_engine(place: Place) -> None:
    history = place.folder / "history"
    engine = place.over_ranges(Refusing(), OffsetRange(0, 0, 60), history={"path": str(history)})
    await finish(engine)
    told = {row["offset"]: row for row in place.told()}
    assert sorted(told) == list(range(60))
    rejected = sorted(offset for offset, row in told.items() if row["status"] == "rejected")
    assert rejected == [3, 13, 23, 33, 43, 53]
    assert told[3]["error"].startswith("ValueError: not this one (tests/pipeline/")
    letters = consume(place.broker.bootstrap, f"{place.topic}_dlq", 6)
    assert len(letters) == 6
    assert sorted(row["offset"] for path in history.glob("part-*") for row in pq.read_table(path).to_pylist()) == list(
        range(60)
    )


async def test_rows_that_are_one_message_are_refused(place: Place) -> None:
    rows = [*place.rows(OffsetRange(0, 0, 5)), *place.rows(OffsetRange(0, 4, 6))]
    engine = place.engine(Copy(), RowReader(iter(rows), NAMES, 0), place.settings(), name="part-0.parquet")
    summary = await finish(engine)
    assert summary.reason is StopReason.FAILED
    assert "two rows have topic" in (summary.error or "")
    assert place.names() == []


async def test_rows_without_a_place_get_one() -> None:
    reader = RowReader(iter([(None, b"a"), (b"k", None)]), ("key", "value"), 7)
    messages = reader.read()
    assert [(m.topic, m.partition, m.offset, m.key, m.value) for m in messages or ()] == [
        ("dataframe", 7, 0, None, b"a"),
        ("dataframe", 7, 1, b"k", None),
    ]
    assert reader.read() is None


async def test_a_reader_that_fails_fails_its_engine(place: Place) -> None:
    def broken():
        yield from place.rows(OffsetRange(0, 0, 5))
        raise HandlerError("the rows ended in the middle")

    summary = await finish(place.engine(Copy(), RowReader(broken(), NAMES, 0), place.settings(), name="part-0.parquet"))
    assert summary.reason is StopReason.FAILED
    assert "the rows ended in the middle" in (summary.error or "")


async def test_a_part_is_complete_only_if_its_outcomes_are_there_however_slow_the_disk(place, monkeypatch):
    """The folder is slower than the stop's deadline, the drain timeout and some seconds."""
    write = outcomes_module.OutcomeFile.write
    monkeypatch.setattr(outcomes_module, "ROWS", 100)
    monkeypatch.setattr(outcomes_module.OutcomeFile, "write", lambda self, rows: (time.sleep(5), write(self, rows)))
    reader = RowReader(iter(place.rows(OffsetRange(0, 0, 150))), NAMES, 0)
    engine = place.engine(Copy(), reader, place.settings(), name="part-00000.parquet")
    summary = await engine.run(at_once)
    await asyncio.get_running_loop().shutdown_default_executor()  # as the end of a process does
    assert not engine.complete
    assert (summary.reason, summary.error) == (
        StopReason.FAILED,
        "RemoteError: the outcomes were not written in time; is their disk slow or unavailable?",
    )


async def test_a_part_whose_outcomes_fail_late_is_not_complete(place, monkeypatch):
    """They are refused (a full disk, a share that is gone) only after the stop's deadline."""

    def refuse(self, rows):
        time.sleep(5)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(outcomes_module.OutcomeFile, "write", refuse)
    reader = RowReader(iter(place.rows(OffsetRange(0, 0, 150))), NAMES, 0)
    engine = place.engine(Copy(), reader, place.settings(), name="part-00000.parquet")
    summary = await engine.run(at_once)
    await asyncio.get_running_loop().shutdown_default_executor()
    assert not engine.complete
    assert summary.reason is StopReason.FAILED


class Failing(Copy):
    """Every tenth message fails in a process; every 25th has a result that its sink refuses."""

    async def arrange(self, messages, pending):
        tasks = await super().arrange(messages, pending)
        for n, m in enumerate(messages):
            if m.offset % 10 == 0:
                tasks[n] = ExecutorTask(
                    f"bad-{m.offset}", ("-c", "exit 3"), source_offsets=(m.offset,), binary_path="/bin/sh"
                )
            else:
                tasks[n] = msgspec.structs.replace(tasks[n], labels={"n": str(m.offset)})
        return tasks

    async def on_task_complete(self, result):
        offset = result.task.source_offsets[0]
        path = "out" if offset % 25 else "../escaped"
        return CollectResult(files=[FilePayload(path=path, data={"n": offset})])


def read_frames(engine: BoundedEngine) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[RecordedEvent]]:
    """Return the rows of messages and tasks, and the events, that the engine would send to its driver."""
    messages: list[dict[str, Any]] = []
    tasks: list[dict[str, Any]] = []
    events: list[RecordedEvent] = []
    frames = engine.records
    assert frames is not None
    while (frame := frames.take_next()) is not None:
        if frame.table == EVENTS:
            events += msgspec.msgpack.decode(frame.body, type=list[RecordedEvent])
        else:
            table = RowTable(frame.table)
            (messages if table is RowTable.MESSAGES else tasks).extend(decode_rows(table, frame.body).to_pylist())
        frames.note_stored(frame.seq)
    return messages, tasks, events


async def test_only_what_failed_is_recorded_with_what_left_a_dead_letter_although_its_tasks_ended_well(
    place: Place,
) -> None:
    engine = place.over_ranges(Failing(), OffsetRange(0, 0, 100), debug={"enabled": True})
    summary = await finish(engine)
    assert (summary.reason, engine.complete) == (StopReason.DRAINED, True)
    messages, tasks, events = read_frames(engine)
    failed = [n for n in range(100) if n % 10 == 0]
    refused = [25, 75]
    assert {row["offset"]: row["status"] for row in messages} == dict.fromkeys(failed, "failed") | dict.fromkeys(
        refused, "done"
    )
    assert {row["committed_at"] for row in messages} == {None}
    assert Counter(row["task_id"] for row in tasks) == {f"bad-{n}": 4 for n in failed}, "each try of what failed"
    assert {row["exit_code"] for row in tasks} == {3}
    kinds = Counter(event.kind for event in events)
    assert kinds[EventKind.DEAD_LETTERED] == len(failed) + len(refused)
    assert kinds[EventKind.TASK_FAILED] == len(failed)
    assert EventKind.ASSIGNED not in kinds


async def test_nothing_is_recorded_where_the_recorder_is_off(place: Place) -> None:
    engine = place.over_ranges(Copy(), OffsetRange(0, 0, 5), debug={"enabled": False})
    await finish(engine)
    assert engine.records is None
