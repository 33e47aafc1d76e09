"""Probes of a running engine: what they tell, what they leave behind (nothing), and how they end."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.pipeline.conftest import Rig, message
from tests.until import until

from tidemill.core.errors import UserActionError
from tidemill.core.recorder.outgoing import OutgoingFrames
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import (
    ErrorAction,
    ExecutorError,
    ExecutorResult,
    ExecutorTask,
    MessageGroup,
    PendingContext,
    PrecomputedResult,
)
from tidemill.pipeline.probing import report, texts
from tidemill.pipeline.probing.prober import Prober
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.probe_report import PROBE_SECONDS, ProbeReport, ProbeStatus
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload

MakeRig = Callable[..., Rig]
DEBUG = {"enabled": True, "db_dir": ""}
SECRET = "hunter2-the-secret"
#: Longer than any test waits.
LONG = 25.0


class Cat(Handler[Any, Any]):
    """A task for each message, which repeats it; one payload for each task."""

    async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
        return [self.make_task(each) for each in messages]

    def make_task(self, each: SourceMessage) -> ExecutorTask:
        return ExecutorTask(
            f"t-{each.offset}", source_offsets=[each.offset], stdin=each.value or b"", binary_path="cat"
        )

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
        return CollectResult(kafka=[KafkaPayload(data={"said": result.stdout, "password": SECRET})])


async def start(rig: MakeRig, handler: Handler[Any, Any], **config: Any) -> tuple[Rig, Prober]:
    made = rig(handler, [], **{"debug": DEBUG, **config})
    await made.until(lambda: made.engine._subscribed)
    assert made.engine.prober is not None
    return made, made.engine.prober


def snapshot(rig: Rig) -> Any:
    """Return all that an engine counts and reports, without times."""
    progress = rig.engine.progress()
    return msgspec.structs.replace(progress, cpu_seconds=0.0, rss_bytes=0, loop_lags=progress.loop_lags.__class__())


async def test_a_probe_goes_through_all_steps_and_tells_what_sinks_would_get(rig: MakeRig) -> None:
    class Whole(Cat):
        async def on_message_complete(self, group: MessageGroup) -> CollectResult | None:
            return CollectResult(files=[FilePayload(path="a.txt", data="x")])

    _, probing = await start(rig, Whole())
    found = await probing.probe(message(7, b"hello"), LONG)
    assert (found.status, found.text) == (ProbeStatus.DONE, "1 task, 2 payloads for 2 sinks")
    assert [stage.hook for stage in found.stages] == [
        "deserialize_message",
        "arrange",
        "on_task_complete",
        "on_message_complete",
    ]
    assert [stage.about for stage in found.stages] == ["", "", "t-7", ""]
    assert all(stage.seconds is not None and stage.seconds >= 0 and not stage.trace.text for stage in found.stages)
    assert [stage.at for stage in found.stages] == sorted(stage.at for stage in found.stages)
    (task,) = found.tasks
    assert (task.task_id, task.state, task.is_precomputed) == ("t-7", "ok", False)
    (attempt,) = task.attempts
    assert (attempt.attempt, attempt.kind, attempt.exit_code, attempt.stdout.text) == (1, "ok", 0, "hello")
    assert attempt.pid is not None
    assert found.sinks == {"sinks.kafka.kafka": 1, "sinks.filesystem.files": 1}
    first, second = found.payloads
    assert (first.sink, first.hook, first.task_id) == ("sinks.kafka.kafka", "on_task_complete", "t-7")
    assert (second.sink, second.hook, second.task_id) == ("sinks.filesystem.files", "on_message_complete", "")
    assert msgspec.json.decode(first.body.text)["data"] == {"said": "hello", "password": "***"}
    assert found.letters == []
    assert found.left_out == 0


async def test_a_probe_leaves_nothing_behind(rig: MakeRig, tmp_path: Path) -> None:
    class Keeping(Cat):
        async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
            assert pending.pending_tasks == ()
            self.cache.set("seen", messages[0].offset)
            self.cache.delete("old")
            self.count = getattr(self, "count", 0) + 1
            assert (await self.cache.get("seen"), self.cache.peek("old", 5), "old" in self.cache) == (7, 5, False)
            assert await self.cache.get("other") == "kept"
            return await super().arrange(messages, pending)

        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            raise ValueError(f"no {SECRET}: password={SECRET}")

    made, probing = await start(rig, handler := Keeping(), cache={"enabled": True, "path": str(tmp_path)})
    handler.cache.set("old", 1)
    handler.cache.set("other", "kept")
    await made.settled()
    before = snapshot(made)
    found = await probing.probe(message(7), LONG)
    await made.settled()
    assert (found.status, found.cache_writes) == (ProbeStatus.FAILED, 2)
    assert snapshot(made) == before
    assert (made.source.commits, made.letters.letters) == ([], [])
    assert [sink.payloads for named in made.sinks.values() for sink in named.values()] == [[], []]  # type: ignore[attr-defined]
    assert (handler.cache.peek("seen"), handler.cache.peek("old")) == (None, 1)
    assert "count" not in handler.__dict__
    assert made.engine.context.slowest.list_tasks() == []
    records = made.engine.records
    assert isinstance(records, OutgoingFrames)
    made.engine.beat(whole=True)
    await made.end()
    assert not [frame for frame in list_frames(records) if frame != "events"], "no row"


def list_frames(records: OutgoingFrames) -> list[str]:
    found = []
    while (frame := records.take_next()) is not None:
        found.append(str(frame.table))
    return found


async def test_a_hook_that_raises_is_told_with_its_traceback_and_without_secrets(rig: MakeRig) -> None:
    class Raising(Cat):
        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            raise ValueError(f"cannot use postgres://app:{SECRET}@db/x")

    _, probing = await start(rig, Raising())
    found = await probing.probe(message(7), LONG)
    assert (found.status, found.text) == (ProbeStatus.FAILED, "it would have written 1 dead letter")
    trace = found.stages[-1].trace.text
    assert trace.startswith("ValueError: cannot use postgres://***@db/x")
    assert "test_prober.py" in trace
    assert "in on_task_complete: raise ValueError" in trace
    (letter,) = found.letters
    assert (letter.kind, letter.task_id) == ("hook", "t-7")
    assert SECRET not in msgspec.json.encode(found).decode()


@pytest.mark.parametrize(
    ("hook", "kind"), [("deserialize_message", "parse"), ("arrange", "arrange"), ("on_message_complete", "hook")]
)
async def test_each_hook_that_raises_ends_in_the_letter_that_a_message_would_have(
    rig: MakeRig, hook: str, kind: str
) -> None:
    class Raising(Cat):
        pass

    def fail_at_once(self: Raising, given: Any) -> Any:
        raise RuntimeError("broken")

    async def fail(self: Raising, *given: Any) -> Any:
        raise RuntimeError("broken")

    setattr(Raising, hook, fail_at_once if hook == "deserialize_message" else fail)
    made, probing = await start(rig, Raising())
    found = await probing.probe(message(7), LONG)
    assert [(letter.kind, "broken" in letter.error.text) for letter in found.letters] == [(kind, True)]
    assert found.stages[-1].hook == hook
    assert found.stages[-1].trace.text.startswith("RuntimeError: broken")
    assert made.letters.letters == []


async def test_what_a_hook_returns_wrongly_is_told(rig: MakeRig) -> None:
    class Wrong(Cat):
        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            return CollectResult(kafka=[KafkaPayload(data={}, sink="nowhere")])

    _, probing = await start(rig, Wrong())
    found = await probing.probe(message(7), LONG)
    assert "sinks.kafka.nowhere is not configured" in found.letters[0].error.text
    assert found.payloads == []


async def test_a_tombstone_and_a_passed_parse_error_are_what_they_are_for_the_engine(rig: MakeRig) -> None:
    class Picky(Cat):
        accept_tombstones = False

        def deserialize_message(self, message: SourceMessage) -> Any:
            raise ValueError("no JSON")

        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("t", precomputed=PrecomputedResult(stdout=str(each.parse_error)))

    _, probing = await start(rig, Picky(), kafka={"on_parse_error": "pass"})
    assert [letter.kind for letter in (await probing.probe(message(7, None), LONG)).letters] == ["tombstone"]
    found = await probing.probe(message(7), LONG)
    assert found.status is ProbeStatus.DONE
    assert [(task.state, task.is_precomputed, task.attempts) for task in found.tasks] == [("ok", True, [])]
    assert "ValueError: no JSON" in found.payloads[0].body.text


async def test_attempts_replacements_and_windows_are_told(rig: MakeRig) -> None:
    class Replacing(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("bad", args=["-c", "echo no >&2; exit 3"], binary_path="sh", labels={"kind": "x"})

        async def on_error(self, task: ExecutorTask, error: ExecutorError) -> ErrorAction | list[ExecutorTask]:
            if self.tries < 1:
                self.tries += 1
                return ErrorAction.RETRY
            return [ExecutorTask("good", binary_path="true")]

        tries = 0

        async def on_window_complete(self, results: Any, messages: Any) -> CollectResult | None:
            return CollectResult(kafka=[KafkaPayload(data={"of": "window"})])

    _, probing = await start(rig, Replacing(), executor={"retry_backoff": {"initial_seconds": 0.01}})
    found = await probing.probe(message(7), LONG)
    assert found.status is ProbeStatus.DONE
    assert [(task.task_id, task.parent, task.state) for task in found.tasks] == [
        ("bad", "", "replaced"),
        ("good", "bad", "ok"),
    ]
    assert [(each.attempt, each.kind, each.exit_code, each.stderr.text) for each in found.tasks[0].attempts] == [
        (1, "exit", 3, "no\n"),
        (2, "exit", 3, "no\n"),
    ]
    assert found.tasks[0].labels == {"kind": "x"}
    assert [stage.hook for stage in found.stages if stage.hook.startswith("on_")] == [
        "on_error",
        "on_error",
        "on_task_complete",
        "on_window_complete",
    ]
    assert [payload.hook for payload in found.payloads] == ["on_task_complete", "on_window_complete"]


@pytest.mark.parametrize(
    "executor",
    [{"order_by": "key"}, {"commit": "window"}, {"max_failure_ratio": 0.1}, {"order_by": "key", "max_executors": 1}],
)
@pytest.mark.parametrize("fails", [False, True])
async def test_a_probe_ends_whatever_the_engine_waits_for(rig: MakeRig, executor: dict[str, Any], fails: bool) -> None:
    class Hooked(Cat):
        async def on_message_complete(self, group: MessageGroup) -> CollectResult | None:
            return CollectResult(kafka=[KafkaPayload(data={"of": "message"})])

        async def on_window_complete(self, results: Any, messages: Any) -> CollectResult | None:
            if fails:
                raise ValueError("broken")
            return CollectResult(kafka=[KafkaPayload(data={"of": "window"})])

    made, probing = await start(rig, Hooked(), executor=executor)
    found = await probing.probe(SourceMessage("t", 0, 7, b"key", b"x"), LONG)
    assert found.status is (ProbeStatus.FAILED if fails else ProbeStatus.DONE), found
    assert found.sinks == {"sinks.kafka.kafka": 2 if fails else 3}
    assert made.engine.brake is None or made.engine.brake.describe_wait() is None
    assert (await made.end()).error is None


async def test_a_hook_that_never_returns_is_ended_with_the_time_and_named_with_its_place(rig: MakeRig) -> None:
    ended: list[str] = []

    class Hanging(Cat):
        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            try:
                await self.wait_for_good()
            finally:
                ended.append("ended")
            return None

        async def wait_for_good(self) -> None:
            await asyncio.Event().wait()

    made, probing = await start(rig, Hanging())
    found = await probing.probe(message(7), 0.5)
    assert found.status is ProbeStatus.UNFINISHED
    assert found.text == "it did not end within 0.5 s: on_task_complete has not returned"
    last = found.stages[-1]
    assert (last.hook, last.seconds) == ("on_task_complete", None)
    assert "in wait_for_good" in last.trace.text
    assert [task.state for task in found.tasks] == ["hook"]
    assert ended == ["ended"]
    assert (await probing.probe(message(7), 0.1)).status is ProbeStatus.UNFINISHED, "another probe may begin"
    assert (await made.end()).error is None


async def test_a_hook_that_does_not_let_itself_be_cancelled_keeps_others_from_beginning(
    rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.pipeline.probing.probe_run.HOOK_SECONDS", 0.05)
    gate = asyncio.Event()

    class Stubborn(Cat):
        async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
            while not gate.is_set():
                try:
                    await gate.wait()
                except asyncio.CancelledError:
                    pass
            return []

    made, probing = await start(rig, Stubborn())
    assert (await probing.probe(message(7), 0.05)).status is ProbeStatus.UNFINISHED
    with pytest.raises(UserActionError, match="restart the engine"):
        await probing.probe(message(7), LONG)
    gate.set()
    left = probing._left
    assert left is not None
    await made.until(left.done)
    assert (await probing.probe(message(7), LONG)).status is ProbeStatus.DONE
    assert (await made.end()).error is None


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_task_that_hangs_is_told_and_its_process_ended(rig: MakeRig) -> None:
    class Sleeping(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("sleeper", args=["300"], binary_path="sleep")

    made, probing = await start(rig, Sleeping())
    found = await probing.probe(message(7), 0.5)
    assert found.text.endswith(": task sleeper is running")
    (task,) = found.tasks
    assert task.state == "running"
    (attempt,) = task.attempts
    assert (attempt.kind, attempt.seconds, attempt.exit_code) == ("", None, None)
    assert attempt.pid is not None
    assert not is_alive(attempt.pid)
    assert made.engine.context.pool.statistics().running == 0


async def test_a_task_that_ignores_sigterm_is_killed(rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.pipeline.probing.probe_run.GRACE_SECONDS", 0.1)

    class Deaf(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            script = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"
            return ExecutorTask("deaf", args=["-c", script], binary_path=sys.executable)

    _, probing = await start(rig, Deaf())
    found = await probing.probe(message(7), 1.0)
    pid = found.tasks[0].attempts[0].pid
    assert pid is not None
    assert not is_alive(pid)


async def test_a_resident_program_of_a_probe_ends_with_it(rig: MakeRig, tmp_path: Path) -> None:
    program = tmp_path / "resident"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json, os, sys\n"
        "for line in sys.stdin:\n"
        "    request = json.loads(line)\n"
        "    print(json.dumps({'id': request['id'], 'exit_code': 0, 'stdout': str(os.getpid())}), flush=True)\n"
    )
    program.chmod(0o755)

    class Resident(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("t", args=["x"])

    executor = {"mode": "resident", "binary_path": str(program), "resident": {"framing": "json"}}
    _, probing = await start(rig, Resident(), executor=executor)
    found = await probing.probe(message(7), LONG)
    assert found.status is ProbeStatus.DONE, found
    pid = int(found.tasks[0].attempts[0].stdout.text)
    await until(lambda: not is_alive(pid))


async def test_one_message_is_probed_at_a_time(rig: MakeRig) -> None:
    gate = asyncio.Event()

    class Waiting(Cat):
        async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
            await gate.wait()
            return []

    _, probing = await start(rig, Waiting())
    first = asyncio.ensure_future(probing.probe(message(7), LONG))
    await asyncio.sleep(0)
    with pytest.raises(UserActionError, match="another message is being probed"):
        await probing.probe(message(8), LONG)
    gate.set()
    assert (await first).status is ProbeStatus.DONE
    assert (await probing.probe(message(8), LONG)).text == "0 tasks, no payload"


async def test_a_drain_ends_a_probe_and_none_begins_after_it(rig: MakeRig) -> None:
    class Sleeping(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("sleeper", args=["300"], binary_path="sleep")

    made, probing = await start(rig, Sleeping())
    running = asyncio.ensure_future(probing.probe(message(7), LONG))
    await made.until(is_anybody_sleeping)
    summary = await made.end()
    assert summary.error is None
    found = await running
    assert (found.status, found.text) == (ProbeStatus.UNFINISHED, "the engine is stopping: task sleeper is running")
    pid = found.tasks[0].attempts[0].pid
    assert pid is not None
    assert not is_alive(pid)
    with pytest.raises(UserActionError, match="it is draining"):
        await probing.probe(message(7), LONG)


def is_anybody_sleeping() -> bool:
    """Tell whether a child of this process sleeps, as the task of a probe does."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return any(b"sleep\x00300" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)


