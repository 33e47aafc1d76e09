from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest
from tests.pipeline.conftest import P0, P1, message

from tidemill.pipeline.handler import Handler
from tidemill.pipeline.models import ErrorAction, ExecutorTask, PrecomputedResult, DeliveryAction
from tidemill.runtime.progress import StopReason
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.sources.base import CommitStatus


def known(task_id: str, *offsets: int, **more: Any) -> ExecutorTask:
    return ExecutorTask(task_id, source_offsets=offsets, precomputed=PrecomputedResult("ok"), **more)


class WindowGate(Handler[Any, Any]):
    def __init__(self, result: Any = None) -> None:
        self.gate = asyncio.Event()
        self.entered = asyncio.Event()
        self.result = result

    async def arrange(self, messages, pending):
        return []

    async def on_window_complete(self, results, messages):
        self.entered.set()
        await self.gate.wait()
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


PAYLOAD = CollectResult(files=[FilePayload(path="w", data=1)])


async def test_a_drain_window_hook_ends(rig):
    handler = WindowGate(PAYLOAD)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    asyncio.get_running_loop().call_later(0.3, handler.gate.set)
    start = asyncio.get_running_loop().time()
    await run.end()
    assert asyncio.get_running_loop().time() - start < 2
    assert len(run.files.payloads) == 1


async def test_b_drain_waits_for_window_letter(rig):
    handler = WindowGate(RuntimeError("x"))
    run = rig(handler, [message(0)])
    run.letters.hold = True
    await run.committed(1)
    handler.gate.set()
    await run.until(lambda: run.letters.letters)
    ended = asyncio.ensure_future(run.end())
    await asyncio.sleep(0.3)
    assert not ended.done()
    run.letters.confirm()
    await ended
    assert run.letters.written == 1


async def test_c_revoke_waits_for_window_payloads(rig):
    handler = WindowGate(PAYLOAD)
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await asyncio.sleep(0.1)
    handler.gate.set()
    await revoked
    await run.settled()
    assert len(run.files.payloads) == 1


async def test_d_window_letter_after_lost(rig):
    handler = WindowGate(RuntimeError("x"))
    run = rig(handler, [message(0)])
    await run.committed(1)
    await handler.entered.wait()
    run.source.lose(P0)
    handler.gate.set()
    await run.settled()
    assert run.letters.letters == []


async def test_e_label(rig):
    class H(Handler[Any, Any]):
        def message_label(self, message):
            raise ValueError("no label")

        async def arrange(self, messages, pending):
            raise RuntimeError("poison")

    run = rig(H(), [message(0), message(1)])
    await run.committed(2)


class Bad(Handler[Any, Any]):
    def __init__(self, task: Any) -> None:
        self.task = task

    async def arrange(self, messages, pending):
        if any(m.offset == 0 for m in messages):
            return [self.task]
        return [ExecutorTask("good", binary_path="true")]


@pytest.mark.parametrize(
    "task",
    [
        ExecutorTask("t", source_offsets=5, binary_path="true"),
        ExecutorTask("t", source_offsets=[[0]], binary_path="true"),
        ExecutorTask("t", binary_path="true", labels=None),
        ExecutorTask("t", precomputed="text"),
        ExecutorTask("t", precomputed=PrecomputedResult("\ud800")),
        ExecutorTask("t", precomputed=PrecomputedResult(7)),
        ExecutorTask(["t"], binary_path="true"),
        ExecutorTask("t", binary_path="true", args=None),
        ExecutorTask("t", binary_path="true", args=7),
        ExecutorTask("t", binary_path="true", stdin="\ud800"),
        ExecutorTask("t", binary_path="true", stdin=7),
        ExecutorTask("t", binary_path="true", env=7),
        ExecutorTask("t", binary_path=7),
        ExecutorTask("t", binary_path="true", timeout_seconds="x"),
    ],
)
async def test_f_bad(rig, task):
    run = rig(Bad(task), [message(0)], executor={"max_executors": 1, "max_retries": 0})
    await run.until(lambda: run.source.committed.get(P0) == 1, 3)
    run.source.feed(message(1))
    await run.until(lambda: run.source.committed.get(P0) == 2, 3)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no words")


@pytest.mark.parametrize("hook", ["arrange", "deserialize_message", "on_task_complete", "on_message_complete", "on_window_complete", "on_error"])
async def test_g_mute(rig, hook):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("a") if hook != "on_error" else ExecutorTask("x", binary_path="false")]

    async def explode(*_):
        raise Mute

    def explode_sync(*_):
        raise Mute

    handler = H()
    setattr(handler, hook, explode_sync if hook == "deserialize_message" else explode)
    run = rig(handler, [message(0), message(1)])
    await run.until(lambda: run.source.committed.get(P0) == 2, 3)
    await run.until(lambda: run.letters.letters, 3)


@pytest.mark.parametrize("hook", ["arrange", "on_task_complete", "on_message_complete", "on_window_complete", "on_error", "on_delivery_error"])
async def test_h_cancelled(rig, hook):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("a") if hook != "on_error" else ExecutorTask("x", binary_path="false")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="w", data=object() if hook == "on_delivery_error" else 1)])

    async def explode(*_):
        raise asyncio.CancelledError

    handler = H()
    setattr(handler, hook, explode)
    run = rig(handler, [message(0)], executor={"commit": "window"})
    await run.until(lambda: run.source.committed.get(P0) == 1, 3)
    await run.until(lambda: run.letters.letters, 3)


