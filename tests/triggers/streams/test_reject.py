"""Rejecting a raw event, from wherever a filter may do it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import KEY, Log, Request, Scene, pull, turns

from tidemill.triggers import shared_stream
from tidemill.triggers.base import TriggerEvent
from tidemill.triggers.shared_stream import reject_shared_stream_event


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    found = Log()
    monkeypatch.setattr(shared_stream, "log", found)
    return found


def filtered(scene: Scene, what: Any, trigger_id: int = 1) -> AsyncIterator[TriggerEvent]:
    """Subscribe with a filter that awaits `what(raw)` and yields the raw events."""

    class Rejecting(scene.trigger_class):  # type: ignore[name-defined,misc]
        async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
            async for raw in shared_stream:
                await what(raw)
                yield TriggerEvent(raw)

    trigger = Rejecting()
    return trigger.filter_shared_stream(scene.manager.subscribe(trigger_id=trigger_id, trigger=trigger, key=KEY))


async def test_a_reject_resolves_at_once_and_needs_no_confirmation() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1")
    await pull_here(stream)
    seq = scene.bind(1)
    reject_shared_stream_event()
    await turns(5)
    assert scene.producer.advanced == [("e1", (0, 0, 1))]
    scene.confirm([seq])
    assert scene.bind(1) is None
    await scene.manager.stop_all()


async def test_reject_then_yield_fires_the_event_binds_nothing_and_counts_as_rejected() -> None:
    scene = Scene()

    async def reject(raw: str) -> None:
        reject_shared_stream_event()

    events = filtered(scene, reject)
    scene.put("e1")
    assert await pull(events) == [TriggerEvent("e1")]
    assert scene.bind(1) is None
    await turns(5)
    assert scene.producer.advanced == [("e1", (0, 0, 1))]
    await scene.manager.stop_all()


async def test_a_second_reject_is_a_no_op_without_a_warning(log: Log) -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1", "e2")
    await pull_here(stream)
    reject_shared_stream_event()
    reject_shared_stream_event()
    await pull_here(stream)
    reject_shared_stream_event()
    await turns(5)
    assert scene.producer.advanced == [("e1", (0, 0, 1)), ("e2", (0, 0, 1))]
    assert log.lines == []
    await scene.manager.stop_all()


async def test_outside_of_an_open_window_it_warns_and_does_nothing(log: Log) -> None:
    scene = Scene()
    stream = scene.join(1)
    reject_shared_stream_event()
    assert len(log.said("warning")) == 1
    scene.put("e1")
    await pull_here(stream)
    request = Request(stream)
    await turns()
    reject_shared_stream_event()
    assert len(log.said("warning")) == 2
    await request.cancel()
    await turns()
    assert scene.producer.advanced == [("e1", (1, 0, 0))]
    await scene.manager.stop_all()
    reject_shared_stream_event()
    assert len(log.said("warning")) == 3


async def test_in_fast_mode_it_warns_and_does_nothing(log: Log) -> None:
    acked, fast = Scene(), Scene(ack=False)
    acking, reading = acked.join(1), fast.join(1)
    acked.put("e1")
    fast.put("f1")
    await pull_here(acking)  # in the same context, and still on its event
    await reading.__anext__()
    reject_shared_stream_event()
    assert len(log.said("warning")) == 1
    await turns()
    assert acked.producer.advanced == []
    await acked.manager.stop_all()
    await fast.manager.stop_all()


async def test_in_a_standalone_run_it_warns_and_does_nothing(log: Log) -> None:
    class Alone(Scene().trigger_class):  # type: ignore[misc]
        async def run(self) -> AsyncIterator[TriggerEvent]:
            reject_shared_stream_event()
            yield TriggerEvent("went on")

    assert [event async for event in Alone().run()] == [TriggerEvent("went on")]
    assert len(log.said("warning")) == 1


async def test_it_works_when_the_filter_awaits_helper_tasks() -> None:
    scene = Scene()

    async def helper(raw: str) -> None:
        await asyncio.sleep(0)
        if raw == "bad":
            reject_shared_stream_event()

    async def in_tasks(raw: str) -> None:
        await asyncio.gather(asyncio.create_task(helper(raw)), asyncio.wait_for(helper(""), 30))

    events = filtered(scene, in_tasks)
    other = scene.join(2)
    scene.put("good", "bad", "good again")
    assert len(await pull(events, 3)) == 3
    await pull(other, 3)
    await turns()
    assert scene.producer.advanced == [("good", (2, 0, 0)), ("bad", (1, 0, 1))]
    await scene.manager.stop_all()


async def test_it_works_when_each_step_of_the_filter_is_driven_by_another_task() -> None:
    scene = Scene()

    async def reject_odd(raw: str) -> None:
        if raw in ("e1", "e3"):
            reject_shared_stream_event()

    events = filtered(scene, reject_odd)
    scene.put("e0", "e1", "e2", "e3", "e4")
    for _ in range(5):
        await asyncio.create_task(anext(events))  # type: ignore[arg-type]
    await turns()
    assert [outcome for _, outcome in scene.producer.advanced] == [(1, 0, 0), (0, 0, 1), (1, 0, 0), (0, 0, 1)]
    await scene.manager.stop_all()


@pytest.mark.parametrize("waits", [False, True])
async def test_a_filter_that_limits_its_waiting_rejects_the_event_that_it_got(log: Log, waits: bool) -> None:
    """`wait_for` awaits in a task of its own, whose context the filter does not see."""
    scene = Scene()
    stream = scene.join(1)
    for number in range(4):
        if not waits:
            scene.put(number)
        else:
            asyncio.get_running_loop().call_later(0.001, scene.put, number)
        if number % 2:
            found = await asyncio.wait_for(anext(stream), 30)
        else:
            found = await asyncio.create_task(aiter(stream).__anext__())
        assert found == number
        if number < 3:
            reject_shared_stream_event()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(stream), 0.01)
    reject_shared_stream_event()  # it has moved past it
    await turns(5)
    assert log.said("warning") != []
    assert scene.producer.advanced == [*((str(number), (0, 0, 1)) for number in range(3)), ("3", (1, 0, 0))]
    await scene.manager.stop_all()


async def test_two_filters_that_take_turns_in_one_task_reject_each_their_own() -> None:
    scene = Scene()
    first, second = scene.join(1), scene.join(2)
    scene.put("e1", "e2")
    await pull_here(first), await pull_here(second)
    reject_shared_stream_event()
    await pull_here(second), await pull_here(first)
    reject_shared_stream_event()
    await turns()
    assert scene.producer.advanced == [("e1", (1, 0, 1))]
    assert [line.holders for line in scene.manager.report()[0].lanes] == [(2,)]
    await scene.manager.stop_all()


async def pull_here(stream: Any) -> Any:
    """Request an event in the task of the caller."""
    return await stream.__anext__()


async def test_a_reject_of_one_that_was_forced_to_fail_warns_and_does_nothing(log: Log) -> None:
    scene = Scene(ack_timeout=10.0)
    stream, other = scene.join(1), scene.join(2)
    scene.put("e1")
    await pull_here(stream)
    scene.clock.now = 10.0
    scene.put("e2")
    await turns()
    reject_shared_stream_event()
    assert len(log.said("warning")) == 1
    assert scene.producer.advanced == [("e1", (0, 2, 0)), ("e2", (0, 0, 0))]
    assert other is not None
    await scene.manager.stop_all()


async def test_a_helper_task_that_a_filter_left_behind_rejects_nothing_but_the_event_of_its_start(log: Log) -> None:
    scene = Scene()
    helpers: list[asyncio.Task[None]] = []
    late = asyncio.Event()

    async def helper() -> None:
        await late.wait()
        reject_shared_stream_event()

    async def leave_behind(raw: str) -> None:
        if raw == "e1":
            helpers.append(asyncio.create_task(helper()))

    events = filtered(scene, leave_behind)
    scene.put("e1", "e2")
    await pull(events, 2)
    late.set()
    await asyncio.gather(*helpers)
    request = Request(events)
    await turns(5)
    assert scene.producer.advanced == [("e1", (1, 0, 0)), ("e2", (1, 0, 0))]
    [warning] = log.said("warning")
    assert warning.startswith("reject_shared_stream_event called outside an ack-mode binding window")
    await request.cancel()
    await scene.manager.stop_all()
