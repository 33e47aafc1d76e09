"""The writer: what it is given is in files that only this user can read, once, whatever happens."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from structlog.testing import capture_logs
from tests.recorder.rows import START, message, messages, task, tasks
from tests.until import wait_until

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.recorder.sealing import SealPolicy
from tidemill.recorder.format import file_layout
from tidemill.recorder.format.counts import Counts
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.events_database import EventsDatabase
from tidemill.recorder.format.file_layout import Period, SegmentName, create_period, list_periods, list_worker_folders
from tidemill.recorder.format.frames import MAGIC, FrameInfo, pack_frame
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.reading.queries import MessageQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing import cleaning, disk_recording, open_segment, sampling, sealed_files
from tidemill.recorder.writing import writer as writer_module
from tidemill.recorder.writing.disk_recording import DiskRecording
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.runtime.link.progress import EngineProgress, SinkStats

POLICY = SealPolicy(max_rows=20)
FAILED = RecordedEvent(
    START, EventKind.TASK_FAILED, "orders", 0, 3, "t3", text="no such file: x", error_class="no such file"
)


def settings(folder: Path | str, **others: Any) -> DebugSettings:
    return DebugSettings(db_dir=str(folder), **others)


def find_period(folder: Path) -> Period:
    (worker,) = list_worker_folders(folder)
    return list_periods(worker)[-1]


def read_offsets(folder: Path) -> list[int]:
    """Return the offsets in all sealed segments."""
    found: list[int] = []
    for path in sorted(folder.rglob("messages-*.parquet")):
        found += pq.read_table(path, columns=["offset"])["offset"].to_pylist()
    return found


def stored(writer: RecordWriter, rows: int) -> None:
    wait_until(lambda: writer.statistics.rows + writer.statistics.lost_rows >= rows)


def test_rows_are_sealed_when_there_are_enough_and_the_rest_at_the_end(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "g", "w", policy=POLICY) as writer:
        for seq in range(1, 6):
            body = messages(*(message(offset) for offset in range(seq * 10, seq * 10 + 10)))
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, body)
            stored(writer, seq * 10)
        wait_until(lambda: len(list(tmp_path.rglob("*.parquet"))) >= 2)
        assert list(tmp_path.rglob("messages-*.open"))
    assert sorted(read_offsets(tmp_path)) == list(range(10, 60))
    assert not list(tmp_path.rglob("*.open"))
    assert Reader(tmp_path).list_failures().problems == []
    assert not [*tmp_path.rglob("*-wal"), *tmp_path.rglob("*-shm")], "readers would leave these behind"


def test_the_row_of_a_task_takes_few_bytes(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.TASKS, tasks(*(task(f"task-{n:05d}", [n]) for n in range(5000))))
        stored(writer, 5000)
    (sealed,) = tmp_path.rglob("tasks-*.parquet")
    metadata = pq.read_metadata(sealed)
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    columns = [group.column(number) for group in groups for number in range(group.num_columns)]
    (offsets,) = [column for column in columns if column.path_in_schema.startswith("offsets.")]
    assert offsets.total_compressed_size < 0.2 * 5000
    assert sum(column.total_compressed_size for column in columns) < 8 * 5000


def test_a_frame_that_is_sent_again_is_stored_once_and_confirmed_again(tmp_path: Path):
    confirmed: list[tuple[str, int]] = []
    with RecordWriter(settings(tmp_path), "g", "w", stored=lambda *which: confirmed.append(which)) as writer:
        for seq in (1, 2, 1, 2, 3):
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, messages(message(seq)))
        writer.put_events("e1", 0, 4, [FAILED])
        writer.put_events("e1", 0, 4, [FAILED])
    assert read_offsets(tmp_path) == [1, 2, 3]
    assert writer.statistics.events == 1
    assert [seq for _, seq in confirmed] == [1, 2, 1, 2, 3, 4, 4]


def test_folders_and_files_are_only_for_this_user(tmp_path: Path):
    before = os.umask(0)
    try:
        with RecordWriter(settings(tmp_path / "all" / "recordings"), "g", "w", config={"a": 1}) as writer:
            writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
            writer.put_events("e1", 0, 2, [FAILED])
            stored(writer, 1)
            wait_until(lambda: writer.statistics.events == 1)
            check_modes(tmp_path / "all" / "recordings")
    finally:
        os.umask(before)
    check_modes(tmp_path / "all" / "recordings")


def check_modes(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            wanted = 0o700 if path.is_dir() else 0o600
            assert stat.S_IMODE(path.lstat().st_mode) == wanted, path


def test_the_live_link_leads_to_the_current_database_and_goes_at_the_end(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "g", "w"):
        link = tmp_path / "g.w" / "w-live.db"
        assert link.readlink() == Path(find_period(tmp_path).database.name)
    assert not link.is_symlink()


def test_names_that_no_file_can_have_stay_apart(tmp_path: Path):
    where = settings(tmp_path / "recordings")
    with RecordWriter(where, "../a/b", "w"), RecordWriter(where, "../a_b", "w"):
        assert len(list_worker_folders(tmp_path / "recordings")) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["recordings"]


def test_groups_and_workers_with_dots_have_folders_of_their_own(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "orders.eu", "host"), RecordWriter(settings(tmp_path), "orders", "eu.host"):
        assert len(list_worker_folders(tmp_path)) == 2
        found = {(info.group, info.worker): info.recording for info in Reader(tmp_path).list_recordings()}
    assert len({found["orders.eu", "host"], found["orders", "eu.host"]}) == 2


def test_a_batch_that_cannot_be_read_is_counted_and_the_others_are_stored(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, b"garbage")
        writer.put_rows("e1", 0, 2, RowTable.MESSAGES, tasks(task("t", [1])))
        writer.put_rows("e1", 0, 3, RowTable.MESSAGES, messages(message(3)))
    assert read_offsets(tmp_path) == [3]
    assert (writer.statistics.rows, writer.statistics.lost_rows) == (1, 2)


class FullDisk:
    """A disk on which only so many bytes fit."""

    def __init__(self) -> None:
        self.full = False

    def write(self, fd: int, data: memoryview) -> int:
        if not self.full:
            return os.write(fd, data)
        if len(data) > 10:
            return os.write(fd, data[:10])
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FullDisk]:
    disk = FullDisk()
    monkeypatch.setattr(open_segment, "write", disk.write)
    return disk


def test_a_full_disk_loses_rows_says_so_and_goes_on_when_there_is_room(tmp_path: Path, disk: FullDisk):
    confirmed: list[int] = []
    with (
        capture_logs() as logs,
        RecordWriter(settings(tmp_path), "g", "w", stored=lambda _, seq: confirmed.append(seq)) as writer,
    ):
        for seq, full in ((1, False), (2, True), (3, True), (4, False)):
            disk.full = full
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, messages(message(seq)))
            stored(writer, seq)
    assert read_offsets(tmp_path) == [1, 4]
    assert (writer.statistics.rows, writer.statistics.lost_rows) == (2, 2)
    assert confirmed == [1, 2, 3, 4]
    lost = [line for line in logs if line["event"] == "recorded rows are lost"]
    assert lost
    assert "No space left" in lost[0]["error"]


def test_what_was_lost_is_said_when_rows_are_recorded_again_and_at_the_end(tmp_path: Path, disk: FullDisk):
    """The first line of a full disk comes before most is lost: the totals follow."""
    with capture_logs() as logs, RecordWriter(settings(tmp_path), "g", "w") as writer:
        for seq, full in ((1, True), (2, True), (3, False), (4, True), (5, True)):
            disk.full = full
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, messages(message(seq)))
            stored(writer, seq)
    told = [(line["event"].split(";")[0], line["rows"]) for line in logs if "lost" in line["event"]]
    assert told == [("recorded rows are lost", 1), ("rows are recorded again", 2), ("recorded rows are lost", 4)]


LIMITED = """
    import resource, sys
    from tests.recorder.rows import START, message, messages
    from tidemill.config.sections.debug_settings import DebugSettings
    from tidemill.recorder.format.events import EventKind, RecordedEvent
    from tidemill.recorder.format.schema import RowTable
    from tidemill.recorder.writing.writer import RecordWriter

    # No file of this process may become larger than this, which is how a full disk looks.
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
    seqs = []
    writer = RecordWriter(DebugSettings(db_dir=sys.argv[1]), "g", "w", stored=lambda _, seq: seqs.append(seq))
    with writer:
        for seq in range(1, 101):
            writer.put_rows("e", 0, 2 * seq, RowTable.MESSAGES, messages(*(message(100 * seq + n) for n in range(100))))
            text = f"{seq}" * 1_000
            writer.put_events("e", 0, 2 * seq + 1, [RecordedEvent(START, EventKind.TASK_FAILED, text=text)])
    done = writer.statistics
    print(done.rows, done.lost_rows, done.events, done.lost_events, len(seqs))
