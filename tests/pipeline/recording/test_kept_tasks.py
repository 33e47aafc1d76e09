"""Rows of tasks that ended well: taken when their messages leave, and at every look from those that stay."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs
from tests.pipeline.conftest import P0, Rig, message
from tests.pipeline.recording.test_recorder import Recorded, end, shell

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorError, ExecutorResult, ExecutorTask
from tidemill.pipeline.recording import recorder as recorder_module
from tidemill.pipeline.recording import task_rows
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.pipeline.reports.report import SingleTasks
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.sinks.payloads import CollectResult, FilePayload

MakeRig = Callable[..., Rig]
PLACE = ("t", 3)
FILES = {"filesystem": {"files": {"base_path": "/nowhere"}}}


@pytest.fixture(scope="module", autouse=True)
def _pack_even_single_rows_together() -> Iterator[None]:
    before, task_rows.MIN_TOGETHER = task_rows.MIN_TOGETHER, 1
    yield
    task_rows.MIN_TOGETHER = before


def make_recorder(**debug: Any) -> EngineRecorder:
    return EngineRecorder(DebugSettings(**debug), lambda: 0.0)


def keep(task: ExecutorTask, n: int, seconds: float = 0.25) -> TaskInFlight:
    """Return a task that ended well a moment ago."""
    owner: Any = SimpleNamespace(topic_partition=PLACE, find_task_offsets=lambda run: [n])
    run = TaskInFlight(task, owner, 0.0)
    run.named_offsets = (n,)
    run.slot, run.attempts, run.ended_at, run.input_bytes, run.waited_seconds = n % 5, 1 + n % 3, 10_000_000 + n, n, 0.5
    run.outcome = ProcessOutcome(0, b"x" * n, b"", seconds, 100 + n, None, None)
    return run


def leave(recorder: EngineRecorder, runs: Sequence[TaskInFlight]) -> None:
    """Let messages with one of these tasks each leave together."""
    singles = SingleTasks.find([[run] for run in runs])
    assert singles is not None
    recorder._tasks.add_kept(PLACE, singles)


def list_rows(recorder: EngineRecorder) -> list[dict[str, Any]]:
    recorder._pack_tasks(at_once=True)
    return sorted(Recorded(recorder).tasks, key=lambda row: (row["ended_at"], row["task_id"]))


TASKS = st.builds(ExecutorTask, st.one_of(st.text(max_size=5), st.just("ä" * 2_000)))
PLAIN = st.builds(ExecutorTask, st.text("abc-0", max_size=5))
SECONDS = st.sampled_from((0.0, 0.25, 0.25))
#: Of each window its messages; of each message its tasks, each with how long it took.
WINDOWS = st.lists(
    st.one_of(
        st.lists(st.lists(st.tuples(TASKS, SECONDS), max_size=2), max_size=6),
        st.lists(st.lists(st.tuples(TASKS, SECONDS), min_size=1, max_size=1), max_size=6),
        st.lists(st.lists(st.tuples(PLAIN, SECONDS), min_size=1, max_size=1), max_size=6),
    ),
    max_size=4,
)


@given(WINDOWS, st.integers(1, 5), st.sampled_from((0, 200)))
def test_rows_taken_together_are_those_taken_one_by_one(
    windows: list[list[list[tuple[ExecutorTask, float]]]], block_rows: int, least_ms: int
) -> None:
    together, single = (make_recorder(event_min_duration_ms=least_ms) for _ in range(2))
    before, task_rows.BLOCK_ROWS = task_rows.BLOCK_ROWS, block_rows
    try:
        n = 0
        for window in windows:
            flights_of: list[list[TaskInFlight]] = []
            for tasks in window:
                flights_of.append([])
                for task, seconds in tasks:
                    n += 1
                    flights_of[-1].append(keep(task, n, seconds))
            for run in [run for runs in flights_of for run in runs]:
                assert run.outcome is not None
                single.note_attempt(run, run.outcome)
            singles = SingleTasks.find(flights_of) if flights_of else None
            together._tasks.add_kept(PLACE, singles or flights_of)
            assert together._tasks.size == single._tasks.size
            assert [run.outcome for runs in flights_of for run in runs] == [None] * sum(map(len, flights_of))
            together._tasks.add_kept(PLACE, flights_of)  # nothing is taken twice
        rows = list_rows(single)
        assert list_rows(together) == rows
        assert len(rows) == n or least_ms
        assert together.frames.dropped == single.frames.dropped == 0
    finally:
        task_rows.BLOCK_ROWS = before


def test_a_row_that_no_column_holds_is_counted_with_those_it_is_packed_with() -> None:
    recorder, count = make_recorder(), task_rows.BLOCK_ROWS + 3
    runs = [keep(ExecutorTask(f"t{n}"), n) for n in range(count)]
    runs[1].named_offsets = (2**70,)
    leave(recorder, runs)
    assert recorder.frames.dropped == 0
    assert list_rows(recorder) == []
    assert recorder.frames.dropped == count
    leave(recorder, [keep(ExecutorTask("next"), 1)])
    assert [row["task_id"] for row in list_rows(recorder)] == ["next"]


def test_windows_are_not_kept_by_being_noted() -> None:
    class Window:
        def __init__(self, flights_of: Sequence[Sequence[TaskInFlight]] = ()) -> None:
            self.topic_partition = PLACE
            self.flights_of = flights_of

    recorder, stays = make_recorder(), Window([[keep(ExecutorTask("stays"), 1)]])
    recorder.note_window(Window())  # type: ignore[arg-type]  # lists are invariant
    recorder.note_window(stays)  # type: ignore[arg-type]  # likewise
    gc.collect()
    recorder.note_kept()
    assert recorder._noted == 1
    assert [row["task_id"] for row in list_rows(recorder)] == ["stays"]


def test_windows_that_are_gone_are_forgotten_although_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Window:
        topic_partition = PLACE
        flights_of: Sequence[Sequence[TaskInFlight]] = ()

    monkeypatch.setattr(recorder_module, "MIN_WINDOWS", 10)
    recorder = make_recorder()
    recorder._most_windows = 10
    alive = [Window() for _ in range(30)]
    for window in alive:
        recorder.note_window(window)  # type: ignore[arg-type]  # lists are invariant
        recorder.note_window(Window())  # type: ignore[arg-type]  # likewise
    for _ in range(1_000):
        recorder.note_window(Window())  # type: ignore[arg-type]  # likewise
        assert recorder._noted <= 80
    del alive, window
    for _ in range(100):
        recorder.note_window(Window())  # type: ignore[arg-type]  # likewise
    assert recorder._noted <= 10


class Slow(Handler[Any, Any]):
    """The first message of a window takes as long as a file is missing; every task has a payload."""

    def __init__(self, path: Path) -> None:
        self.path = path

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        wait = f"while [ ! -e {self.path} ]; do sleep 0.01; done"
        return [
            shell(wait, 0, task_id="t0")
            if m.offset == 0 and not self.path.exists()
            else ExecutorTask(f"t{m.offset}", binary_path="/bin/cat", stdin=m.value, source_offsets=[m.offset])
            for m in messages
        ]

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        return CollectResult(files=[FilePayload(path="out", data=b"1")])


class Stdin(Handler[Any, Any]):
    """A task that takes longer than some milliseconds."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [shell("sleep 0.02; cat", m.offset, stdin=m.value) for m in messages]


