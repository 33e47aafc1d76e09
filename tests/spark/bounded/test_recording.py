"""The recording of bounded runs: the run and what failed of it are found, and a broken recorder holds nothing up."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.spark.live.test_recording import connect
from tests.until import until, wait_until

from tidemill.config.settings import Settings
from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames
from tidemill.recorder.format.events import EventKind
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing import disk_recording, writer
from tidemill.runtime.link.frames import HelloFrame, WelcomeFrame
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.spark.bounded import recording
from tidemill.spark.bounded.recording import BoundedRecorder, RecordedRun, record_bounded_run
from tidemill.spark.live.run_recorder import RunRecorder


def make_settings(folder: Path, **debug: Any) -> Settings:
    return Settings.model_validate(
        {"kafka": {"consumer_group": "g"}, "debug": {"enabled": True, "db_dir": str(folder), **debug}}
    )


def make_run(progress: Callable[[], EngineProgress] = EngineProgress, how: str = "done") -> RecordedRun:
    return RecordedRun("backfill of t from 0 to 9", {"topic": "t", "ranges": 2}, progress, lambda: how)


def read_ends(folder: Path) -> list[tuple[EventKind, str, dict[str, Any]]]:
    found = Reader(folder).find_events(EventQuery(kinds=("run_started", "run_ended"))).rows
    return [(row.event.kind, row.event.text, row.event.data) for row in reversed(found)]


def test_a_run_is_found_with_its_beginning_its_end_and_its_exact_counts(tmp_path: Path) -> None:
    progress = EngineProgress()
    with record_bounded_run(make_settings(tmp_path), "w.backfill", make_run(lambda: progress)) as recorder:
        assert recorder is not None
        # All of it within the writer's second, as a short run is.
        progress = EngineProgress(consumed=70, messages_done=70, tasks_failed=3, dead_lettered=3)
    reader = Reader(tmp_path)
    (run,) = reader.list_runs()
    assert (run.group, run.worker, run.bounded, run.live) == ("g", "w.backfill", True, False)
    (period,) = reader.list_recordings()
    assert (period.bounded, period.problems) == (True, [])
    started, ended = read_ends(tmp_path)
    assert started == (EventKind.RUN_STARTED, "backfill of t from 0 to 9", {"topic": "t", "ranges": 2})
    assert ended[:2] == (EventKind.RUN_ENDED, "done")
    assert (ended[2]["messages_done"], ended[2]["tasks_failed"], ended[2]["dead_lettered"]) == (70, 3, 3)
    points = reader.read_counts(0, 2**52).points
    assert sum(point.consumed for point in points) == 70


def test_a_run_that_fails_says_why_and_one_that_is_stopped_says_so(tmp_path: Path) -> None:
    with pytest.raises(LookupError), record_bounded_run(make_settings(tmp_path), "w.backfill", make_run()):
        raise LookupError("password=hunter2")
    with record_bounded_run(make_settings(tmp_path), "w.backfill", make_run(how="stopped")):
        pass
    texts = [text for _, text, _ in read_ends(tmp_path)]
    assert texts[1].startswith("failed: LookupError")
    assert "hunter2" not in texts[1]
    assert texts[3] == "stopped"


@pytest.mark.parametrize("debug", [{"enabled": False}, {"db_dir": ""}])
def test_nothing_is_recorded_where_it_is_off_or_has_no_folder(tmp_path: Path, debug: dict[str, Any]) -> None:
    with record_bounded_run(make_settings(tmp_path / "db", **debug), "w", make_run()) as recorder:
        assert recorder is None
    assert not (tmp_path / "db").exists()


def test_a_recorder_that_cannot_begin_is_logged_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise ArithmeticError("unexpected")

    monkeypatch.setattr(disk_recording.DiskRecording, "_begin_period", fail)
    with capture_logs() as logs, record_bounded_run(make_settings(tmp_path), "w", make_run()) as recorder:
        assert recorder is None
    assert [line["event"] for line in logs] == ["the run is not recorded"]


def test_a_folder_that_cannot_be_written_means_that_nothing_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = make_settings(tmp_path / "file" / "db")
    with capture_logs() as logs, record_bounded_run(settings, "w", make_run()) as recorder:
        assert recorder is None
    assert [(line["event"], line["path"]) for line in logs] == [("the run is not recorded", settings.debug.db_dir)]


def test_a_folder_that_does_not_answer_holds_the_run_up_for_a_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, begin = threading.Event(), disk_recording.DiskRecording._begin_period

    def hang(self: Any) -> None:
        assert answered.wait(60)
        begin(self)

    monkeypatch.setattr(disk_recording.DiskRecording, "_begin_period", hang)
    monkeypatch.setattr(recording, "OPEN_SECONDS", 0.2)
    monkeypatch.setattr(writer, "END_SECONDS", 0.2)
    try:
        with capture_logs() as logs, record_bounded_run(make_settings(tmp_path), "w", make_run()) as recorder:
            assert recorder is None
        assert "the folder of recordings does not respond" in logs[0]["event"]
    finally:
        answered.set()
    wait_until(lambda: "tidemill-run-recorder" not in [thread.name for thread in threading.enumerate()], 60)
    assert not [period for period in Reader(tmp_path).list_recordings() if period.live], "it is left open"


class Disk:
    """A writer that hangs."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.kinds: list[EventKind] = []
        self.lost: list[Any] = []

    def put_rows(self, engine_id: str, slot: int, seq: int, table: RowTable, body: bytes, count: int) -> None:
        self.rows.append(count)

    def put_events(self, *_: Any) -> None:
        pass

    def add_event(self, event: Any, slot: int = 0) -> None:
        self.kinds.append(event.kind)

    def lose(self, *args: Any, **more: Any) -> None:
        self.lost.append(args)