"""


def test_files_that_cannot_grow_lose_rows_and_events_and_the_process_ends_as_usual(tmp_path: Path):
    command = [sys.executable, "-c", textwrap.dedent(LIMITED), str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows, lost_rows, events, lost_events, confirmed = map(int, run.stdout.splitlines()[-1].split())
    assert (rows + lost_rows, events + lost_events, confirmed) == (10_000, 100, 200)
    assert lost_rows > 0
    assert lost_events > 0
    assert len(read_offsets(tmp_path)) == rows


def test_what_a_full_disk_does_not_let_seal_is_sealed_later_and_readable_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(path: Path, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    one = DiskRecording(tmp_path, "g", "w", settings(tmp_path), SealPolicy(max_rows=10))
    with monkeypatch.context() as full:
        full.setattr(sealed_files, "_write_file", refuse)
        with pytest.raises(OSError, match="No space left"):
            add(one, 0)
        with pytest.raises(OSError, match="No space left"):
            add(one, 10)
    page = Reader(tmp_path).find_messages(MessageQuery())
    assert (len(page.rows), page.problems) == (20, [])
    assert read_offsets(tmp_path) == []
    monkeypatch.setattr(one, "_retry_at", 0.0)
    one.tick()
    assert read_offsets(tmp_path) == list(range(20))
    assert not list(tmp_path.rglob("*.open"))
    one.close()


def test_a_new_period_that_cannot_be_begun_leaves_nothing_behind_and_the_old_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*arguments: object, **others: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    one = DiskRecording(tmp_path, "g", "w", settings(tmp_path, rotation_interval_minutes=1e-9))
    before = sorted(path.name for path in (tmp_path / "g.w").iterdir())
    with monkeypatch.context() as full:
        full.setattr(disk_recording, "EventsDatabase", refuse)
        with pytest.raises(sqlite3.OperationalError):
            one.tick()
        add(one, 0)
    assert sorted(path.name for path in (tmp_path / "g.w").iterdir()) == before
    one.close()
    assert read_offsets(tmp_path) == list(range(10))


def test_a_disk_that_hangs_delays_neither_who_records_nor_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    hangs, goes_on = threading.Event(), threading.Event()

    def hang(*arguments: object) -> None:
        hangs.set()
        goes_on.wait(60)

    monkeypatch.setattr(DiskRecording, "append", hang)
    monkeypatch.setattr(writer_module, "END_SECONDS", 0.2)
    monkeypatch.setattr(writer_module, "MAX_QUEUE_BYTES", 50_000)
    confirmed: list[int] = []
    with capture_logs() as logs:
        with RecordWriter(settings(tmp_path), "g", "w", stored=lambda _, seq: confirmed.append(seq)) as writer:
            body = messages(*(message(offset) for offset in range(1_000)))
            writer.put_rows("e", 0, 1, RowTable.MESSAGES, body)
            wait_until(hangs.is_set)
            for seq in range(2, 100):
                writer.put_rows("e", 0, seq, RowTable.MESSAGES, body)
            lost = writer.statistics.lost_rows
        assert 0 < lost < 98
        assert len(confirmed) == lost
        assert any("the disk is too slow" in str(line) for line in logs)
    goes_on.set()


def test_a_folder_that_cannot_be_written_means_memory_and_is_said_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with capture_logs() as logs, RecordWriter(settings(tmp_path / "file"), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(writer, 1)
        assert writer.statistics.location == "memory"
    assert [line["event"] for line in logs] == ["the recording cannot be written; the newest 64 MiB are kept in memory"]


@pytest.mark.parametrize("removed", ["", "g.w"])
def test_a_folder_that_is_removed_is_made_again_and_said_once(tmp_path: Path, removed: str):
    folder = tmp_path / "recordings"
    with capture_logs() as logs, RecordWriter(settings(folder), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(writer, 1)
        shutil.rmtree(folder / removed)
        wait_until(lambda: list(folder.glob("g.w/*.db")))
        writer.put_rows("e1", 0, 2, RowTable.MESSAGES, messages(message(2)))
        writer.put_events("e1", 0, 3, [FAILED])
        stored(writer, 2)
    assert read_offsets(folder) == [1, 2], "rows that were not sealed yet are in memory, and sealed anew"
    assert len(Reader(folder).list_failures().groups) == 1
    assert [line["event"].split(";")[0] for line in logs] == ["the recording was removed while it was written"]


def test_rows_are_counted_as_lost_while_a_removed_folder_cannot_be_made_again(tmp_path: Path):
    folder = tmp_path / "recordings"
    with RecordWriter(settings(folder), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(writer, 1)
        folder.rename(tmp_path / "away")
        folder.write_text("")
        wait_until(lambda: getattr(writer.recording, "_is_missing", False))
        writer.put_rows("e1", 0, 2, RowTable.MESSAGES, messages(message(2)))
        stored(writer, 2)
        folder.unlink()
        wait_until(lambda: list(folder.glob("g.w/*.db")))
    assert (writer.statistics.rows, writer.statistics.lost_rows) == (1, 1)
    assert read_offsets(folder) == [1]


def test_no_folder_means_memory_and_nothing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with capture_logs() as logs, RecordWriter(settings(""), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(writer, 1)
        assert writer.statistics.location == "memory"
    assert logs == []
    assert list(tmp_path.iterdir()) == []


def test_what_is_kept_in_memory_does_not_grow_for_ever():
    memory = MemoryRecording("g", "w", settings("", retention_hours=2))
    now, database = int(time.time()), memory.database
    for age in (10_000, 5_000, 10):
        for step in (1, 60):
            database.add_counts(step, now - age, b"")
        database.add_state((now - age) * 1_000_000, "{}")
        failed = RecordedEvent((now - age) * 1_000_000, EventKind.TASK_FAILED, text=f"{age}", error_class=f"{age}")
        memory.add_events([failed])
    memory.tick()
    with contextlib.closing(sqlite3.connect(memory.database_uri, uri=True)) as db:
        ask = "select step, ? - at from counts order by step, at"
        assert db.execute(ask, (now,)).fetchall() == [(1, 10), (60, 5_000), (60, 10)]
        assert db.execute("select ? - at_us / 1000000 from worker_state", (now,)).fetchall() == [(10,)]
        ask = "select name from failures join classes on id = class_id order by last_us"
        assert db.execute(ask).fetchall() == [("5000",), ("10",)]
    memory.close()


def test_one_segment_that_cannot_be_sealed_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "g.w").mkdir(mode=0o700)
    period, lock = create_period(tmp_path / "g.w", "w", 1_000.0)
    os.close(lock)
    names = [SegmentName(number, RowTable.MESSAGES, sealed=False) for number in (1, 2)]
    for name in names:
        period.path_of(name, "open").touch()

    def refuse_first(period: Period, name: SegmentName, worker: str) -> None:
        if name.number == 1:
            raise ValueError("not a time")
        period.path_of(name, "open").unlink()

    monkeypatch.setattr(sealed_files, "seal_open_file", refuse_first)
    with capture_logs() as logs:
        sealed_files.seal_leftovers(tmp_path)
    assert period.list_segments() == names[:1]
    (line,) = logs
    assert line["path"] == str(period.path_of(names[0], "open"))


def test_an_old_period_stays_where_nobody_knows_whether_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.add_event(RecordedEvent(1, EventKind.ACTION))
    period = find_period(tmp_path)

    def refuse(path: Path) -> int:
        raise OSError(errno.EMFILE, "too many open files")

    with monkeypatch.context() as patched, capture_logs() as logs:
        patched.setattr(file_layout, "lock_file", refuse)
        assert not cleaning.remove_period(period)
    assert period.database.exists()
    assert len(logs) == 1
    assert cleaning.remove_period(period)
    assert not period.database.exists()


def test_after_a_rotation_the_minute_before_is_not_counted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock, seconds = SimpleNamespace(now=float(START // 1_000_000 // 60 * 60)), iter(range(1, 1_000))
    fake = SimpleNamespace(time=lambda: clock.now, monotonic=lambda: clock.now, time_ns=lambda: int(clock.now * 1e9))
    monkeypatch.setattr(sampling, "time", fake)
    sample = sampling.sample_progress(lambda: EngineProgress(consumed=next(seconds)))
    sampler = sampling.ProcessSampler(settings(""), sample)
    for name in ("one", "two"):
        with contextlib.closing(EventsDatabase(tmp_path / name, "g", "w", 1, 1)) as database:
            for _ in range(40):
                clock.now += 1
                sampler.tick(database)
    with contextlib.closing(sqlite3.connect(tmp_path / "two")) as db:
        ((body,),) = db.execute("select body from counts where step = 60").fetchall()
    assert msgspec.msgpack.decode(body, type=Counts).consumed == 19


@pytest.mark.parametrize("plant", ["folder", "worker", "file"])
def test_a_planted_link_is_not_followed(tmp_path: Path, plant: str):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    recordings = tmp_path / "recordings"
    recordings.mkdir()
    if plant == "worker":
        (recordings / "g.w").symlink_to(elsewhere)
    elif plant == "folder":
        (recordings / "g.w").mkdir()
        (recordings / "g.w" / "w-live.db").symlink_to(elsewhere / "victim")
    else:
        (recordings / "g.w").write_text("")
    with capture_logs(), RecordWriter(settings(recordings), "g", "w") as writer:
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(writer, 1)
        assert (writer.statistics.location == "memory") == (plant != "folder")
    assert list(elsewhere.iterdir()) == []


KILLED = """
    import os, signal, sys
    from pathlib import Path
    from tests.recorder.rows import message, messages, task, tasks
    from tidemill.config.sections.debug_settings import DebugSettings
    from tidemill.core.recorder.sealing import SealPolicy
    from tidemill.recorder.format.schema import RowTable
    from tidemill.recorder.writing.writer import RecordWriter
    from tidemill.recorder.writing import sealed_files

    when = sys.argv[2]
    if when == "sealing":
        whole = sealed_files._write_file
        def die(path, data):
            if path.suffix == ".parquet":
                Path(f"{path}.tmp").write_bytes(bytes(data)[:100])
                os.kill(os.getpid(), signal.SIGKILL)
            whole(path, data)
        sealed_files._write_file = die
    count = 0
    def stored(engine, seq):
        global count
        count += 1
        print(seq, flush=True)
        if when == "writing" and count == 5:
            os.kill(os.getpid(), signal.SIGKILL)
    writer = RecordWriter(DebugSettings(db_dir=sys.argv[1]), "g", "w", stored=stored, policy=SealPolicy(max_rows=30))
    with writer:
        for seq in range(1, 6):
            body = messages(*(message(offset) for offset in range(seq * 10, seq * 10 + 10)))
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, body)
"""


@pytest.mark.parametrize("when", ["writing", "sealing"])
def test_the_next_run_seals_what_a_killed_driver_left(tmp_path: Path, when: str):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path), when],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == -9, run.stderr
    confirmed = [int(seq) for seq in run.stdout.split()]
    (left,) = tmp_path.rglob("messages-*.open")
    with left.open("ab") as file:
        file.write(b"FRAM\x01\x02")  # what a kill in the middle of a write leaves
    with RecordWriter(settings(tmp_path), "another", "w"):
        wait_until(lambda: not left.exists())
    expected = [offset for seq in confirmed for offset in range(seq * 10, seq * 10 + 10)]
    assert sorted(read_offsets(tmp_path)) == expected
    assert not list(tmp_path.rglob("*.tmp"))
    period = next(period for period in list_periods(tmp_path / "g.w"))
    with sqlite3.connect(period.database) as database:
        assert database.execute('select sum("rows") from segments').fetchone() == (len(expected),)


def test_two_drivers_in_one_folder_leave_each_other_alone(tmp_path: Path):
    with RecordWriter(settings(tmp_path), "g", "w") as first:
        first.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        stored(first, 1)
        with RecordWriter(settings(tmp_path), "g", "w") as second:
            second.put_rows("e2", 0, 1, RowTable.MESSAGES, messages(message(2)))
            stored(second, 1)
            assert len(list(tmp_path.rglob("messages-*.open"))) == 2
        assert len(list(tmp_path.rglob("messages-*.open"))) == 1
        assert len(list_periods(tmp_path / "g.w")) == 2
    assert sorted(read_offsets(tmp_path)) == [1, 2]


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[Callable[..., DiskRecording]]:
    """Open recordings in one folder, closed at the end."""
    opened: list[DiskRecording] = []

    def open_one(**others: Any) -> DiskRecording:
        opened.append(DiskRecording(tmp_path, "g", "w", settings(tmp_path, **others), SealPolicy(max_rows=10)))
        return opened[-1]

    yield open_one
    for each in opened:
        each.close()


def add(recording: DiskRecording, first: int, rows: int = 10) -> None:
    """Record messages, and do what is due."""
    from tests.recorder.rows import batch_of

    from tidemill.recorder.format.frames import FrameInfo
    from tidemill.recorder.format.schema import encode_rows

    batch = batch_of(RowTable.MESSAGES, *(message(offset) for offset in range(first, first + rows)))
    recording.append(RowTable.MESSAGES, [(FrameInfo("e", 0, first, RowTable.MESSAGES), encode_rows(batch), batch)])
    recording.tick()


def test_a_period_that_is_over_is_followed_by_another(recording: Callable[..., DiskRecording], tmp_path: Path):
    one = recording(rotation_interval_minutes=1e-9)
    add(one, 0, rows=3)
    add(one, 3, rows=3)
    assert len(list_periods(tmp_path / "g.w")) == 3
    assert sorted(read_offsets(tmp_path)) == list(range(6))


def test_the_oldest_segments_of_the_period_go_when_there_are_too_many_bytes(
    recording: Callable[..., DiskRecording], tmp_path: Path
):
    one = recording(retention_max_bytes=1_000_000, flush_interval_seconds=0)
    for first in range(0, 600, 10):
        add(one, first)
    kept = read_offsets(tmp_path)
    assert kept == list(range(kept[0], 600))
    assert 0 < kept[0] < 600
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size < 1_100_000


def test_events_beyond_the_limit_go_with_their_texts(recording: Callable[..., DiskRecording], tmp_path: Path):
    one = recording(retention_max_events=3)
    one.add_events([RecordedEvent(START + at, EventKind.TASK_FAILED, text=f"error {at}") for at in range(10)])
    one._clean()
    with sqlite3.connect(find_period(tmp_path).database) as database:
        assert database.execute("select at_us from events").fetchall() == [(START + at,) for at in (7, 8, 9)]
        assert database.execute("select text from texts").fetchall() == [("error 7",), ("error 8",), ("error 9",)]
        search = "select rowid from texts_search where texts_search match ?"
        assert database.execute(search, ('"error"',)).fetchall() == [(8,), (9,), (10,)]


def test_old_periods_of_workers_that_are_gone_are_removed_by_the_next_run(tmp_path: Path):
    for worker, hours in (("short", 1.0), ("long", 1_000.0)):
        with RecordWriter(settings(tmp_path, retention_hours=hours), "g", worker) as writer:
            writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
    day_ago = tmp_path.stat().st_mtime - 86_400
    for path in tmp_path.rglob("*"):
        os.utime(path, (day_ago, day_ago))
    with RecordWriter(settings(tmp_path), "g", "new"):
        wait_until(lambda: not (tmp_path / "g.short").exists())
        assert (tmp_path / "g.long").is_dir()


def test_lost_rows_are_counted_by_row_and_by_the_slot_that_they_came_from(tmp_path: Path, disk: FullDisk):
    disk.full = True
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.put_rows("e0", 0, 1, RowTable.MESSAGES, b"garbage", 7)
        writer.put_rows("e1", 1, 1, RowTable.MESSAGES, messages(message(1), message(2)), 2)
        writer.lose(1, "an unknown table", events=3)
    assert (writer.statistics.lost_rows, writer.statistics.lost_events) == (9, 3)
    assert writer.statistics.lost_by_slot == {0: 7, 1: 5}


def test_a_queue_that_is_full_loses_all_rows_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "MAX_QUEUE_BYTES", 1)
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.put_rows("e0", 3, 1, RowTable.MESSAGES, messages(message(1), message(2)), 2)
    assert writer.statistics.lost_by_slot == {3: 2}


def test_batches_that_come_at_once_are_sealed_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What waits for a slow disk is written batch by batch: no segment gets larger than one batch more."""
    begun, goes_on = threading.Event(), threading.Event()

    def wait(self: DiskRecording) -> None:
        begun.set()
        assert goes_on.wait(60)

    monkeypatch.setattr(DiskRecording, "seal_leftovers", wait)
    with RecordWriter(settings(tmp_path), "g", "w", policy=POLICY) as writer:
        assert begun.wait(60)
        for seq in range(1, 31):
            rows = messages(*(message(10 * seq + n) for n in range(10)))
            writer.put_rows("e1", 0, seq, RowTable.MESSAGES, rows)
        goes_on.set()
    period = find_period(tmp_path)
    sizes = [pq.read_metadata(period.path_of(name, "parquet")).num_rows for name in period.list_segments()]
    assert sizes == [20] * 15


