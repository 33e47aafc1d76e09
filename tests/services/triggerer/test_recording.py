"""What a trigger host records, and what pages show of its triggers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.services.triggerer import hosted
from tests.services.triggerer.hosted import Upstream
from tests.services.triggerer.hosts import Hosts, spec
from tests.until import slack, wait_until

from tidemill.config.settings import Settings
from tidemill.core.triggers.lifecycle import EndVerdict, Next
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.file_layout import list_periods, name_list_folder
from tidemill.recorder.reading.queries import EventQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.disk_recording import DiskRecording
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.hosting.stream_keys import StreamNames
from tidemill.services.triggerer.hosting.trigger_book import TriggerBook, TriggerPhase
from tidemill.services.triggerer.lists.reporting.host_recorder import HostRecorder, SeenTotals
from tidemill.services.triggerer.lists.reporting.recording import record_host
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState
from tidemill.triggers.streams.stream_counts import Incident, IncidentKind

SECRET = "hunter2secret"


def settings(folder: Path | str, **debug: Any) -> Settings:
    return Settings.model_validate(
        {"debug": {"enabled": True, "db_dir": str(folder), **debug}, "store": {"url": f"postgresql://u:{SECRET}@h/d"}}
    )


def read_events(folder: Path, **query: Any) -> Sequence[RecordedEvent]:
    """Return events, the oldest first."""
    return [row.event for row in reversed(Reader(folder).find_events(EventQuery(**query), None, 5000).rows)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "recordings"


async def test_what_became_of_each_trigger_is_recorded_with_masked_errors(
    hosts: Hosts, quick_restarts: None, folder: Path
) -> None:
    hosts.book = HostBook()
    with record_host(settings(folder), "w1", "orders", hosts.book) as recorder:
        assert recorder is not None
        host = await hosts.start(
            spec("counts", hosted.Counting, count=3),
            spec("raises", hosted.Counting, then="raise", restart="on-failure"),
            spec("refuses", hosted.Refusing),
            spec("waits", hosted.Counting, then="wait"),
        )
        async with asyncio.timeout(30):
            while hosts.book.triggers.entries["raises"].runs < 3:
                await asyncio.sleep(0.01)
        await hosts.stop(host)

    [own] = folder.iterdir()
    assert own.name == name_list_folder("orders")
    assert [event.kind for event in read_events(folder, task_id="counts")] == ["trigger_started", "trigger_ended"]
    assert read_events(folder, task_id="counts")[-1].data == {"events": 3}
    assert [event.text for event in read_events(folder, task_id="waits")] == ["", "shutdown"]
    kinds = [event.kind for event in read_events(folder, task_id="raises")]
    assert kinds[:4] == ["trigger_started", "trigger_failed", "trigger_restarted", "trigger_failed"]
    failed = read_events(folder, task_id="refuses", kinds=("trigger_failed",))
    assert "not today" in failed[0].text
    assert SECRET not in failed[0].text
    groups = {group.error_class: group.kinds for group in Reader(folder).list_failures(None, None, 10).groups}
    assert any("as it was told" in name for name in groups), groups
    [period] = list_periods(own)
    assert SECRET.encode() not in period.database.read_bytes()
    [info] = Reader(folder).list_recordings()
    assert (info.group, info.worker, info.live, info.problems) == ("triggers orders", "w1", False, [])
    assert info.events == len(read_events(folder))


async def test_incidents_of_a_stream_and_its_counts_per_second_are_recorded(
    hosts: Hosts, upstream: Upstream, folder: Path
) -> None:
    hosts.book = HostBook()
    with record_host(settings(folder), "w1", "orders", hosts.book) as recorder:
        assert recorder is not None
        host = await hosts.start(
            spec("good", hosted.Sharing, upstream=upstream.name),
            spec("stuck", hosted.Sharing, upstream=upstream.name, stuck_on=2),
            shared_stream_ack_timeout=0.3,
        )
        for number in range(4):
            upstream.items.put_nowait(number)
        async with asyncio.timeout(30):
            while hosts.book.counts.advanced < 4:
                await asyncio.sleep(0.01)
        host.host.look_once()
        name = f"{upstream.name}\t"
        await asyncio.to_thread(wait_until, lambda: recorder._before.get(name) == (4, 4, 4), 60)
        await hosts.stop(host)

    [timeout] = read_events(folder, kinds=("ack_timeout",))
    assert (timeout.task_id, timeout.sink, timeout.data) == ("stuck", upstream.name, {"position": 2})
    assert "did not finish event 2" in timeout.text
    now = time.time_ns() // 1000
    points = Reader(folder).read_counts(now - 60_000_000, now + 1_000_000, 1).points
    lanes = [vars_of(point.lanes[name]) for point in points if name in point.lanes]
    assert [sum(column) for column in zip(*lanes, strict=True)] == [4, 4, 4]


async def test_off_means_that_nothing_is_recorded(tmp_path: Path) -> None:
    book = HostBook()
    with record_host(settings(tmp_path, enabled=False), "w1", "orders", book) as recorder:
        assert recorder is None
    assert not list(tmp_path.iterdir())


async def test_without_a_folder_the_memory_has_it(tmp_path: Path) -> None:
    book = HostBook()
    with record_host(settings(""), "w1", "orders", book) as recorder:
        assert recorder is not None
        book.counts.tell(Incident(IncidentKind.OVERFLOW, ("kafka", f"user:{SECRET}@h"), "t", ("orders", 3), 7, "slow"))
        memory = recorder.writer.recording
        assert isinstance(memory, MemoryRecording)
        reader = Reader(None, {name_list_folder("orders"): memory})
        await asyncio.to_thread(wait_until, lambda: len(reader.find_events(EventQuery(), None, 10).rows) == 1, 60)
        [row] = reader.find_events(EventQuery(), None, 10).rows
    assert (row.event.kind, row.event.topic, row.event.partition) == (EventKind.OVERFLOW, "orders", 3)


async def test_a_disk_that_hangs_is_waited_for_no_longer_than_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = {"on": True}

    def hang(self: DiskRecording, events: Sequence[RecordedEvent]) -> None:
        while hangs["on"]:
            time.sleep(0.02)

    monkeypatch.setattr(DiskRecording, "add_events", hang)
    book = HostBook()
    with record_host(settings(tmp_path), "w1", "orders", book) as recorder:
        assert recorder is not None
        began = time.monotonic()
        book.counts.tell(Incident(IncidentKind.OVERFLOW, "key", "t"))
        assert time.monotonic() - began < slack(0.5)  # the loop does not wait for the disk
        began = time.monotonic()
    assert 0.9 < time.monotonic() - began < slack(30)
    hangs["on"] = False
    assert recorder.writer._thread is not None
    recorder.writer._thread.join(30)


def test_a_key_that_cannot_be_shown_stops_nothing() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert StreamNames().find(Odd()) == "Odd"


def test_counts_are_of_the_time_between_two_looks_also_while_a_stream_closes() -> None:
    recorder = HostRecorder(HostBook())
    assert recorder.sample(1) is None
    for seen, expected in [((5, 3, 2), [5, 3, 2]), ((2, 2, 2), None), ((6, 4, 2), [1, 1, 0])]:
        recorder._seen = SeenTotals({"s\tl": seen}, {})
        found = recorder.sample(2)
        assert found is not None
        lanes = found[0].lanes
        assert (lanes == {}) if expected is None else ([*vars_of(lanes["s\tl"])] == expected)


def vars_of(lane: Any) -> tuple[int, int, int]:
    return lane.broadcast, lane.resolved, lane.advanced


class Run:
    def __init__(self, listed: TriggerSpec, fired: int = 0) -> None:
        self.spec, self.fired = listed, fired


def make_book(count: int) -> tuple[TriggerBook, list[tuple[str, str, str]]]:
    book, told = TriggerBook(lambda: 1000.0), []
    records = [
        TriggerRecord(n, spec(f"t{n:05d}", hosted.Counting), TriggerState.FINISHED, *[None] * missing())
        for n in range(count)
    ]
    book.note_listed(records)
    book.tell = lambda name, change, text, data: told.append((name, change.value, text))
    return book, told


def missing() -> int:
    return len(TriggerRecord.__dataclass_fields__) - 3


def test_triggers_are_listed_in_pages_by_name() -> None:
    book, _ = make_book(10_000)
    first, more = book.list_after(None, 100)
    assert (len(first), more, first[0].spec.name) == (100, True, "t00000")
    second, _ = book.list_after(first[-1].spec.name, 100)
    assert second[0].spec.name == "t00100"
    assert book.list_after("t09999", 100) == ([], False)
    found, more = book.list_after(None, 5, text="T0999")
    assert ([one.spec.name for one in found], more) == (["t09990", "t09991", "t09992", "t09993", "t09994"], True)
    assert book.list_after(None, 5, [TriggerPhase.FAILED]) == ([], False)
    book.keep_only(["t00007"])
    assert [entry.spec.name for entry in book.list_after(None, 5)[0]] == ["t00007"]


def test_runs_that_follow_at_once_are_counted_and_not_told() -> None:
    book, told = make_book(1)
    run = Run(book.entries["t00000"].spec)
    for fired in (1, 2, 3):
        book.note_started(run)
        run.fired = fired
        book.note_ended(run, Next(EndVerdict.FINISHED, 0), None, None)
    entry = book.entries["t00000"]
    assert (entry.runs, entry.events, entry.phase) == (3, 3, TriggerPhase.RUNNING)
    book.note_ended(run, Next(EndVerdict.FAILED, 7.0), None, "OSError: gone")
    assert (entry.phase, entry.next_at, entry.error, entry.failed_at) == ("restarting", 1007.0, "OSError: gone", 1000.0)
    book.note_cancelled(run, "user")
    later = Run(run.spec, 4)
    book.note_started(later)
    assert (entry.events, entry.next_at) == (7, None)
    book.note_handed_over(later)
    book.note_handed_over(later)
    assert told == [
        ("t00000", "trigger_started", ""),
        ("t00000", "trigger_failed", "OSError: gone"),
        ("t00000", "trigger_ended", "user"),
        ("t00000", "trigger_restarted", ""),
        ("t00000", "trigger_handed_over", "another host runs it"),
    ]
    assert book.count_phases()[TriggerPhase.ELSEWHERE] == 1