class Run:
    """Welcomes every engine."""

    def __init__(self) -> None:
        self.disk = Disk()
        inner = RunRecorder()
        inner.writer = self.disk  # type: ignore[assignment]
        self.recorder = BoundedRecorder(inner)
        self.server = self.recorder.open_link(self, bind_host="127.0.0.1")
        self.address = self.server.start()

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        self.server.send(link, WelcomeFrame(7))

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        pass

    on_ready = on_ended = on_closed = lambda self, *_: None


async def test_engines_never_wait_for_a_disk_that_hangs() -> None:
    run = Run()
    try:
        link, frames = connect(run.address), OutgoingFrames(1000, 1000, 1000)
        await link.connect()
        frames.add("messages", b"rows", 6)
        frames.add(EVENTS, b"\x90", 1)
        link.carry(frames)
        await until(lambda: frames.is_empty)
        assert run.disk.rows == [6]
        await link.close(EngineSummary(3, StopReason.DRAINED))
        await until(lambda: EventKind.ENGINE_ENDED in run.disk.kinds)
    finally:
        run.server.close()


def test_messages_that_went_well_do_not_count_as_lost_with_their_engine() -> None:
    run = Run()
    try:
        hello = HelloFrame(3, 5, 0, "engine", 42, "here")
        run.recorder.lose_engine(hello, EngineProgress(messages_done=500))
    finally:
        run.server.close()
    assert run.disk.kinds == [EventKind.ENGINE_LOST]
    assert run.disk.lost == []


def test_off_means_that_nothing_of_it_is_imported() -> None:
    code = (
        "import sys, tidemill.spark.bounded.backfill, tidemill.spark.bounded.dataframe\n"
        "from tidemill.config.settings import Settings\n"
        "from tidemill.spark.bounded.recording import record_bounded_run\n"
        "settings = Settings.model_validate({'debug': {'enabled': False}})\n"
        "with record_bounded_run(settings, 'w', None): pass\n"
        "print([n for n in sys.modules if 'tidemill.recorder' in n or 'pipeline.recording' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, text=True)
    assert done.stdout == "[]\n", done.stderr