def test_only_a_limited_number_of_bytes_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(writer_module, "_MAX_TAKEN_BYTES", 100)
    writer = RecordWriter(settings(tmp_path), "g", "w")
    for seq in range(3):
        writer.put_rows("e1", 0, seq, RowTable.MESSAGES, b"x" * 60)
    assert [len(writer._take()[0]) for _ in range(2)] == [2, 1]


def leave_open(folder: Path, worker: str, body: bytes) -> Path:
    """Leave a period as a killed driver does, with an open segment that has this behind its magic."""
    worker_folder = folder / f"g.{worker}"
    worker_folder.mkdir(mode=0o700, parents=True)
    period, lock = create_period(worker_folder, worker, time.time() - 100)
    os.close(lock)
    path = period.path_of(SegmentName(1, RowTable.MESSAGES, sealed=False), "open")
    path.write_bytes(MAGIC + body)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize("damage", ["first", "length", "second"])
def test_a_damaged_file_is_set_aside_and_what_is_readable_is_sealed(tmp_path: Path, damage: str):
    info = FrameInfo("e1", 0, 1, RowTable.MESSAGES)
    whole = pack_frame(info, messages(message(1)))
    broken = bytearray(whole)
    broken[8 if damage == "length" else -1] ^= 0xFF
    broken[11 if damage == "length" else -1] ^= 0x7F
    data = whole + broken if damage == "second" else broken + whole
    path = leave_open(tmp_path, "gone", bytes(data))
    with capture_logs() as logs, RecordWriter(settings(tmp_path), "g", "w"):
        wait_until(lambda: not path.exists())
    assert path.with_suffix(".damaged").read_bytes() == MAGIC + data
    assert read_offsets(tmp_path) == ([1] if damage == "second" else [])
    assert any(line.get("path") == str(path.with_suffix(".damaged")) for line in logs)


