"""Shared streams at their edges: subscribers that are interrupted, come again, or were never really there."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import KEY, Request, Scene, Trigger, ack_class, pull, turns, until

from tidemill.triggers.base import TriggerEvent
from tidemill.triggers.shared_stream import AckTimeout, SharedStreamManager, SubscriberOverflow
from tidemill.triggers.streams.routing import route

both = pytest.mark.parametrize("ack", [False, True], ids=["fast", "ack"])


@both
async def test_a_request_that_is_cancelled_in_the_turn_in_which_its_event_comes_loses_nothing(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream, other = scene.join(1), scene.join(2)
    await turns()
    for number in range(5):
        request, beside = Request(stream), Request(other)
        await turns()
        scene.put(f"e{number}")
        await asyncio.sleep(0)  # the poll has the event and wakes who waits
        await request.cancel()
        assert await beside.task == f"e{number}"
        if request.task.cancelled():
            assert await pull(stream) == [f"e{number}"]
        else:
            assert request.task.result() == f"e{number}"
    if ack:
        await turns()
        assert scene.producer.advanced == [(f"e{number}", (2, 0, 0)) for number in range(4)]
    await scene.manager.stop_all()


@both
async def test_a_request_with_a_deadline_that_passes_leaves_the_event_to_the_next_one(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.__anext__(), 0.01)
    scene.put("e1")
    assert await asyncio.wait_for(stream.__anext__(), 30) == "e1"
    await scene.manager.stop_all()


async def test_a_filter_that_is_closed_early_holds_its_event_until_it_leaves() -> None:
    scene = Scene()
    other = scene.join(2)
    trigger = scene.trigger_class()
    events = trigger.filter_shared_stream(scene.manager.subscribe(trigger_id=1, trigger=trigger, key=KEY))
    scene.put("e1", "e2")
    assert await anext(events) == TriggerEvent("e1")
    seq = scene.bind(1)
    await events.aclose()  # type: ignore[attr-defined]
    await pull(other, 2)
    await turns()
    assert scene.producer.advanced == []
    await scene.leave(1)
    await turns()
    assert scene.producer.advanced == []
    scene.confirm([seq])
    await turns(5)
    assert scene.producer.advanced == [("e1", (2, 0, 0))]
    request = Request(other)
    await turns(5)
    # The closed one never requested it.
    assert scene.producer.advanced[1:] == [("e2", (1, 1, 0))]
    await request.cancel()
    await scene.manager.stop_all()


@pytest.mark.parametrize("cause", [AckTimeout, SubscriberOverflow])
async def test_a_subscriber_that_was_forced_to_fail_may_subscribe_again_only_after_it_has_left(
    cause: type[Exception],
) -> None:
    scene = Scene(ack_timeout=10.0, max_subscriber_queue=2)
    failed, good = scene.join(1), scene.join(2)
    scene.put("e1")
    await pull(failed), await pull(good)
    late = scene.bind(1)
    if cause is AckTimeout:
        request = Request(good)
        await turns()
        scene.clock.now = 10.0
    else:
        for number in range(3):
            scene.put(f"many {number}")
            await pull(good)
        request = Request(good)
    scene.put("e2")
    assert await request.task == "e2"
    for _ in range(3):
        with pytest.raises(cause):
            await pull(failed)
        assert scene.bind(1) is None
    with pytest.raises(RuntimeError, match="already subscribed"):
        scene.join(1)
    await scene.leave(1)
    again = scene.join(1)
    assert scene.bind(1) is None
    scene.confirm([late])  # of its former life
    scene.put("e3")
    assert [await pull(again), await pull(good)] == [["e3"], ["e3"]]
    await scene.leave(1)
    request = Request(good)
    await turns(5)
    assert scene.producer.advanced[0] == ("e1", (1, 1, 0))
    assert scene.producer.advanced[-2:] == [("e2", (1, 0, 0)), ("e3", (2, 0, 0))]
    await request.cancel()
    await scene.manager.stop_all()


@both
async def test_a_poll_that_failed_can_be_joined_again_by_the_same_subscriber_at_once(ack: bool) -> None:
    scene = Scene(ack=ack)
    dead = scene.join(1)
    scene.put(OSError("gone"))
    await until(lambda: not scene.polls)
    scene.producer.closed = 0
    alive = scene.join(1)
    scene.put("e1")
    assert await pull(alive) == ["e1"]
    with pytest.raises(OSError, match="gone"):
        await pull(dead)
    await scene.manager.stop_all()


@both
async def test_a_poll_that_fails_gives_no_new_error_to_a_subscriber_that_has_failed_already(ack: bool) -> None:
    scene = Scene(ack=ack, max_subscriber_queue=1)
    slow, good = scene.join(1), scene.join(2)
    for number in range(3):
        scene.put(f"e{number}")
        await pull(good)
    scene.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await pull(good)
    with pytest.raises(SubscriberOverflow):
        await pull(slow)
    await scene.manager.stop_all()


@both
async def test_many_subscribers_that_leave_at_once_end_the_stream_once(ack: bool) -> None:
    scene = Scene(ack=ack)
    requests = [Request(scene.join(number)) for number in range(8)]
    await turns()
    await asyncio.gather(*(scene.leave(number) for number in range(8)))
    assert not scene.polls
    assert scene.upstream.closed == 1
    assert scene.producer.closed == (1 if ack else 0)
    await asyncio.wait({request.task for request in requests})


@both
async def test_stop_all_closes_before_the_poll_has_begun(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1)
    await scene.manager.stop_all()
    assert (scene.made, scene.upstream.opened) == (0, 0)
    scene.join(1)
    await turns()
    assert scene.upstream.opened == 1
    await scene.manager.stop_all()


async def test_a_subscription_that_cannot_be_made_leaves_nothing_behind() -> None:
    scene = Scene()

    class Unwritable(scene.trigger_class):  # type: ignore[name-defined,misc]
        def serialize(self) -> tuple[str, dict[str, Any]]:
            raise LookupError("no arguments")

    with pytest.raises(LookupError, match="no arguments"):
        scene.manager.subscribe(trigger_id=1, trigger=Unwritable(), key=KEY)
    assert not scene.polls
    assert scene.bind(1) is None
    stream = scene.join(1)
    scene.put("e1")
    assert await pull(stream) == ["e1"]
    await scene.manager.stop_all()


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_without_a_running_loop_nothing_is_subscribed() -> None:
    scene = Scene()
    with pytest.raises(RuntimeError, match="no running event loop"):
        scene.join(1)
    assert not scene.polls


async def test_numbers_that_were_never_given_are_ignored_whatever_they_are() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1")
    nothing = scene.bind(1)
    await pull(stream)
    seq = scene.bind(1)
    request = Request(stream)
    await turns()
    scene.confirm(iter([nothing, -1, 0, 10**30, seq, seq]))  # type: ignore[list-item]
    await turns(5)
    assert scene.producer.advanced == [("e1", (1, 0, 0))]
    await request.cancel()
    await scene.manager.stop_all()


async def test_a_logger_of_the_standard_library_will_do(caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> Any:
        raise LookupError("no such queue")

    manager = SharedStreamManager(log=logging.getLogger("mine"))
    trigger: Trigger = ack_class(broken)()
    with pytest.raises(LookupError, match="no such queue"):
        await pull(manager.subscribe(trigger_id=1, trigger=trigger, key=KEY))
    assert [(record.name, record.levelname) for record in caplog.records] == [("mine", "ERROR")]
    await manager.stop_all()


async def test_a_trigger_whose_method_is_not_an_async_generator_is_told_what_to_write() -> None:
    class Returns(Trigger):
        async def run(self) -> Any:
            return TriggerEvent(1)

        def shared_stream_key(self) -> Any:
            return None

    class Filters(Trigger):
        async def filter_shared_stream(self, events: Any) -> Any:  # type: ignore[override]
            return TriggerEvent(1)

    manager = Scene().manager
    with pytest.raises(TypeError, match=r"Returns\.run must be .* returned a coroutine; write `async def run\(self\)`"):
        route(manager, 1, Returns())
    with pytest.raises(
        TypeError, match=r"Filters\.filter_shared_stream must be an async generator, but returned a corou"
    ):
        route(manager, 2, Filters())
    await manager.stop_all()