async def test_an_engine_that_starts_probes_nothing(rig: MakeRig) -> None:
    gate = asyncio.Event()

    class Slow(Cat):
        async def on_ready(self, config: Any, sinks: Any) -> None:
            await gate.wait()

    made = rig(Slow(), [], debug=DEBUG)
    assert made.engine.prober is not None
    with pytest.raises(UserActionError, match="on_ready has not returned"):
        await made.engine.prober.probe(message(7), LONG)
    gate.set()
    await made.until(lambda: made.engine._subscribed)


@pytest.mark.parametrize("debug", [{"enabled": True, "probe_enabled": False, "db_dir": ""}])
async def test_there_is_no_prober_where_it_is_off(rig: MakeRig, debug: dict[str, Any]) -> None:
    assert rig(Cat(), [], debug=debug).engine.prober is None
    assert rig(Cat(), []).engine.prober is None


async def test_the_engine_works_on_beside_a_probe(rig: MakeRig) -> None:
    class Hanging(Cat):
        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            if result.stdout == "stuck":
                await asyncio.Event().wait()
            return await super().on_task_complete(result)

    made, probing = await start(rig, Hanging())
    running = asyncio.ensure_future(probing.probe(message(999, b"stuck"), LONG))
    made.source.feed(*(message(offset) for offset in range(20)))
    made.engine.on_assigned([("t", 0)])
    await made.committed(20)
    assert not running.done()
    await made.end()
    assert (await running).status is ProbeStatus.UNFINISHED