def test_rows_are_stored_while_what_others_left_is_sealed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    begun, goes_on = threading.Event(), threading.Event()

    def hang(*arguments: object) -> int:
        begun.set()
        goes_on.wait(60)
        return 0

    monkeypatch.setattr(disk_recording, "seal_leftovers", hang)
    monkeypatch.setattr(disk_recording, "END_SECONDS", 0.1)
    with RecordWriter(settings(tmp_path), "g", "w", policy=POLICY) as writer:
        wait_until(begun.is_set)
        writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(*(message(n) for n in range(20))), 20)
        wait_until(lambda: read_offsets(tmp_path) == list(range(20)))
    goes_on.set()


def test_the_largest_of_what_others_left_is_sealed_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    seal_one = sealed_files.seal_open_file

    def note(period: Period, name: SegmentName, worker: str) -> Any:
        order.append(worker)
        return seal_one(period, name, worker)

    monkeypatch.setattr(sealed_files, "seal_open_file", note)
    for worker, rows in (("a", 500), ("b", 1), ("c", 50)):
        body = messages(*(message(n) for n in range(rows)))
        leave_open(tmp_path, worker, pack_frame(FrameInfo("e1", 0, 1, RowTable.MESSAGES), body))
    assert sealed_files.seal_leftovers(tmp_path) == 3
    assert order == ["b", "c", "a"]


