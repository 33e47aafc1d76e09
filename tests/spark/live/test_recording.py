"""A pipeline's recording in its driver: what the link brings, what comes of engines, and nothing where it is off."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames
from tidemill.core.supervision.pauses import Pause
from tidemill.recorder.format import events_database
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.writer import RecorderStatistics
from tidemill.runtime.link.beats import Beat, whole_beat
from tidemill.runtime.link.engine import EngineLink
from tidemill.runtime.link.frames import HelloFrame, LinkAddress, WelcomeFrame
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.spark.live import run_recorder
from tidemill.spark.live.recording import record_run
from tidemill.spark.live.run_recorder import RunRecorder
from tidemill.spark.live.status_report import build_report
from tidemill.spark.progress import EngineStatus, PipelineProgress
from tidemill.spark.run_state import RunState

SECRET = "password=hunter2"


class Writer:
    """Keeps what it is given, and confirms it."""

    def __init__(self, recorder: RunRecorder) -> None:
        self.recorder = recorder
        self.rows: list[tuple[Any, ...]] = []
        self.events: list[RecordedEvent] = []
        self.statistics = RecorderStatistics()
        self.lost: list[tuple[int, int, int]] = []

    def put_rows(self, engine_id: str, slot: int, seq: int, table: RowTable, body: bytes, count: int) -> None:
        self.rows.append((engine_id, slot, seq, table, body, count))
        self.recorder.confirm(engine_id, seq)

    def put_events(self, engine_id: str, slot: int, seq: int, events: list[RecordedEvent]) -> None:
        self.events += events
        self.recorder.confirm(engine_id, seq)

    def add_event(self, event: RecordedEvent, slot: int = 0) -> None:
        self.events.append(event)

    def lose(self, slot: int, why: str, *, rows: int = 0, events: int = 0) -> None:
        self.lost.append((slot, rows, events))


class Driver:
    """Welcomes every engine, and records it."""

    def __init__(self) -> None:
        self.recorder = RunRecorder()
        self.writer = Writer(self.recorder)
        self.recorder.writer = self.writer  # type: ignore[assignment]
        self.server = self.recorder.open_link(self, bind_host="127.0.0.1")
        self.address = self.server.start()
        self.links: list[int] = []

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        self.links.append(link)
        self.server.send(link, WelcomeFrame(7))

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        pass

    def on_ready(self, link: int) -> None:
        pass

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        pass

    def on_closed(self, link: int) -> None:
        pass

    def kinds(self) -> list[EventKind]:
        return [event.kind for event in self.writer.events]


@pytest.fixture
def driver() -> Any:
    driver = Driver()
    yield driver
    driver.server.close()


def connect(address: LinkAddress, progress: EngineProgress | None = None) -> EngineLink:
    def beat(whole: bool) -> Beat:
        return whole_beat(progress or EngineProgress())

    return EngineLink(address, HelloFrame(3, 5, 0, "engine", 42, "here"), beat, lambda _: None, lambda _: None)


async def test_rows_and_events_are_given_to_the_writer_and_confirmed(driver: Driver) -> None:
    link, frames = connect(driver.address), OutgoingFrames(1000, 1000, 1000)
    await link.connect()
    event = RecordedEvent(1, EventKind.TASK_FAILED, text="why")
    frames.add("messages", b"rows", 6)
    frames.add(EVENTS, msgspec.msgpack.encode([event]), 1)
    link.carry(frames)
    await until(lambda: frames.is_empty)
    assert driver.writer.rows == [("engine", 3, 1, RowTable.MESSAGES, b"rows", 6)]
    assert event in driver.writer.events
    await link.close(EngineSummary(3, StopReason.DRAINED))


async def test_what_cannot_be_read_is_confirmed_so_that_it_does_not_come_for_ever(driver: Driver) -> None:
    link, frames = connect(driver.address), OutgoingFrames(1000, 1000, 1000)
    await link.connect()
    frames.add("novels", b"rows", 8)
    frames.add(EVENTS, b"\xc1", 2)
    frames.add(EVENTS, msgspec.msgpack.encode([{"kind": "x"}]), 1)
    link.carry(frames)
    await until(lambda: frames.is_empty)
    assert driver.writer.rows == []
    assert driver.writer.lost == [(3, 8, 0), (3, 0, 2), (3, 0, 1)]
    await link.close(EngineSummary(3, StopReason.DRAINED))


def test_what_the_driver_loses_counts_as_dropped_by_the_engine_that_it_came_from(driver: Driver) -> None:
    """So `recorder_dropped_total`, the status and the web UI show one number, whoever lost the rows."""

    def progress() -> PipelineProgress:
        engines = [
            EngineStatus(3, "running", progress=EngineProgress(recorder_dropped=1)),
            EngineStatus(4, "running", past=EngineProgress(recorder_dropped=2)),
        ]
        return PipelineProgress(recorder_dropped=3, engines=engines)

    assert driver.recorder.count_losses(progress()) == progress()
    driver.writer.statistics.lost_by_slot = {4: 10, 5: 100}
    total = driver.recorder.count_losses(progress())
    assert total.recorder_dropped == 113
    assert [engine.past and engine.past.recorder_dropped for engine in total.engines] == [None, 12]
    assert build_report(
        Settings.model_validate({"kafka": {"source_topic": "t", "consumer_group": "g"}}), "w", RunState(), total, 0.0
    )["recorder"] == {"dropped": 113}


async def test_the_start_of_an_engine_and_its_end_are_told_with_secrets_masked(driver: Driver) -> None:
    link = connect(driver.address)
    await link.connect()
    await until(lambda: driver.writer.events)
    (started,) = driver.writer.events
    assert (started.kind, started.data) == (
        EventKind.ENGINE_STARTED,
        {"slot": 3, "pid": 42, "host": "here", "engine_id": "engine"},
    )
    await link.close(EngineSummary(3, StopReason.FAILED, f"it broke: {SECRET}"))
    await until(lambda: len(driver.writer.events) == 2)
    assert driver.kinds() == [EventKind.ENGINE_STARTED, EventKind.ENGINE_ENDED]
    ended = driver.writer.events[1]
    assert (ended.text, ended.error_class) == ("failed: it broke: password=***", "failed: it broke: password=***")


async def test_an_engine_that_was_drained_has_not_failed(driver: Driver) -> None:
    link = connect(driver.address)
    await link.connect()
    await until(lambda: driver.writer.events)
    await link.close(EngineSummary(3, StopReason.DRAINED))
    await until(lambda: len(driver.writer.events) == 2)
    assert (driver.writer.events[1].text, driver.writer.events[1].error_class) == ("drained", "")


async def test_an_engine_that_comes_back_in_time_is_not_lost_and_one_that_does_not_is(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = connect(driver.address)
    await link.connect()
    await until(lambda: driver.writer.events)
    driver.server.loop.call_soon_threadsafe(driver.server.close_link, driver.links[0])
    await until(lambda: len(driver.links) == 2)
    watched = driver.server._events
    await until(lambda: not watched._missed and watched._engines)  # type: ignore[attr-defined]
    monkeypatch.setattr(run_recorder, "LOST_SECONDS", 0.05)
    assert link._writer is not None
    await link._engine_tasks.stop(*link._tasks)
    link._writer.transport.abort()
    await until(lambda: driver.kinds() == [EventKind.ENGINE_STARTED, EventKind.ENGINE_LOST])


async def test_what_a_killed_engine_had_finished_and_not_sent_counts_as_dropped(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "LOST_SECONDS", 0.05)
    link, frames = (
        connect(driver.address, EngineProgress(messages_done=100, recorder_rows=130, recorder_dropped=3)),
        OutgoingFrames(9, 9, 9),
    )
    await link.connect()
    frames.add("messages", b"rows", 60)
    frames.add("tasks", b"rows", 30)
    link.carry(frames)
    await until(lambda: frames.is_empty and driver.server._events._last)  # type: ignore[attr-defined]
    assert link._writer is not None
    await link._engine_tasks.stop(*link._tasks)
    link._writer.transport.abort()
    await until(lambda: EventKind.ENGINE_LOST in driver.kinds())
    assert driver.writer.lost == [(3, 40, 0)]


async def test_a_stop_soon_after_an_engine_was_killed_counts_what_it_had_not_sent(driver: Driver) -> None:
    link = connect(driver.address, EngineProgress(recorder_rows=130))
    await link.connect()
    await until(lambda: driver.server._events._last)  # type: ignore[attr-defined]
    assert link._writer is not None
    await link._engine_tasks.stop(*link._tasks)
    link._writer.transport.abort()
    await until(lambda: driver.server._events._missed)  # type: ignore[attr-defined]
    await asyncio.to_thread(driver.server.close)
    driver.recorder.note_link_closed()
    driver.recorder.note_link_closed()
    assert driver.kinds() == [EventKind.ENGINE_STARTED, EventKind.ENGINE_LOST]
    assert driver.writer.lost == [(3, 130, 0)]


async def test_an_engine_that_ends_in_order_as_it_comes_back_is_not_lost(driver: Driver) -> None:
    watched, hello = driver.server._events, HelloFrame(3, 5, 0, "engine", 42, "here")
    driver.recorder.put_rows("engine", 3, 1, "messages", b"rows", 60)
    assert isinstance(watched, run_recorder.WatchedLink)
    watched.on_hello(1, hello)
    watched.on_beat(1, EngineProgress(recorder_rows=100))
    watched.on_closed(1)
    watched.on_hello(2, hello)
    watched.on_ended(2, EngineSummary(3, StopReason.DRAINED))
    watched.on_closed(2)
    driver.recorder.note_link_closed()
    assert driver.kinds() == [EventKind.ENGINE_STARTED, EventKind.ENGINE_ENDED]
    assert driver.writer.lost == []


async def test_rows_of_an_engine_that_was_lost_and_comes_back_are_not_lost_again(driver: Driver) -> None:
    hello = HelloFrame(3, 5, 0, "engine", 42, "here")
    driver.recorder.put_rows("engine", 3, 1, "messages", b"rows", 1_000)
    driver.recorder.lose_engine(hello, EngineProgress(recorder_rows=1_010))
    driver.recorder.put_rows("engine", 3, 2, "messages", b"rows", 10)
    driver.recorder.lose_engine(hello, EngineProgress(recorder_rows=1_015))
    assert driver.writer.lost == [(3, 10, 0)]


async def test_an_engine_that_was_not_seen_to_leave_is_lost_when_the_link_closes(driver: Driver) -> None:
    watched = driver.server._events
    assert isinstance(watched, run_recorder.WatchedLink)
    watched.on_hello(1, HelloFrame(3, 5, 0, "engine", 42, "here"))
    watched.on_beat(1, EngineProgress(recorder_rows=7))
    driver.recorder.note_link_closed()
    assert driver.kinds() == [EventKind.ENGINE_STARTED, EventKind.ENGINE_LOST]
    assert driver.writer.lost == [(3, 7, 0)]


def test_a_frame_that_comes_again_is_counted_once(driver: Driver) -> None:
    for seq in (1, 2, 1, 2, 3):
        driver.recorder.put_rows("e-1", 0, seq, "tasks", b"rows", 10)
    hello = HelloFrame(0, 1, 0, "e-1", 42, "here")
    driver.recorder.lose_engine(hello, EngineProgress(recorder_rows=35))
    assert driver.writer.lost == [(0, 5, 0)]


async def test_an_engine_that_is_refused_is_neither_started_nor_lost(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_recorder, "LOST_SECONDS", 0.0)
    watched = driver.server._events
    driver.server.loop.call_soon_threadsafe(watched.on_hello, 99, HelloFrame(3, 5, 0, "other", 1, "here"))
    driver.server.loop.call_soon_threadsafe(watched.on_closed, 99)
    await until(lambda: 99 in driver.links and not watched._new)  # type: ignore[attr-defined]
    assert driver.writer.events == []


async def test_actions_and_pauses_of_users_are_recorded_with_who_did_them(driver: Driver) -> None:
    until_then = asyncio.get_running_loop().time() + 900.0
    driver.recorder.note_action("restart engine 1", "ann")
    driver.recorder.note_pause("orders", Pause(3, until_then, "ann"), True)
    driver.recorder.note_pause("orders", Pause(None, until_then, "rob"), False)
    action, begun, ended = driver.writer.events
    assert (action.kind, action.text, action.data) == (EventKind.ACTION, "restart engine 1", {"by": "ann"})
    assert (begun.kind, begun.topic, begun.partition, begun.data["by"]) == (EventKind.PAUSED, "orders", 3, "ann")
    assert 899 < float(begun.data["seconds"]) <= 900
    assert (ended.kind, ended.topic, ended.partition, ended.data) == (EventKind.RESUMED, None, None, {"by": "rob"})
    assert ended.text == "all partitions on request"


def test_a_recording_has_the_masked_configuration_and_nothing_is_recorded_where_it_is_off(tmp_path: Path) -> None:
    on = Settings.model_validate({"debug": {"enabled": True, "db_dir": str(tmp_path / "on")}})
    with record_run(on, "w", EngineProgress) as recorder:
        assert recorder is not None
        recorder.writer.add_event(RecordedEvent(1, EventKind.ACTION))
    assert list((tmp_path / "on").rglob("*.db"))
    off = Settings.model_validate({"debug": {"enabled": False, "db_dir": str(tmp_path / "off")}})
    with record_run(off, "w", EngineProgress) as recorder:
        assert recorder is None
    assert not (tmp_path / "off").exists()


def test_a_pipeline_runs_without_a_recording_where_sqlite_cannot_make_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events_database, "_TABLES", "create virtual table x using fts5 (y, tokenize='unknown');")
    on = Settings.model_validate({"debug": {"enabled": True, "db_dir": str(tmp_path / "on")}})
    with capture_logs() as logs, record_run(on, "w", EngineProgress) as recorder:
        assert recorder is None
    assert [line["event"] for line in logs] == ["nothing is recorded: SQLite cannot create the database"]


def test_off_means_that_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, tidemill.spark.pipeline, tidemill.pipeline.build as build\n"
        "from tidemill.config.settings import Settings\n"
        "from tidemill.pipeline.handler.base import Handler\n"
        "from tidemill.runtime.identity import EngineIdentity\n"
        "from tidemill.spark.live.recording import record_run\n"
        "settings = Settings.model_validate({'debug': {'enabled': False}})\n"
        "build.build_engine(settings, Handler(), EngineIdentity('w', 0, 'e', 'g'))\n"
        "with record_run(settings, 'w', lambda: None): pass\n"
        "print([n for n in sys.modules if n == 'pyarrow' or 'tidemill.recorder' in n or 'pipeline.recording' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.stdout == "[]\n", done.stderr
