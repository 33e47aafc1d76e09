"""What an engine records, as the driver gets it: rows of messages and tasks, and events."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
from structlog.testing import capture_logs
from tests.pipeline.batches import make_batch
from tests.pipeline.conftest import Rig, message
from tests.until import until

from tidemill.core.recorder.outgoing import EVENTS
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import (
    DeliveryAction,
    ErrorAction,
    ErrorKind,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    MessageGroup,
    PrecomputedResult,
)
from tidemill.pipeline.handler.periodic import periodic
from tidemill.pipeline.recording import event_log, task_rows
from tidemill.pipeline.recording import recorder as recorder_module
from tidemill.pipeline.recording.event_log import MAX_PER_SECOND, EngineEventLog
from tidemill.pipeline.recording.recorder import EngineRecorder
from tidemill.pipeline.recording.task_rows import MAX_STREAM_BYTES, cut_stream, mask_stream
from tidemill.pipeline.reports.report import FinishedBatch
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import MAX_BODY_BYTES, RowTable, decode_rows
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.log import setup as log_module
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload

MakeRig = Callable[..., Rig]
SECRET = "password=hunter2"


class Recorded:
    """What came out of a recorder."""

    def __init__(self, recorder: EngineRecorder) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {"messages": [], "tasks": []}
        self.events: list[RecordedEvent] = []
        self.bodies: list[bytes] = []
        while (frame := recorder.frames.take_next()) is not None:
            self.bodies.append(frame.body)
            if frame.table == EVENTS:
                found = msgspec.msgpack.decode(frame.body, type=list[RecordedEvent])
                self.events += found
            else:
                found = decode_rows(RowTable(frame.table), frame.body).to_pylist()
                self.rows[frame.table] += found
            assert frame.count == len(found)
            recorder.frames.note_stored(frame.seq)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return sorted(self.rows["messages"], key=lambda row: row["offset"])

    @property
    def tasks(self) -> list[dict[str, Any]]:
        return self.rows["tasks"]

    def of(self, kind: EventKind) -> list[RecordedEvent]:
        return [event for event in self.events if event.kind is kind]


async def end(rig: Rig) -> Recorded:
    await rig.end()
    assert rig.recorder is not None
    return Recorded(rig.recorder)


def shell(script: str, *offsets: int, task_id: str = "", **more: Any) -> ExecutorTask:
    return ExecutorTask(task_id or f"t{offsets}", ("-c", script), source_offsets=offsets, binary_path="/bin/sh", **more)


class Shell(Handler[Any, Any]):
    """Runs a script per message."""

    def __init__(self, script: str = "cat", **more: Any) -> None:
        self.script = script
        self.more = more

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [shell(self.script, m.offset, stdin=m.value, **self.more) for m in messages]


class Known(Handler[Any, Any]):
    """A known result per message, and a payload each for tasks and messages."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(f"k{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult("x"))
            for m in messages
        ]

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        return CollectResult(files=[FilePayload(path="out", data=b"1")])

    async def on_message_complete(self, group: MessageGroup) -> CollectResult:
        return CollectResult(files=[FilePayload(path="out", data=b"2")] * 2)


