"""Windows of tasks whose results were known: hooks in a row, deliveries as a run, and what falls out of both."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from tests.pipeline.conftest import P0, Rig, message

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload

COUNT = 200


class Known(Handler[Any, Any]):
    """One known result per message; the hooks of some messages wait, those of others raise."""

    def __init__(self, waiting: tuple[int, ...] = (), raising: tuple[int, ...] = ()) -> None:
        self.waiting, self.raising = waiting, raising
        self.gate = asyncio.Event()
        self.pending: list[list[str]] = []
        self.called: list[int] = []

    async def arrange(self, messages, pending):
        self.pending.append([task.task_id for task in pending.pending_tasks])
        return [self.make_task(m.offset) for m in messages]

    def make_task(self, offset: int, *offsets: int, name: str = "t") -> ExecutorTask:
        known = PrecomputedResult(str(offset))
        return ExecutorTask(f"{name}{offset}", ("a",), source_offsets=(offset, *offsets), precomputed=known)

    async def on_task_complete(self, result):
        offset = int(result.stdout)
        self.called.append(offset)
        if offset in self.raising:
            raise ValueError(f"cannot take {offset}")
        if offset in self.waiting:
            await self.gate.wait()
        return CollectResult(files=[FilePayload(path="out", data=offset)])


def delivered(run: Rig) -> list[Any]:
    return [payload.data for payload in run.files.payloads]


def lines(count: int = COUNT) -> list[Any]:
    return [message(offset) for offset in range(count)]


async def test_a_hook_that_waits_holds_up_no_other(rig):
    handler = Known(waiting=(0, 17, 150))
    run = rig(handler, lines())
    others = set(range(COUNT)) - {0, 17, 150}
    await run.until(lambda: set(delivered(run)) == others)
    await run.until(lambda: run.engine.counters.messages_done == len(others))
    assert run.source.committed.get(P0) is None
    handler.gate.set()
    await run.committed(COUNT)
    assert sorted(delivered(run)) == list(range(COUNT))
    assert sorted(handler.called) == list(range(COUNT))


async def test_a_hook_that_raises_is_a_letter_of_its_message_alone(rig):
    run = rig(Known(raising=(3, 99)), lines())
    await run.committed(COUNT)
    assert [(letter.sources[0].offset, letter.kind, letter.task_id) for letter in run.letters.letters] == [
        (3, "hook", "t3"),
        (99, "hook", "t99"),
    ]
    assert sorted(delivered(run)) == [offset for offset in range(COUNT) if offset not in (3, 99)]


async def test_what_a_sink_refuses_is_a_letter_of_its_message_with_its_task(rig):
    run = rig(Known(), lines())
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if payload.data == 37 else None
    await run.committed(COUNT)
    (letter,) = run.letters.letters
    assert (letter.sources[0].offset, letter.kind, letter.task_id) == (37, "delivery", "t37")
    assert list(letter.args) == ["a"]
    assert sorted(delivered(run)) == [offset for offset in range(COUNT) if offset != 37]


async def test_a_payload_that_is_retried_holds_back_the_commits_behind_it_and_nothing_else(rig):
    run = rig(Known(), lines())
    busy = [5]
    run.files.refuse = lambda payload: Refusal("busy", retryable=True) if payload.data in busy else None
    await run.until(lambda: run.source.committed.get(P0) == 5)
    busy.clear()
    await run.committed(COUNT)
    assert sorted(delivered(run)) == list(range(COUNT))


@pytest.mark.parametrize("commit", ["message", "window"])
async def test_messages_with_many_tasks_or_none_and_tasks_of_many_messages_are_done_once(rig, commit):
    class Mixed(Known):
        async def arrange(self, messages, pending):
            tasks = [self.make_task(m.offset) for m in messages if m.offset % 3]
            tasks += [self.make_task(m.offset, name="again") for m in messages if m.offset % 5 == 1]
            first, last = messages[0].offset, messages[-1].offset
            return [*tasks, self.make_task(first, last, name="both")]

    handler = Mixed(waiting=(7,))
    run = rig(handler, lines(), executor={"commit": commit})
    await run.until(lambda: 8 in delivered(run))
    handler.gate.set()
    await run.committed(COUNT)
    expected = [offset for offset in range(COUNT) if offset % 3] + [
        offset for offset in range(COUNT) if offset % 5 == 1
    ]
    found = delivered(run)
    assert sorted(found)[:3] == [0, 1, 1]
    assert len(found) - len(expected) == run.engine.counters.windows
    assert run.engine.counters.messages_done == COUNT


async def test_tasks_are_pending_until_their_hooks_have_returned(rig):
    handler = Known(waiting=(1,))
    run = rig(handler, lines(3))
    await run.until(lambda: 2 in delivered(run))
    run.source.feed(*[message(offset) for offset in (3, 4)])
    await run.until(lambda: len(handler.pending) == 2)
    assert handler.pending == [[], ["t1"]]
    handler.gate.set()
    await run.committed(5)


async def test_what_returns_after_a_revoke_is_not_delivered(rig):
    handler = Known(waiting=(1,))
    run = rig(handler, lines(3), executor={"drain_timeout_seconds": 0.05}, kafka={"revoke_timeout_seconds": 0.05})
    await run.until(lambda: sorted(delivered(run)) == [0, 2])
    await asyncio.wait_for(asyncio.ensure_future(run.source.revoke(P0)), 30)
    handler.gate.set()
    await run.settled()
    assert sorted(delivered(run)) == [0, 2]
    assert run.source.committed.get(P0) == 1


async def test_a_long_window_gives_the_loop_its_turns(rig):
    turns = 0

    class Counting(Known):
        async def on_task_complete(self, result):
            self.called.append(turns)
            return await super().on_task_complete(result)

    def turn() -> None:
        nonlocal turns
        turns += 1
        asyncio.get_running_loop().call_soon(turn)

    handler = Counting()
    asyncio.get_running_loop().call_soon(turn)
    run = rig(handler, lines(1000), executor={"window_size": 1000})
    await run.committed(1000)
    assert run.engine.counters.windows == 1
    assert len(set(handler.called[::2])) >= 10


@pytest.mark.parametrize("kind", ["known", "transform"])
async def test_many_windows_of_slow_hooks_give_the_loop_its_turns(rig, kind, monkeypatch):
    monkeypatch.setattr("tidemill.pipeline.hooks.TURN_SECONDS", 0.001)
    since_turn, most = 0, 0

    def called() -> None:
        nonlocal since_turn, most
        since_turn += 1
        most = max(most, since_turn)
        time.sleep(0.002)  # what is tested

    def turn() -> None:
        nonlocal since_turn
        since_turn = 0
        asyncio.get_running_loop().call_soon(turn)

    class Slow(Known):
        async def on_task_complete(self, result):
            called()

    class Transforming(Handler[Any, Any]):
        async def transform(self, messages):
            called()
            return [None for _ in messages]

    asyncio.get_running_loop().call_soon(turn)
    messages = [message(offset, partition=n) for n in range(4) for offset in range(100)]
    run = rig(Slow() if kind == "known" else Transforming(), messages, executor={"window_size": 5})
    await run.until(lambda: run.engine.counters.messages_done == 400)
    assert most <= 3