def test_a_pipeline_without_messages_removes_what_becomes_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(disk_recording, "HOUSEKEEPING_SECONDS", 0.1)
    with RecordWriter(settings(tmp_path), "g", "idle") as idle:
        wait_until(lambda: idle.recording is not None)
        with RecordWriter(settings(tmp_path, retention_hours=1.0), "g", "short") as writer:
            writer.put_rows("e1", 0, 1, RowTable.MESSAGES, messages(message(1)))
        day_ago = time.time() - 86_400
        for path in (tmp_path / "g.short").rglob("*"):
            os.utime(path, (day_ago, day_ago))
        wait_until(lambda: not (tmp_path / "g.short").exists())


def test_no_secret_is_in_the_state_that_is_stored(tmp_path: Path):
    progress = EngineProgress(
        sinks={"sinks.http.api": SinkStats(last_error="cannot reach http://me:hunter2@host/")},
        flow={"password-resets/0": (3, 2, 0)},
    )
    with RecordWriter(settings(tmp_path), "g", "w", read_progress=lambda: progress) as writer:
        database = find_period(tmp_path).database

        def read_states() -> list[tuple[str]]:
            with contextlib.closing(sqlite3.connect(database)) as db:
                return db.execute("select body from worker_state").fetchall()

        wait_until(lambda: bool(writer.recording) and bool(read_states()))
        ((body,), *_) = read_states()
    assert "hunter2" not in body
    state = msgspec.json.decode(body, type=EngineProgress)
    assert state.sinks["sinks.http.api"].last_error == "cannot reach http://***@host/"
    assert state.flow == {"password-resets/0": (3, 2, 0)}