async def test_a_task_whose_message_waits_for_a_sink_is_recorded_at_the_next_look(rig: MakeRig, tmp_path: Any) -> None:
    it = rig(Slow(tmp_path), [message(0, b"abc"), message(1, b"abcd")], debug={}, sinks=FILES)
    it.files.open.clear()
    recorder = it.recorder
    assert recorder is not None
    await it.until(lambda: it.engine.context.counters.tasks_done == 2)
    assert recorder._tasks.size == 0
    recorder.look({}, ())
    assert recorder._tasks.size == 2
    assert it.source.committed == {}
    it.files.open.set()
    await it.committed(2)
    rows = (await end(it)).tasks
    assert sorted((row["task_id"], row["input_bytes"]) for row in rows) == [("t0", 3), ("t1", 4)]
    assert all(row["pid"] > 0 and row["offsets"] in ([0], [1]) for row in rows)
    assert all(row["queued_at"] <= row["started_at"] <= row["ended_at"] for row in rows)


class Elsewhere(Handler[Any, Any]):
    """Tries to change where its messages say that they are from."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [shell("true", m.offset) for m in messages]

    async def on_message_complete(self, group: Any) -> None:
        group.source_message.offset += 100


async def test_rows_are_of_the_message_that_came_whatever_a_hook_would_make_of_it(rig: MakeRig) -> None:
    it = rig(Elsewhere(), [message(n) for n in range(3)], debug={})
    await it.committed(3)
    recorded = await end(it)
    assert sorted((row["partition"], row["offset"]) for row in recorded.messages) == [(0, 0), (0, 1), (0, 2)]
    assert sorted((row["partition"], row["offsets"]) for row in recorded.tasks) == [(0, [0]), (0, [1]), (0, [2])]
    texts = [letter.error for letter in it.letters.letters]
    assert texts == [texts[0]] * 3
    assert "offset of a message cannot be changed" in texts[0]


def test_closing_a_partition_looks_at_its_own_windows_only() -> None:
    class Window:
        looked_at = 0

        def __init__(self, topic_partition: tuple[str, int]) -> None:
            self.topic_partition = topic_partition

        @property
        def flights_of(self) -> list[list[TaskInFlight]]:
            Window.looked_at += 1
            return [[keep(ExecutorTask(f"t{self.topic_partition[1]}"), 1)]]

    recorder = make_recorder()
    windows = [Window(("t", n)) for n in range(1_000)]
    for window in windows:
        recorder.note_window(window)  # type: ignore[arg-type]  # read-only
    for n in range(500):
        recorder.note_kept(("t", n))
    assert (Window.looked_at, recorder._noted) == (500, 500)
    recorder.note_kept(("t", 0))
    assert (Window.looked_at, recorder._tasks.size) == (500, 500)


def test_recording_does_not_raise_where_messages_leave() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError("no")

    recorder = make_recorder()

    def fail() -> None:
        raise Odd

    recorder._tasks._on_due = fail
    leave(recorder, [keep(ExecutorTask("t"), 1)])
    assert recorder.frames.dropped == 1


async def test_a_slow_task_is_logged_with_its_partition_and_keeps_its_streams(rig: MakeRig, tmp_path: Any) -> None:
    debug = {"log_min_duration_ms": 1, "output_min_duration_ms": 1, "store_stdin": True}
    with capture_logs() as logs:
        it = rig(Stdin(), [message(0, b"abc")], debug=debug)
        await it.committed(1)
        (row,) = (await end(it)).tasks
    (entry,) = [entry for entry in logs if entry["event"] == "a task was slow"]
    assert (entry["partition"], entry["offset"]) == ("t/0", 0)
    assert (row["stdout"], row["stdin"], row["input_bytes"]) == (b"abc", b"abc", 3)


async def test_a_task_is_recorded_although_another_one_of_its_window_runs_on(rig: MakeRig, tmp_path: Any) -> None:
    path = tmp_path / "go"
    it = rig(Slow(path), [message(0), message(1)], debug={}, executor={"window_size": 2})
    recorder = it.recorder
    assert recorder is not None
    await it.until(lambda: recorder._tasks.size == 1)  # it leaves by itself
    path.touch()
    await it.committed(2)
    assert sorted(row["task_id"] for row in (await end(it)).tasks) == ["t0", "t1"]


async def test_tasks_of_a_partition_that_is_lost_are_recorded_once(rig: MakeRig, tmp_path: Any) -> None:
    it = rig(Slow(tmp_path), [message(0), message(1)], debug={}, sinks=FILES)
    it.files.open.clear()
    recorder = it.recorder
    assert recorder is not None
    await it.until(lambda: it.engine.context.counters.tasks_done == 2)
    assert recorder._tasks.size == 0
    it.source.lose(P0)
    assert recorder._tasks.size == 2
    it.files.open.set()
    assert sorted(row["task_id"] for row in (await end(it)).tasks) == ["t0", "t1"]


class Flaky(Handler[Any, Any]):
    """Fails once, and is then tried again or replaced; has two tasks for the last message."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [shell("exit 3", m.offset, task_id=f"bad{m.offset}") for m in messages]

    async def on_error(self, task: ExecutorTask, error: ExecutorError) -> Any:
        if task.task_id == "bad0":
            return [shell("cat", 0, task_id="new-a"), shell("cat", 0, task_id="new-b")]
        return ErrorAction.RETRY


async def test_each_try_has_one_row_whether_it_failed_was_replaced_or_ended_well(rig: MakeRig) -> None:
    config = {"max_retries": 1, "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.01}}
    it = rig(Flaky(), [message(0), message(1)], debug={}, executor=config)
    await it.committed(2)
    rows = sorted((row["task_id"], row["attempt"], row["kind"], row["parent"]) for row in (await end(it)).tasks)
    assert rows == [
        ("bad0", 1, "exit", None),
        ("bad1", 1, "exit", None),
        ("bad1", 2, "exit", None),
        ("new-a", 1, "ok", "bad0"),
        ("new-b", 1, "ok", "bad0"),
    ]
