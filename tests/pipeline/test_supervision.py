"""What one message's text does to an engine (nothing), and what happens to an engine when one of its parts fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.pipeline.conftest import Rig, message

import tidemill
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, ExecutorTask, PrecomputedResult
from tidemill.pipeline.handler.periodic import periodic
from tidemill.runtime.link.progress import EngineSummary, StopReason
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload

NAME = "\ud800.jpg"
PATH = b"/data/caf\xe9".decode("utf-8", "surrogateescape")


class Known(Handler[Any, Any]):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult("ok"))
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out.jsonl", data=result.task.task_id)])


async def ended(run: Rig) -> EngineSummary:
    """Return how an engine ended that nobody stopped."""
    assert run._task is not None
    return await asyncio.wait_for(run._task, 30)


# -- texts --------------------------------------------------------------------------------------------------------


async def test_task_ids_and_labels_of_any_text_are_shown_and_can_be_sent(rig) -> None:
    class Named(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [
                ExecutorTask(NAME, source_offsets=(0,), binary_path="/bin/true", labels={"file": NAME}),
                ExecutorTask(
                    "ümläut" * 100_000, source_offsets=(1,), binary_path="/bin/true", labels={"a": "b" * 10**6}
                ),
            ]

    run = rig(Named(), [message(0), message(1)])
    await run.committed(2)
    progress = run.engine.progress()
    shown = {name: labels for _, name, labels in progress.slowest}
    assert shown["\\ud800.jpg"] == "file=\\ud800.jpg"
    assert len(msgspec.msgpack.encode(progress)) < 10_000
    assert (await run.end()).reason is StopReason.DRAINED


async def test_errors_about_paths_that_are_not_utf_8_can_be_sent_from_wherever_they_come(rig) -> None:
    class Reader(Known):
        @periodic(0.01, on_error="stop")
        async def refresh(self) -> None:
            open(PATH)  # noqa: SIM115  # it is not there

        async def on_delivery_error(self, error):
            return DeliveryAction.SKIP

    run = rig(Reader(), [message(0)])
    run.files.refuse = lambda payload: Refusal(f"no such file: {PATH}", retryable=False)
    run.source.describe_wait = lambda: f"cannot read {PATH}"
    await run.committed(1)
    await run.until(lambda: "periodic refresh" in run.engine.progress().waits)
    progress = run.engine.progress()
    msgspec.msgpack.encode(progress)
    assert "caf\\udce9" in progress.waits["periodic refresh"]
    assert progress.waits["kafka"] == "cannot read /data/caf\\udce9"
    assert "caf\\udce9" in progress.sinks["sinks.filesystem.files"].last_error


async def test_an_engine_that_cannot_start_for_a_path_that_is_not_utf_8_says_so(rig) -> None:
    class Unready(Known):
        async def on_ready(self, config, sinks):
            open(PATH)  # noqa: SIM115

    summary = await ended(rig(Unready(), []))
    assert summary.reason is StopReason.FAILED
    assert "caf\\udce9" in summary.error
    msgspec.msgpack.encode(summary)


# -- parts that end -----------------------------------------------------------------------------------------------


async def test_the_end_of_a_sinks_task_ends_the_engine_and_is_named(rig) -> None:
    run = rig(Known(), [message(0), message(1)])

    def take(now: float) -> None:
        raise KeyError("an order that is lost")

    for sender in run.engine.outbox._all:
        sender._queue.take = take
    summary = await ended(run)
    assert summary.reason is StopReason.FAILED
    assert "the deliveries to sinks.filesystem.files failed: KeyError" in summary.error
    assert run.source.committed == {}
    assert run.source.left is False, "its place in the group is kept for its replacement"


async def test_the_end_of_a_sinks_task_during_the_drain_does_not_wait_for_its_timeout(rig) -> None:
    run = rig(Known(), [message(0)])
    run.files.open.clear()
    await run.until(lambda: any(sender.outstanding for sender in run.engine.outbox._all))
    run.engine.drain()
    await run.until(lambda: not run.source._fetching)
    for sender in run.engine.outbox._all:
        sender._task.cancel()
    summary = await ended(run)
    assert summary.reason is StopReason.FAILED
    assert "was cancelled" in summary.error


@pytest.mark.parametrize(
    ("part", "method"),
    [("intake", "_accept"), ("pool", "_start"), ("commits", "ended"), ("counters", None)],
)
async def test_a_bug_in_a_callback_ends_the_engine_and_is_named(rig, part, method) -> None:
    class Running(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [ExecutorTask("t", source_offsets=(messages[0].offset,), binary_path="/bin/true")]

    def broken(*_: object) -> None:
        raise LookupError("it is not there")

    run = rig(Running(), [])
    await run.until(lambda: run.engine.intake._open)
    if method is None:
        run.engine.context.slowest.add = broken  # a process has ended, and what takes its result raises
    else:
        setattr(getattr(run.engine.context if part == "pool" else run.engine, part), method, broken)
    run.source.feed(message(0))
    run.engine.on_assigned([("t", 0)])
    summary = await ended(run)
    assert summary.reason is StopReason.FAILED
    assert "LookupError: it is not there" in summary.error


async def test_a_bug_in_a_job_of_the_engine_ends_it_and_is_named(rig) -> None:
    run = rig(Known(), [])
    await run.until(lambda: run.engine.intake._open)

    async def broken(lane: object) -> None:
        raise LookupError("it is not there")

    run.engine.intake._arrange = broken
    run.source.feed(message(0))
    run.engine.on_assigned([("t", 0)])
    summary = await ended(run)
    assert summary.reason is StopReason.FAILED
    assert "LookupError: it is not there" in summary.error


class Leaving(Known):
    """Cancels the task that one of its hooks runs in."""

    def __init__(self, hook: str) -> None:
        self.hook = hook

    async def _leave(self, hook: str) -> None:
        if hook == self.hook:
            asyncio.current_task().cancel()
            await asyncio.sleep(60)

    async def arrange(self, messages, pending):
        await self._leave("arrange")
        return await super().arrange(messages, pending)

    async def on_task_complete(self, result):
        await self._leave("on_task_complete")
        return await super().on_task_complete(result)

    async def on_message_complete(self, group):
        await self._leave("on_message_complete")

    async def on_delivery_error(self, error):
        await self._leave("on_delivery_error")

    @periodic(0.01)
    async def refresh(self) -> None:
        await self._leave("refresh")


@pytest.mark.parametrize("hook", ["arrange", "on_task_complete", "on_message_complete", "on_delivery_error"])
async def test_a_hook_that_cancels_its_own_task_is_the_failure_of_its_message_alone(rig, hook) -> None:
    run = rig(Leaving(hook), [message(offset) for offset in range(3)])
    if hook == "on_delivery_error":
        run.files.refuse = lambda payload: Refusal("no", retryable=False)
    await run.committed(3)
    assert len(run.letters.letters) == 3
    if hook != "on_delivery_error":
        assert "cancelled from within" in run.letters.letters[0].error
    assert (await run.end()).reason is StopReason.DRAINED


async def test_a_periodic_hook_that_cancels_its_own_task_is_counted_as_failed_and_continues(rig) -> None:
    run = rig(Leaving("refresh"), [])
    await run.until(lambda: run.engine.progress().periodic_errors >= 2)
    assert (await run.end()).reason is StopReason.DRAINED


async def test_an_error_of_a_users_own_task_ends_nothing(rig) -> None:
    class Careless(Known):
        async def on_ready(self, config, sinks):
            asyncio.get_running_loop().call_soon(lambda: 1 / 0)

    run = rig(Careless(), [message(0)])
    await run.committed(1)
    assert (await run.end()).reason is StopReason.DRAINED


async def test_the_loop_has_its_own_handler_of_errors_back_after_the_engine(rig) -> None:
    run = rig(Known(), [])
    await run.until(lambda: run.engine.intake._open)
    assert asyncio.get_running_loop().get_exception_handler() is not None
    await run.end()
    assert asyncio.get_running_loop().get_exception_handler() is None


async def test_the_end_of_the_caches_task_ends_the_engine_and_is_named(rig, tmp_path, monkeypatch) -> None:
    async def broken(cache: Any) -> None:
        raise LookupError("it is not there")

    monkeypatch.setattr("tidemill.pipeline.handler.cache.Cache._write", broken)
    run = rig(Known(), [], cache={"enabled": True, "path": str(tmp_path), "flush_interval_seconds": 0.01})
    summary = await ended(run)
    assert summary.reason is StopReason.FAILED
    assert "flush" in summary.error
    assert "LookupError: it is not there" in summary.error


def test_the_tasks_of_an_engine_are_started_in_one_place() -> None:
    """Code that starts a bare task has to say why nothing needs to notice its end."""
    root = Path(tidemill.__file__).parent
    found = {
        str(path.relative_to(root)): text.count("create_task(") + text.count("ensure_future(")
        for room in ("pipeline", "runtime", "sinks", "sources", "spark")
        for path in (root / room).rglob("*.py")
        if (text := path.read_text()).count("create_task(") + text.count("ensure_future(")
    }
    assert found == {
        "pipeline/probing/probe_run.py": 3,  # two waits and the end of the hooks, awaited
        "pipeline/engine.py": 2,  # the start and the stop, awaited side by side
        "sinks/sending/batch_sender.py": 1,  # a call of a sink, awaited or left to itself on purpose
        "pipeline/delivery/outbox.py": 1,  # connecting, gathered
        "sinks/http.py": 1,  # in a group of its own
        "spark/engine/process.py": 1,  # connecting, awaited
        "runtime/loop/engine_tasks.py": 1,
        "runtime/process/service_signals.py": 2,  # a start, and the wait for a stop, awaited
    }