async def test_a_message_has_a_row_with_all_its_stages_in_order(rig: MakeRig) -> None:
    before = time.time_ns() // 1000
    fetched = SourceMessage("t", 0, 5, b"k" * 1000, b"v", (), before // 1000 - 5, consumed_at=before)
    it = rig(Shell("sleep 0.01; cat"), [fetched], debug={})
    await it.committed(6)
    (row,) = (await end(it)).messages
    assert (row["topic"], row["partition"], row["offset"]) == ("t", 0, 5)
    assert (row["key"], row["status"], row["error"]) == (b"k" * 256, "done", None)
    assert (row["tasks"], row["precomputed"], row["attempts"], row["payloads"], row["window"]) == (1, 0, 1, 0, 1)
    assert row["record_at"] == (before // 1000 - 5) * 1000
    stages = [row[f"{stage}_at"] for stage in ("consumed", "arranged", "tasks_done", "resolved", "committed")]
    assert stages == sorted(stages)
    assert row["consumed_at"] == before
    assert row["tasks_done_at"] - row["arranged_at"] >= 10_000
    assert row["committed_at"] <= time.time_ns() // 1000


async def test_payloads_of_tasks_and_messages_are_counted(rig: MakeRig) -> None:
    it = rig(Known(), [message(n) for n in range(3)], debug={}, executor={"window_size": 3})
    await it.committed(3)
    rows = (await end(it)).messages
    assert [row["payloads"] for row in rows] == [3, 3, 3]
    assert [(row["tasks"], row["precomputed"], row["attempts"]) for row in rows] == [(1, 1, 1)] * 3
    assert all(row["tasks_done_at"] == row["arranged_at"] for row in rows)


class KnownLines(Handler[Any, Any]):
    """A known result per message; its value says how many payloads there are of it, and how many tasks it has."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(f"k{m.offset}-{n}", source_offsets=(m.offset,), precomputed=PrecomputedResult(m.value))
            for m in messages
            for n in range(2 if m.value == b"two tasks" else 1)
        ]

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        if result.stdout == "raise":
            raise ValueError("no")
        count = int(result.stdout) if result.stdout.isdigit() else 1
        return CollectResult(files=[FilePayload(path="out", data=b"1")] * count)


@pytest.mark.parametrize(
    "values",
    [
        [b"1", b"1", b"1"],
        [b"3", b"3", b"3"],
        [b"0", b"0", b"0"],
        [b"0", b"1", b"2"],
        [b"1", b"1", b"0"],
        [b"2", b"raise", b"2"],
        [b"1", b"two tasks", b"1"],
    ],
)
async def test_each_message_of_a_window_of_known_results_has_what_is_true_of_it(
    rig: MakeRig, values: list[bytes]
) -> None:
    it = rig(KnownLines(), [message(n, value) for n, value in enumerate(values)], debug={})
    await it.committed(len(values))
    rows = (await end(it)).messages
    tasks = [2 if value == b"two tasks" else 1 for value in values]
    assert [row["tasks"] for row in rows] == [row["precomputed"] for row in rows] == tasks
    assert [row["attempts"] for row in rows] == tasks
    payloads = {b"raise": 0, b"two tasks": 2}
    assert [row["payloads"] for row in rows] == [payloads[each] if each in payloads else int(each) for each in values]
    assert [row["status"] for row in rows] == ["done"] * len(values)
    assert all(row["tasks_done_at"] == row["arranged_at"] for row in rows)


async def test_a_message_without_tasks_and_one_that_is_rejected_have_what_there_is(rig: MakeRig) -> None:
    class Nothing(Handler[Any, Any]):
        accept_tombstones = False

        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return []

    it = rig(Nothing(), [message(0), message(1, None)], debug={})
    await it.committed(2)
    recorded = await end(it)
    first, second = recorded.messages
    assert (first["status"], first["tasks"], first["tasks_done_at"]) == ("done", 0, first["arranged_at"])
    assert (second["status"], second["error"]) == ("rejected", "the handler does not accept tombstones")
    assert (second["window"], second["arranged_at"], second["tasks_done_at"]) == (None, None, None)
    (event,) = recorded.of(EventKind.DEAD_LETTERED)
    assert (event.topic, event.partition, event.offset, event.data["kind"]) == ("t", 0, 1, "tombstone")


async def test_each_try_of_a_task_has_a_row_and_its_failure_an_event_with_secrets_masked(rig: MakeRig) -> None:
    script = f"echo {SECRET} to stdout; echo cannot log in with {SECRET} >&2; exit 3"
    executor = {"max_retries": 1, "retry_backoff": {"initial_seconds": 0.01}}
    it = rig(Shell(script, labels={"run": "a"}), [message(7)], debug={}, executor=executor)
    await it.committed(8)
    recorded = await end(it)
    tries = recorded.tasks
    assert [(row["attempt"], row["kind"], row["exit_code"]) for row in tries] == [(1, "exit", 3), (2, "exit", 3)]
    first = tries[0]
    assert (first["task_id"], first["topic"], first["partition"], first["offsets"]) == ("t(7,)", "t", 0, [7])
    assert (first["labels"], first["slot"], first["input_bytes"]) == ([("run", "a")], 0, 1)
    assert first["queued_at"] <= first["started_at"] <= first["ended_at"]
    assert first["pid"] not in (None, os.getpid())
    assert SECRET not in str(first["args"])
    assert first["error"] == "cannot log in with password=***"
    assert first["stdout"] == b"password=*** to stdout\n"
    assert first["output_bytes"] == len(f"{SECRET} to stdout\ncannot log in with {SECRET}\n")
    (row,) = recorded.messages
    assert (row["status"], row["attempts"], row["error"]) == ("failed", 2, "cannot log in with password=***")
    (retry,), (failed,) = recorded.of(EventKind.TASK_RETRY), recorded.of(EventKind.TASK_FAILED)
    assert (retry.data["attempt"], failed.data["attempt"]) == (1, 2)
    assert (failed.task_id, failed.offset, failed.error_class) == ("t(7,)", 7, "cannot log in with password=***")
    (letter,) = recorded.of(EventKind.DEAD_LETTERED)
    assert letter.error_class == failed.error_class
    assert SECRET not in str(recorded.events)


async def test_a_letter_about_several_messages_marks_each_and_counts_once(rig: MakeRig) -> None:
    class Together(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return [shell("exit 3", *(m.offset for m in messages), task_id="all")]

    executor = {"max_retries": 0, "window_size": 3}
    it = rig(Together(), [message(n) for n in range(3)], debug={}, executor=executor)
    await it.committed(3)
    letters = (await end(it)).of(EventKind.DEAD_LETTERED)
    assert [letter.offset for letter in letters] == [0, 1, 2]
    assert len({letter.data["letter_id"] for letter in letters}) == 1
    assert [bool(letter.error_class) for letter in letters] == [True, False, False]
    assert len({letter.text for letter in letters}) == 1


def test_letters_about_very_many_messages_have_a_bounded_number_of_events() -> None:
    log = EngineEventLog()
    for n in range(20):
        log.add(EventKind.DEAD_LETTERED, f"no {n}", others=[("t", 0, offset) for offset in range(1_000)])
    assert sum(count for _, count in log.take()) <= event_log.MAX_WAITING + 20


async def test_a_row_has_the_offsets_that_a_task_is_for_not_those_that_it_names_in_vain(rig: MakeRig) -> None:
    class Naming(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            named = {"outside": (99,), "one of two": (1, 99), "own": (2,), "all": (), "replaced": (0,)}
            return [
                shell("exit 1" if name == "replaced" else "true", *offsets, task_id=name)
                for name, offsets in named.items()
            ]

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> Any:
            return [shell("true", 2, task_id="replacement")]

    it = rig(Naming(), [message(n) for n in range(3)], debug={}, executor={"window_size": 3})
    await it.committed(3)
    offsets = {row["task_id"]: row["offsets"] for row in (await end(it)).tasks}
    everything = [0, 1, 2]
    assert offsets == {
        "outside": everything,
        "one of two": [1],
        "own": [2],
        "all": everything,
        "replaced": [0],
        "replacement": [0],
    }


async def test_a_task_that_is_replaced_is_named_by_those_that_replace_it(rig: MakeRig) -> None:
    class Replacing(Shell):
        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> Any:
            return [shell("true", task_id="second")] if task.task_id != "second" else ErrorAction.DLQ

    it = rig(Replacing("exit 1"), [message(0)], debug={})
    await it.committed(1)
    recorded = await end(it)
    assert [(row["task_id"], row["kind"], row["parent"]) for row in recorded.tasks] == [
        ("t(0,)", "exit", None),
        ("second", "ok", "t(0,)"),
    ]
    (event,) = recorded.of(EventKind.TASK_REPLACED)
    assert (event.task_id, event.data["tasks"]) == ("t(0,)", 1)
    assert [(row["status"], row["tasks"]) for row in recorded.messages] == [("done", 2)]


async def test_a_program_that_is_missing_is_a_try_without_a_process(rig: MakeRig) -> None:
    class Missing(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return [ExecutorTask("gone", binary_path="/nonexistent/program")]

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction:
            return ErrorAction.SKIP

    it = rig(Missing(), [message(0)], debug={})
    await it.committed(1)
    recorded = await end(it)
    (row,) = recorded.tasks
    assert (row["pid"], row["started_at"], row["kind"]) == (None, None, ErrorKind.MISSING.value)
    assert len(recorded.of(EventKind.TASK_FAILED)) == 1
    assert recorded.messages[0]["status"] == "failed"


async def test_a_known_result_has_a_row_only_with_a_label_or_an_exit_code(rig: MakeRig) -> None:
    class Labelled(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            plain, failed = PrecomputedResult("x"), PrecomputedResult("x", exit_code=2**40)
            return [
                ExecutorTask("plain", precomputed=plain),
                ExecutorTask("labelled", precomputed=plain, labels={"a": "b"}),
                ExecutorTask("failed", precomputed=failed),
            ]

    it = rig(Labelled(), [message(0)], debug={})
    await it.committed(1)
    rows = (await end(it)).tasks
    assert [(row["task_id"], row["pid"], row["slot"]) for row in rows] == [
        ("labelled", None, None),
        ("failed", None, None),
    ]


async def test_output_is_kept_of_slow_and_failed_tasks_only_unless_settings_say_otherwise(rig: MakeRig) -> None:
    for debug, kept in (
        ({}, [False, True]),
        ({"output_min_duration_ms": 0}, [True, True]),
        ({"store_output": False}, [False, False]),
    ):

        class Two(Handler[Any, Any]):
            async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
                return [shell("echo out", task_id="a"), shell("echo out; exit 1", task_id="b")]

            async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction:
                return ErrorAction.SKIP

        it = rig(Two(), [message(0)], debug=debug)
        await it.committed(1)
        rows = sorted((await end(it)).tasks, key=lambda row: row["task_id"])
        assert [row["stdout"] is not None for row in rows] == kept


async def test_input_is_kept_masked_and_cut_only_if_settings_say_so(rig: MakeRig) -> None:
    big = b"first\n" + b"x" * 100_000 + b"\nlast"

    class Three(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            inputs = {"a": SECRET, "b": big, "c": None}
            return [shell("cat; exit 1", task_id=name, stdin=stdin) for name, stdin in inputs.items()]

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction:
            return ErrorAction.SKIP

    for debug, has_output in (({"store_stdin": True, "store_output": False}, False), ({"store_stdin": True}, True)):
        it = rig(Three(), [message(0)], debug=debug)
        await it.committed(1)
        rows = sorted((await end(it)).tasks, key=lambda row: row["task_id"])
        assert rows[0]["stdin"] == b"password=***"
        assert rows[1]["stdin"].startswith(b"first\n")
        assert rows[1]["stdin"].endswith(b"last")
        assert len(rows[1]["stdin"]) <= 64 * 1024
        assert rows[2]["stdin"] == b""
        assert [row["stdout"] is not None for row in rows] == [has_output] * 3
    it = rig(Three(), [message(0)], debug={})
    await it.committed(1)
    assert [row["stdin"] for row in (await end(it)).tasks] == [None] * 3


async def test_slow_tasks_are_logged_at_a_limited_rate(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits())
    structlog.reset_defaults()  # an earlier test may have chosen a level

    class Slow(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return [shell("sleep 0.02", m.offset, task_id=f"slow-{m.offset}") for m in messages]

    with capture_logs() as logs:
        it = rig(Slow(), [message(offset) for offset in range(4)], debug={"log_min_duration_ms": 10})
        await it.committed(4)
        await end(it)
        quiet = rig(Slow(), [message(0)], debug={"log_min_duration_ms": 60_000})
        await quiet.committed(1)
        await end(quiet)
    (line,) = [line for line in logs if line["event"] == "a task was slow"]
    assert (line["log_level"], line["partition"], line["attempt"], line["exit_code"]) == ("info", "t/0", 1, 0)
    assert line["task_id"] == f"slow-{line['offset']}"
    assert line["seconds"] >= 0.01


async def test_fast_tasks_leave_no_row_if_settings_say_so_but_failed_ones_do(rig: MakeRig) -> None:
    class Two(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return [shell("true", task_id="a"), shell("exit 1", task_id="b")]

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction:
            return ErrorAction.SKIP

    it = rig(Two(), [message(0)], debug={"event_min_duration_ms": 600_000})
    await it.committed(1)
    assert [row["task_id"] for row in (await end(it)).tasks] == ["b"]


async def test_texts_that_nobody_expects_are_recorded_without_a_fault(rig: MakeRig) -> None:
    class Strange(Handler[Any, Any]):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            return [
                ExecutorTask(
                    "id \ud800" + "x" * 100_000,
                    ("--token", "hunter2", "a" * 50_000, "nul \0", "\udcff", SECRET),
                    binary_path="/bin/true",
                    labels={"\ud800": "\udc00" * 9000},
                )
            ]

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> Any:
            raise ValueError(f"\ud800 {SECRET}")

    huge = SourceMessage("t", 0, 0, b"k" * 1_000_000, b"v" * 1_000_000)
    it = rig(Strange(), [huge], debug={})
    await it.committed(1)
    recorded = await end(it)
    (row,) = recorded.tasks
    assert row["task_id"].startswith("id \\ud800xx")
    assert SECRET not in str(recorded.rows) + str(recorded.events)
    assert row["args"][:2] == ["--token", "***"]
    assert all(len(body) < MAX_BODY_BYTES for body in recorded.bodies)
    assert recorded.messages[0]["key"] == b"k" * 256
    assert it.recorder is not None
    assert it.recorder.frames.dropped == 0


async def test_assignments_stops_of_partitions_and_runs_of_periodic_hooks_are_events(rig: MakeRig) -> None:
    class Ticking(Known):
        runs = 0

        @periodic(0.01)
        async def tick(self) -> None:
            self.runs += 1
            if self.runs == 2:
                raise ValueError(f"no {SECRET}")

    handler = Ticking()
    it = rig(handler, [message(0)], debug={})
    await it.until(lambda: handler.runs > 2)
    it.engine.on_lost([("t", 0)])
    recorded = await end(it)
    assert [event.partition for event in recorded.of(EventKind.ASSIGNED)] == [0]
    assert [(event.partition, event.text) for event in recorded.of(EventKind.REVOKED)] == [(0, "lost to the group")]
    runs = recorded.of(EventKind.PERIODIC_RUN)
    assert {event.data["hook"] for event in runs} == {"tick"}
    assert [event.text for event in runs if event.text] == ["ValueError: no password=***"]


async def test_what_sinks_refuse_and_hooks_skip_is_told_with_the_next_beat(rig: MakeRig) -> None:
    class Skipping(Known):
        async def on_delivery_error(self, error: Any) -> DeliveryAction:
            return DeliveryAction.SKIP

    it = rig(Skipping(), [message(0)], debug={})
    it.files.refuse = lambda payload: Refusal(f"no {SECRET}", retryable=False)
    await it.committed(1)
    it.engine.beat(whole=True)
    it.engine.beat(whole=False)
    recorded = await end(it)
    errors, skipped = recorded.of(EventKind.SINK_ERROR), recorded.of(EventKind.SINK_SKIPPED)
    assert {(error.sink, error.text) for error in errors} == {("sinks.filesystem.files", "no password=***")}
    assert sum(int(error.data["payloads"]) for error in errors) == 3
    assert [event.data for event in skipped] == [{"count": 3}]


async def test_commits_that_are_not_known_yet_are_left_empty(rig: MakeRig) -> None:
    it = rig(Known(), [message(0)], debug={})
    it.source.hold_commits = True
    assert it.recorder is not None
    recorder = it.recorder
    await it.until(lambda: it.engine.counters.messages_done == 1)
    it.engine.context.finished.flush()  # type: ignore[union-attr]
    await recorder.close()
    (row,) = Recorded(recorder).messages
    assert row["committed_at"] is None


# -- the recorder by itself ------------------------------------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def settings_of(**values: Any) -> Any:
    from tidemill.config.sections.debug_settings import DebugSettings

    return DebugSettings(**values)


def batch(*offsets: int, key: Callable[[int], bytes] = lambda n: b"%d" % n) -> FinishedBatch:
    messages = [SourceMessage("t", 0, n, key(n)) for n in offsets]
    return make_batch(messages, resolved_ns=time.time_ns())


def test_rows_wait_for_their_commits_but_for_little_more_than_a_second() -> None:
    clock = Clock()
    recorder = EngineRecorder(settings_of(), clock)
    recorder.take(batch(0))
    clock.now += 1.2
    recorder.take(batch(1))
    recorder.look({}, [])
    assert Recorded(recorder).messages == []
    clock.now += 0.2
    recorder.note_committed(("t", 0), 1)
    recorder.look({}, [])
    (row,) = Recorded(recorder).messages
    assert (row["offset"], row["committed_at"] is not None) == (0, True)
    clock.now += 1.2
    recorder.look({}, [])
    assert [row["offset"] for row in Recorded(recorder).messages] == [1]


def test_keys_are_cut_and_an_empty_one_is_not_a_missing_one() -> None:
    recorder = EngineRecorder(settings_of(), Clock())
    keys = [b"", b"k" * 256, bytes(range(256)) + b"cut", b"\xff\0"]
    recorder.take(make_batch([SourceMessage("t", 0, n) for n in range(2)]))
    recorder.take(make_batch([SourceMessage("t", 0, 2 + n, key) for n, key in enumerate([*keys, None])]))
    recorder.take(make_batch([SourceMessage("t", 0, 7 + n, b"") for n in range(2)]))
    recorder._pack_messages(float("inf"), at_once=True)
    found = [row["key"] for row in Recorded(recorder).messages]
    assert found == [None, None, *(key[:256] for key in keys), None, b"", b""]


def test_a_batch_that_is_too_large_is_split_into_bodies_that_are_complete_by_themselves() -> None:
    recorder = EngineRecorder(settings_of(), Clock())
    recorder.take(batch(*range(5000), key=lambda n: os.urandom(256)))
    recorder._pack_messages(float("inf"), at_once=True)
    bodies, offsets = [], []
    while (frame := recorder.frames.take_next()) is not None:
        bodies.append(len(frame.body))
        offsets += [row["offset"] for row in decode_rows(RowTable.MESSAGES, frame.body).to_pylist()]
        recorder.frames.note_stored(frame.seq)
    assert offsets == list(range(5000))
    assert len(bodies) > 5
    assert max(bodies) <= MAX_BODY_BYTES


def test_arguments_of_some_tasks_are_not_sent_with_all_others() -> None:
    recorder = EngineRecorder(settings_of(), Clock())
    owner, args = SimpleNamespace(topic_partition=("t", 0)), [str(n) for n in range(300)]
    for n in range(6000):
        task = ExecutorTask(f"t{n}", args if n % 3000 < 200 else [])
        run = make_run(task, owner, named_offsets=(n,), ended_at=n)
        recorder.note_attempt(run, ProcessOutcome(0, b"", b"", 0.1, 1, None, None))
    recorder._pack_tasks(at_once=True)
    rows, sizes = [], []
    while (frame := recorder.frames.take_next()) is not None:
        sizes.append(len(frame.body))
        rows += decode_rows(RowTable.TASKS, frame.body).to_pylist()
        recorder.frames.note_stored(frame.seq)
    assert [row["task_id"] for row in rows] == [f"t{n}" for n in range(6000)]
    assert [len(row["args"]) for row in rows] == [300 * (n % 3000 < 200) for n in range(6000)]
    assert max(sizes) <= MAX_BODY_BYTES
    assert len(sizes) < 50


class Two(Handler[Any, Any]):
    """Two tasks for each message."""

    async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(f"{m.offset}-{n}", binary_path="/bin/true", source_offsets=[m.offset])
            for m in messages
            for n in "ab"
        ]


async def test_the_rows_that_a_driver_is_told_of_are_stored_or_on_their_way(rig: MakeRig) -> None:
    it = rig(Two(), [message(n) for n in range(20)], debug={})
    await it.committed(20)
    recorder = it.recorder
    assert recorder is not None
    recorder.note_kept()
    assert it.engine.progress().recorder_rows == 60, "those of messages that are collected, too"
    recorder._lose_task(ValueError("a task that cannot be recorded"))
    recorder.frames.lose(1)
    assert it.engine.progress().recorder_rows == 59
    recorded = await end(it)
    assert len(recorded.messages) + len(recorded.tasks) == 60


def test_rows_that_have_to_make_room_are_counted_and_that_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "_LIMITS", log_module._Limits())
    recorder = EngineRecorder(settings_of(max_buffer_bytes=200_000), Clock())
    with capture_logs() as logs:
        for start in range(0, 6000, 1000):
            recorder.take(batch(*range(start, start + 1000), key=lambda n: os.urandom(64)))
            recorder._pack_messages(float("inf"), at_once=True)
    kept = len(Recorded(recorder).messages)
    assert 0 < kept < 6000
    assert recorder.frames.dropped == 6000 - kept
    (line,) = logs
    assert line["event"] == "rows and events are lost: the driver stores them more slowly than they arrive"


def test_a_time_of_a_record_that_does_not_fit_is_omitted() -> None:
    recorder, odd = EngineRecorder(settings_of(), Clock()), batch(*range(1000))
    odd.record_at[7] = 2**62
    recorder.take(odd)
    recorder._pack_messages(float("inf"), at_once=True)
    rows = Recorded(recorder).messages
    assert (len(rows), rows[7]["record_at"]) == (1000, None)


def test_messages_that_cannot_be_recorded_are_counted_and_hold_up_nothing() -> None:
    recorder, spoiled = EngineRecorder(settings_of(), Clock()), batch(*range(1000))
    spoiled.offsets[7] = 2**70
    recorder.take(spoiled)
    assert recorder.frames.dropped == 1000
    recorder.take(batch(1))
    recorder._pack_messages(float("inf"), at_once=True)
    assert [row["offset"] for row in Recorded(recorder).messages] == [1]


async def test_a_clock_that_is_set_back_holds_up_nothing_and_loses_nothing(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, back = time.time_ns, 0
    monkeypatch.setattr(time, "time_ns", lambda: real() - back)
    it = rig(Shell(), [message(0)], debug={})
    await it.committed(1)
    back = 3_600_000_000_000
    it.source.feed(message(1))
    await it.committed(2)
    assert it.recorder is not None
    it.engine.context.finished.flush()  # type: ignore[union-attr]
    recorded = await end(it)
    assert [row["offset"] for row in recorded.messages] == [0, 1]
    assert len(recorded.tasks) == 2
    assert all(row["committed_at"] is not None for row in recorded.messages)


async def test_many_rows_are_packed_on_a_thread_and_the_rest_at_the_end() -> None:
    recorder, threads = EngineRecorder(settings_of(), Clock()), set()
    recorder._encode = lambda table, rows: threads.add(threading.get_ident()) or [(b"x", rows.num_rows)]  # type: ignore
    for start in range(0, 30_000, 1000):
        recorder.take(batch(*range(start, start + 1000)))
    recorder._pack_messages(float("inf"))
    await until(lambda: not recorder.frames.is_empty)
    assert threading.get_ident() not in threads
    recorder.take(batch(30_000))
    await recorder.close()
    counts = []
    while (frame := recorder.frames.take_next()) is not None:
        counts.append(frame.count)
    assert counts == [30_000, 1]


async def test_a_stop_that_cannot_wait_loses_what_a_thread_packs_and_nothing_else() -> None:
    recorder, goes_on = EngineRecorder(settings_of(), Clock()), threading.Event()
    faults: list[str] = []
    recorder.tasks = EngineTasks(faults.append)
    encode = recorder._encode
    recorder._encode = lambda table, rows: (rows.num_rows < 5000 or goes_on.wait(30)) and encode(table, rows)  # type: ignore
    try:
        recorder.take(batch(*range(5000)))
        recorder._pack_messages(float("inf"))
        recorder.take(batch(5000))
        recorder.events.add(EventKind.ACTION, "x")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await asyncio.gather(recorder.close(), return_exceptions=True)
        await until(lambda: recorder.frames.dropped)
    finally:
        goes_on.set()
    recorded = Recorded(recorder)
    assert [row["offset"] for row in recorded.messages] == [5000]
    assert [event.kind for event in recorded.events] == [EventKind.ACTION]
    assert (recorder.frames.dropped, faults) == (5000, [])


def make_run(task: ExecutorTask, owner: Any, **values: Any) -> TaskInFlight:
    """Return a task that was tried, with these attributes."""
    run = TaskInFlight(task, owner, 0.0)
    for name, value in ({"slot": 0, "attempts": 1} | values).items():
        setattr(run, name, value)
    return run


def add_output(recorder: EngineRecorder, size: int) -> None:
    """Record a task that failed and wrote this much."""
    task = ExecutorTask("t", binary_path="/bin/x")
    owner = SimpleNamespace(topic_partition=("t", 0), find_task_offsets=lambda run: [1])
    run = make_run(task, owner, named_offsets=(), ended_at=1)
    recorder.note_attempt(run, ProcessOutcome(1, b"x" * size, b"", 0.1, 1, ErrorKind.EXIT, None))


async def test_output_is_masked_on_a_thread_and_left_out_where_there_is_no_time_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, size = EngineRecorder(settings_of(), Clock()), recorder_module.MAX_OUTPUT_ON_LOOP + 1
    masked_on: list[int] = []

    def mask(data: bytes) -> bytes:
        masked_on.append(threading.get_ident())
        return data

    monkeypatch.setattr(task_rows, "mask_stream", mask)
    add_output(recorder, size)
    recorder._pack_tasks(at_once=True)
    assert masked_on == []
    add_output(recorder, size)
    await recorder.close()
    assert masked_on
    assert threading.get_ident() not in masked_on
    assert [row["stdout"] for row in Recorded(recorder).tasks] == [None, b"x" * size]


def test_rows_of_many_tasks_come_in_order_and_whole_with_and_without_output_among_them() -> None:
    recorder, count = EngineRecorder(settings_of(), Clock()), 2 * task_rows.BLOCK_ROWS + 7
    failing = {3, count - 1}
    for n in range(count):
        labels, args = ({"n": str(n)}, ("-x", str(n))) if n % 3 == 0 else ({}, ())
        parent = f"p{n}" if n % 5 == 0 else None
        task = ExecutorTask(f"t{n}", args, stdin="é" * n, labels=labels, parent_task_id=parent)
        offsets = list(range(n, n + n % 4))
        owner = SimpleNamespace(
            topic_partition=("t", (offsets and 1) or 0), find_task_offsets=lambda run, offsets=offsets: offsets
        )
        run = make_run(task, owner, named_offsets=offsets, slot=n, attempts=n, ended_at=n, input_bytes=2 * n)
        kind = ErrorKind.EXIT if n in failing else None
        recorder.note_attempt(run, ProcessOutcome(int(n in failing), b"out", b"", 0.0, n, kind, None))
    recorder._pack_tasks(at_once=True)
    rows = Recorded(recorder).tasks
    assert [row["task_id"] for row in rows] == [f"t{n}" for n in range(count)]
    for n, row in enumerate(rows):
        offsets, failed = list(range(n, n + n % 4)), n in failing
        assert (row["topic"], row["partition"], row["offsets"]) == ("t", 1 if offsets else 0, offsets)
        assert (row["args"], row["labels"]) == ((["-x", str(n)], [("n", str(n))]) if n % 3 == 0 else ([], []))
        assert (row["slot"], row["pid"], row["attempt"], row["ended_at"], row["started_at"]) == (n, n, n, n, n)
        assert (row["input_bytes"], row["output_bytes"]) == (2 * n, 3)
        assert (row["kind"], row["exit_code"], row["stdout"]) == (("exit", 1, b"out") if failed else ("ok", 0, None))
        assert row["parent"] == (f"p{n}" if n % 5 == 0 else None)


def test_a_row_of_a_task_that_no_column_holds_is_counted_with_those_it_is_packed_with() -> None:
    recorder, count = EngineRecorder(settings_of(), Clock()), task_rows.BLOCK_ROWS
    for n in range(count):
        owner = SimpleNamespace(topic_partition=("t", 0))
        run = make_run(ExecutorTask("t"), owner, named_offsets=[2**70], ended_at=n)
        recorder.note_attempt(run, ProcessOutcome(0, b"", b"", 0.0, 1, None, None))
    assert recorder.frames.dropped == 0
    recorder._pack_tasks(at_once=True)
    assert (recorder.frames.dropped, Recorded(recorder).tasks) == (count, [])


async def test_memory_is_bounded_when_no_beat_ever_comes() -> None:
    recorder = EngineRecorder(settings_of(max_buffer_bytes=200_000), Clock())
    for start in range(0, 200_000, 1000):
        recorder.take(batch(*range(start, start + 1000), key=lambda n: os.urandom(16)))
    assert recorder._messages.size < 4 * recorder_module.MAX_ROWS
    assert recorder.frames.size_bytes <= 200_000
    assert recorder.frames.dropped > 0


def test_rows_that_cannot_be_packed_are_counted_and_hold_up_nothing() -> None:
    recorder = EngineRecorder(settings_of(), Clock())
    recorder.take(batch(0))
    del recorder._messages._blocks[0].parts["key"]
    recorder._pack_messages(float("inf"), at_once=True)
    assert recorder.frames.dropped == 1
    recorder.take(batch(1))
    recorder._pack_messages(float("inf"), at_once=True)
    assert [row["offset"] for row in Recorded(recorder).messages] == [1]


def test_ten_thousand_failures_a_second_are_sampled_and_their_counts_exact() -> None:
    clock = Clock()
    log = EngineEventLog(clock)
    for n in range(10_000):
        log.add(EventKind.TASK_FAILED, f"no user {n:06d}" if n % 4 else SECRET, partition=("t", 0), offset=n)
    log.add(EventKind.ASSIGNED, partition=("t", 0))
    events: list[RecordedEvent] = []

    def take(*, last: bool = False) -> None:
        for body, _ in log.take(last=last):
            assert len(body) <= MAX_BODY_BYTES + 1000
            events.extend(msgspec.msgpack.decode(body, type=list[RecordedEvent]))

    take()
    assert len(events) == MAX_PER_SECOND + 1, "the flood leaves room for what is rare"
    clock.now += 1
    take()
    counts: Counter[str] = Counter()
    for event in events:
        if event.kind is EventKind.TASK_FAILED:
            counts[event.error_class] += int(event.data.get("count", 1))
    assert counts == {"no user #": 7500, "password=***": 2500}
    assert SECRET not in str(events)


def test_a_long_pause_is_an_event_and_its_end() -> None:
    clock = Clock()
    recorder = EngineRecorder(settings_of(), clock)
    for held in (["a/b/7"], ["a/b/7"], [], []):
        recorder.look({}, held)
        clock.now += recorder_module.PAUSED_SECONDS
    events = Recorded(recorder).events
    assert [(event.kind, event.topic, event.partition) for event in events] == [
        (EventKind.PAUSED, "a/b", 7),
        (EventKind.RESUMED, "a/b", 7),
    ]


def test_without_events_only_rows_go_out() -> None:
    recorder = EngineRecorder(settings_of(store_events=False), Clock())
    recorder.events.add(EventKind.ACTION, "x")
    recorder.look({}, [])
    assert recorder.frames.is_empty


@pytest.mark.parametrize("size", [0, 10, MAX_STREAM_BYTES, MAX_STREAM_BYTES + 1, 10_000_000])
def test_of_a_long_stream_the_beginning_and_the_end_are_kept(size: int) -> None:
    data = b"a" * (size // 2) + b"z" * (size - size // 2)
    cut = cut_stream(data)
    assert len(cut) <= MAX_STREAM_BYTES
    assert cut == data or (cut.startswith(b"aaa") and cut.endswith(b"zzz") and b"omitted" in cut)


def test_no_half_of_a_secret_is_left_where_a_long_stream_is_cut() -> None:
    for size in range(len(SECRET) + 2):
        lines = f"{SECRET}\n".encode() * 10_000 + b"." * size
        assert b"hunter" not in mask_stream(cut_stream(lines))
        assert b"unter2" not in mask_stream(cut_stream(lines))


@pytest.mark.parametrize("blank", [b"", b" "])
def test_a_document_in_one_line_is_cut_where_no_half_of_a_secret_is_left(blank: bytes) -> None:
    item = b'{"password":' + blank + b'"hunter2hunter2"},' + blank
    for shift in range(len(item)):
        data = b"[" + b"x" * shift + item * (3 * MAX_STREAM_BYTES // len(item)) + b"]"
        cut = mask_stream(cut_stream(data))
        assert len(cut) <= MAX_STREAM_BYTES
        assert b"hunt" not in cut
        assert b"ter2" not in cut


def test_masking_leaves_what_is_not_text_as_it_is() -> None:
    assert mask_stream(b"\xff\xfe token=abc \x00") == b"\xff\xfe token=*** \x00"


async def test_a_blocked_loop_is_an_event_with_its_hook(rig: MakeRig) -> None:
    class Blocking(Known):
        async def arrange(self, messages: Any, pending: Any) -> list[ExecutorTask]:
            time.sleep(0.3)
            return await super().arrange(messages, pending)

    it = rig(Blocking(), [message(0)], debug={}, executor={"block_seconds": 0.05})
    await it.committed(1)
    assert it.recorder is not None
    await until(lambda: it.recorder is not None and it.recorder.events._events)
    (event, *_) = (await end(it)).of(EventKind.LOOP_BLOCK)
    assert event.data["hook"] == "arrange"