async def test_h_on_ready_cancelled(rig):
    class H(Handler[Any, Any]):
        async def on_ready(self, config, pool):
            raise asyncio.CancelledError

    run = rig(H(), [])
    summary = await asyncio.wait_for(run._task, 5)
    assert summary.reason is StopReason.FAILED


async def test_i_fence_queued_payloads(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset) for m in messages] + [
                ExecutorTask("sleep", source_offsets=[0], binary_path="sh", args=["-c", "trap '' TERM; while :; do sleep 0.1; done"])
            ]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="w", data=result.task.task_id)])

    run = rig(H(), [message(0)], executor={"term_grace_seconds": 1.0})
    run.files.open.clear()
    await run.until(lambda: run.engine.outbox._all[1].outstanding + run.engine.outbox._all[0].outstanding == 1)
    run.source.feed(message(1))
    await run.until(lambda: sum(b.outstanding for b in run.engine.outbox._all) == 2)
    run.source.fence()
    run.files.open.set()
    summary = await asyncio.wait_for(run._task, 10)
    assert summary.reason is StopReason.FENCED
    assert len(run.files.payloads) <= 1


async def test_i_fence_during_drain(rig):
    handler = WindowGate()

    async def arrange(messages, pending):
        return [ExecutorTask("sleep", binary_path="sleep", args=["60"])]

    handler.arrange = arrange
    run = rig(handler, [message(0)], executor={"drain_timeout_seconds": 8})
    await run.until(lambda: run.engine.progress().tasks_running)
    run.engine.drain()
    await asyncio.sleep(0.1)
    run.source.fence()
    summary = await asyncio.wait_for(run._task, 3)
    assert summary.reason is StopReason.FENCED
    assert run.source.left is False


async def test_j_bytes_freed(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            self.seen = getattr(self, "seen", 0) + len(messages)
            return [
                ExecutorTask("slow", source_offsets=[0], binary_path="sleep", args=["4"]) if m.offset == 0 else known(f"t{m.offset}", m.offset)
                for m in messages
            ]

        async def on_task_complete(self, result):
            await asyncio.sleep(0.001)
            return CollectResult(files=[FilePayload(path="w", data=result.task.task_id)])

    handler = H()
    run = rig(handler, [message(n, b"x" * 100) for n in range(100)], executor={"max_queued_bytes": 1000, "window_size": 5})
    await run.until(lambda: handler.seen == 100, 3)


@pytest.mark.parametrize("mode", ["message", "window"])
async def test_k_mutating(rig, mode):
    class H(Handler[Any, Any]):
        groups: list[int] = []

        async def arrange(self, messages, pending):
            tasks = []
            while messages:
                m = messages.pop()
                tasks.append(known(f"t{m.offset}", m.offset))
            return tasks

        async def on_message_complete(self, group):
            self.groups.append(group.source_message.offset)

        async def on_window_complete(self, results, messages):
            results.clear()
            messages.clear()

    run = rig(H(), [message(0), message(1)], executor={"commit": mode})
    await run.until(lambda: run.source.committed.get(P0) == 2, 3)


async def test_l_revoke_of_closed(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [ExecutorTask("sleep", binary_path="sh", args=["-c", "trap '' TERM; while :; do sleep 0.1; done"])]

    run = rig(H(), [message(0)], executor={"drain_timeout_seconds": 0.5, "term_grace_seconds": 2.0})
    await run.until(lambda: run.engine.progress().tasks_running)
    await asyncio.sleep(0.2)
    run.engine.drain()
    await run.until(lambda: all(lane.closed for lane in run.engine._lanes.values()))
    run.engine.settings.executor.drain_timeout_seconds = 8
    await asyncio.wait_for(run.source.revoke(P0), 1)


async def test_m_finish_abandon(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return []

    run = rig(H(), [message(0)])
    run.source.hold_commits = True
    await run.until(lambda: run.source.commits)
    run.engine.drain()
    await asyncio.sleep(0.1)
    run.source.lose(P0)
    await asyncio.wait_for(run._task, 3)


async def test_u_hooks_after_lost(rig):
    class H(Handler[Any, Any]):
        calls = 0

        async def arrange(self, messages, pending):
            return [known(f"t{m.offset}", m.offset) for m in messages]

        async def on_task_complete(self, result):
            self.calls += 1
            self.run.source.lose(P0)

        async def on_message_complete(self, group):
            self.calls += 1

    handler = H()
    handler.run = rig(handler, [message(0), message(1), message(2)])
    await handler.run.until(lambda: handler.calls)
    await handler.run.settled()
    assert handler.calls == 1


async def test_p_sink_cancelled(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("a")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(path="w", data=1)])

    times = 0

    def refuse(payload):
        nonlocal times
        times += 1
        if times == 1:
            raise asyncio.CancelledError

    run = rig(H(), [])
    run.files.refuse = refuse
    await run.until(lambda: run.engine._accepting)
    run.source.feed(message(0))
    run.engine.on_assigned([P0])
    await run.until(lambda: run.source.committed.get(P0) == 1, 3)


async def test_o_misrouted_payloads_in_letter(rig):
    class H(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [known("a")]

        async def on_task_complete(self, result):
            return CollectResult(files=[FilePayload(sink="nowhere", path="w", data="precious")])

    run = rig(H(), [message(0)])
    await run.committed(1)
    assert "precious" in "".join(run.letters.letters[0].original_payloads)