async def test_a_report_is_bounded_and_says_what_it_leaves_out(rig: MakeRig) -> None:
    class Loud(Cat):
        async def arrange(self, messages: Sequence[SourceMessage], pending: PendingContext) -> list[ExecutorTask]:
            known = PrecomputedResult(stdout="x" * 100_000)
            return [ExecutorTask(f"t-{number}", precomputed=known) for number in range(1_000)]

    _, probing = await start(rig, Loud())
    found = await probing.probe(message(7), LONG)
    assert found.status is ProbeStatus.DONE
    assert found.sinks == {"sinks.kafka.kafka": 1_000}
    assert (len(found.stages), len(found.tasks), len(found.payloads)) == (
        report.MOST_STAGES,
        report.MOST_TASKS,
        report.MOST_PAYLOADS,
    )
    assert found.left_out == 3_002 - report.MOST_STAGES - report.MOST_TASKS - report.MOST_PAYLOADS
    assert all(payload.body.is_cut for payload in found.payloads)
    assert len(msgspec.msgpack.encode(found)) < 2 * texts.MAX_ALL_CHARS


async def test_odd_texts_of_a_handler_can_be_sent(rig: MakeRig) -> None:
    class Odd(Cat):
        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask("\ud800", labels={"a\ud800": "b\ud800"}, args=["\udcff"], binary_path="echo")

        async def on_task_complete(self, result: ExecutorResult) -> CollectResult | None:
            raise ValueError("\ud800 broken")

    _, probing = await start(rig, Odd())
    found = await probing.probe(message(7), LONG)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=ProbeReport) == found


async def test_a_handler_with_slots_is_copied_whole(rig: MakeRig) -> None:
    class Slotted(Cat):
        __slots__ = ("number",)

        def __init__(self) -> None:
            self.number = 5

        def make_task(self, each: SourceMessage) -> ExecutorTask:
            return ExecutorTask(f"t-{self.number}", binary_path="true")

    _, probing = await start(rig, Slotted())
    assert [task.task_id for task in (await probing.probe(message(7), LONG)).tasks] == ["t-5"]


def test_the_limit_is_thirty_seconds() -> None:
    assert PROBE_SECONDS == 30.0