def test_a_start_that_was_stopped_leaves_no_empty_period(tmp_path: Path):
    for _ in range(3):
        with RecordWriter(settings(tmp_path), "g", "w", read_progress=EngineProgress, config={"a": 1}) as writer:
            assert writer.statistics.location != "memory"
    assert not list(tmp_path.rglob("*"))
    with RecordWriter(settings(tmp_path), "g", "w") as writer:
        writer.add_event(RecordedEvent(1, EventKind.ACTION))
    (period,) = Reader(tmp_path).list_recordings()
    assert period.events == 1
    with RecordWriter(settings(tmp_path), "g", "w"):
        pass
    assert [info.period for info in Reader(tmp_path).list_recordings()] == [period.period]


def test_there_is_never_a_rollback_journal_which_a_reader_of_what_a_kill_left_could_not_roll_back(tmp_path: Path):
    journal, found, is_over = tmp_path / "none", [], threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            if os.path.exists(journal):
                found.append(journal.name)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        for number in range(20):
            location = tmp_path / f"{number}.sqlite"
            journal = location.with_name(f"{location.name}-journal")
            location.touch()
            EventsDatabase(location, "g", "w", 1, 1).close()
            assert location.read_bytes()[18:20] == b"\1\1", "it is one file, without a log beside it"
    finally:
        is_over.set()
        watching.join()
    assert not found
    assert len(list(tmp_path.iterdir())) == 20
