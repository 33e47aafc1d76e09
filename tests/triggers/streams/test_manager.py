"""Shared streams, whatever their kind: who shares a poll, what each sees, and how a stream ends."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import (
    KEY,
    Log,
    Request,
    Scene,
    Trigger,
    Upstream,
    ack_class,
    fast_class,
    pull,
    turns,
    until,
)

from tidemill.triggers import shared_stream
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import (
    DEFAULT_SUBSCRIBER_QUEUE_MAX,
    SharedStreamManager,
    StreamEnded,
    SubscriberOverflow,
    route,
)
from tidemill.triggers.streams import routing

both = pytest.mark.parametrize("ack", [False, True], ids=["fast", "ack"])


@both
async def test_equal_keys_share_one_poll_and_every_subscriber_gets_every_event_in_order(ack: bool) -> None:
    scene = Scene(ack=ack)
    streams = [scene.join(number, ("queue", "q")) for number in range(3)]
    events = [f"e{number}" for number in range(600)]
    scene.put(*events)
    assert [await pull(stream, 600) for stream in streams] == [events] * 3
    assert scene.upstream.opened == 1
    await scene.manager.stop_all()


@both
async def test_other_keys_have_other_polls(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1, "a")
    scene.join(1, "b")
    await turns()
    assert scene.upstream.opened == 2
    assert {report.key for report in scene.manager.report()} == {"a", "b"}
    await scene.manager.stop_all()


async def test_a_trigger_without_a_key_runs_by_itself() -> None:
    class Alone(Trigger):
        def shared_stream_key(self) -> Any:
            return None

    routed = route(SharedStreamManager(), 1, Alone())
    assert routed.key is None
    assert [event async for event in routed.events] == [TriggerEvent("ran by itself")]


async def test_a_key_function_that_raises_is_logged_and_the_trigger_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Broken(Trigger):
        def shared_stream_key(self) -> Any:
            raise OSError("no network")

    log = Log()
    monkeypatch.setattr(routing, "log", log)
    routed = route(SharedStreamManager(), 1, Broken())
    assert [event async for event in routed.events] == [TriggerEvent("ran by itself")]
    ((level, _, details),) = log.lines
    assert (level, details["trigger_id"], str(details["exc_info"])) == ("warning", 1, "no network")


async def test_a_trigger_with_a_key_is_routed_to_its_stream_through_its_filter() -> None:
    scene = Scene()
    routed = route(scene.manager, 1, scene.trigger_class(prefix="b"))
    scene.put("a1", "b1", "a2", "b2")
    assert routed.key == KEY
    assert await pull(routed.events, 2) == [TriggerEvent("b1"), TriggerEvent("b2")]
    await scene.manager.stop_all()


@both
async def test_the_factory_is_called_on_the_first_subscribers_class_with_its_serialized_kwargs(ack: bool) -> None:
    scene = Scene(ack=ack)
    # The classpath that it serializes does not exist: it is not imported.
    scene.manager.subscribe(trigger_id=1, trigger=scene.trigger_class(prefix="first"), key=KEY)
    other = fast_class(Upstream())
    scene.manager.subscribe(trigger_id=2, trigger=other(prefix="second"), key=KEY)
    await turns()
    assert scene.trigger_class.kwargs == [{"prefix": "first"}]
    assert other.kwargs == []
    await scene.manager.stop_all()


async def test_an_override_is_found_anywhere_in_the_classes_it_inherits_from_when_it_subscribes() -> None:
    scene = Scene()
    base = scene.trigger_class

    class Mixin:
        @classmethod
        def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> Any:
            return scene._make()

    class Child(type("Middle", (base,), {})):  # type: ignore[misc]
        pass

    class Mixed(Mixin, Trigger):
        pass

    class Later(Trigger):
        pass

    Later.create_shared_stream_producer = Mixin.__dict__["create_shared_stream_producer"]
    for number, cls in enumerate((Child, Mixed, Later)):
        scene.manager.subscribe(trigger_id=number, trigger=cls(), key=cls.__name__)
    await turns()
    assert scene.made == 3
    await scene.manager.stop_all()


@both
async def test_a_stream_hands_out_coroutines_and_needs_no_aiter(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    scene.put("e1")
    request = stream.__anext__()
    assert inspect.iscoroutine(request)
    assert await asyncio.create_task(request) == "e1"
    assert stream.__aiter__() is stream
    await scene.manager.stop_all()


async def test_a_key_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="None"):
        Scene().join(1, None)


@both
async def test_subscribing_twice_is_refused_until_one_has_left(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1)
    scene.join(2)
    with pytest.raises(RuntimeError, match="already subscribed"):
        scene.join(1)
    await scene.leave(1)
    scene.join(1)
    await scene.manager.stop_all()


@both
async def test_a_poll_that_raises_fails_every_subscriber_with_that_exception_and_drops_what_was_unread(
    ack: bool,
) -> None:
    scene = Scene(ack=ack, max_subscriber_queue=2)
    waiting, full, fresh = (scene.join(number) for number in range(3))
    request = Request(waiting)
    error = OSError("broker gone")
    scene.put("e1", "e2")
    await turns()
    assert await request.task == "e1"
    assert await pull(waiting) == ["e2"]
    request = Request(waiting)
    scene.put(error)
    for failed in (request.task, full.__anext__(), fresh.__anext__(), full.__anext__()):
        with pytest.raises(OSError, match="broker gone") as caught:
            await failed
        assert caught.value is error
    assert not scene.polls
    assert scene.log.said("exception") == ["the poll of a shared stream failed; failing all its subscribers"]
    await scene.manager.stop_all()
    assert scene.upstream.closed == 1


@both
async def test_a_poll_that_returns_is_a_failure(ack: bool) -> None:
    scene = Scene(ack=ack)
    streams = [scene.join(number) for number in range(2)]
    scene.put("e1", StopAsyncIteration)
    await turns()
    caught = []
    for stream in streams:
        with pytest.raises(StreamEnded, match="expected to run for the lifetime of the group") as failure:
            await pull(stream)
        caught.append(failure.value)
    assert caught[0] is caught[1]
    assert not scene.polls


@both
async def test_a_factory_that_raises_is_a_poll_that_raises(ack: bool) -> None:
    def broken(*_: Any) -> Any:
        raise LookupError("no such queue")

    cls = ack_class(broken) if ack else type("Fast", (Trigger,), {"open_shared_stream": classmethod(broken)})
    manager = SharedStreamManager(log=Log())
    stream = manager.subscribe(trigger_id=1, trigger=cls(), key=KEY)
    with pytest.raises(LookupError, match="no such queue"):
        await pull(stream)
    assert manager.report() == []


async def test_a_class_with_a_key_that_overrides_nothing_is_reported() -> None:
    stream = SharedStreamManager(log=Log()).subscribe(trigger_id=1, trigger=Trigger(), key=KEY)
    with pytest.raises(NotImplementedError, match="override open_shared_stream"):
        await pull(stream)


@both
async def test_an_exception_that_is_raised_again_and_again_keeps_its_traceback_short(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    scene.put(OSError("gone"))
    lengths = []
    for _ in range(5):
        with pytest.raises(OSError, match="gone") as caught:
            await stream.__anext__()
        lengths.append(len(caught.traceback))
    assert lengths[1:] == lengths[:-1]


@both
async def test_a_subscriber_that_comes_after_the_end_of_a_poll_gets_a_new_stream(ack: bool) -> None:
    scene = Scene(ack=ack)
    dead = scene.join(1)
    request = Request(dead)
    await turns()
    scene.put(OSError("gone"))
    await until(lambda: not scene.polls)
    scene.producer.closed = 0
    alive = scene.join(2)
    with pytest.raises(OSError, match="gone"):
        await request.task
    scene.put("e1")
    assert await pull(alive) == ["e1"]
    await scene.leave(1)  # of the dead one: changes nothing
    assert scene.polls
    await scene.manager.stop_all()


@both
async def test_the_key_is_gone_before_the_last_unsubscribe_waits_for_anything(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1)
    await turns()
    leaving = scene.manager.unsubscribe(1, KEY)
    leaving.send(None)  # to where it first waits
    assert not scene.polls
    assert scene.bind(1) is None
    again = scene.join(1)
    leaving.close()
    scene.put("e1")
    await until(lambda: scene.upstream.opened == 2)
    assert await pull(again) == ["e1"]
    await scene.manager.stop_all()


@both
async def test_stop_all_removes_all_keys_before_it_waits_and_is_not_a_failure(ack: bool) -> None:
    scene = Scene(ack=ack)
    streams = [scene.join(1), scene.join(2, "other")]
    requests = [Request(stream) for stream in streams]
    await turns()
    stopping = asyncio.ensure_future(scene.manager.stop_all())
    await asyncio.sleep(0)
    assert scene.manager.report() == []
    await stopping
    await turns()
    assert all(request.waits for request in requests)
    assert scene.upstream.closed == 2
    for request in requests:
        await request.cancel()


@both
async def test_a_subscriber_that_reads_too_slowly_fails_alone(ack: bool) -> None:
    scene = Scene(ack=ack, max_subscriber_queue=2)
    slow, good = scene.join(1), scene.join(2)
    for number in range(5):
        scene.put(f"e{number}")
        assert await pull(good) == [f"e{number}"]
    with pytest.raises(SubscriberOverflow, match=r"trigger 1 .* exceeded maxsize=2"):
        await pull(slow)
    with pytest.raises(SubscriberOverflow):
        await pull(slow)
    (report,) = scene.manager.report()
    assert (report.subscribers, report.failed) == ((1, 2), {1: 0.0})
    assert len(scene.log.said("warning")) == 1
    scene.put("more")
    assert await pull(good) == ["more"]
    await scene.leave(1)
    scene.join(1)
    assert scene.manager.report()[0].failed == {}
    await scene.manager.stop_all()


@both
async def test_a_subscriber_that_waits_for_its_next_event_is_woken_by_its_failure(ack: bool) -> None:
    scene = Scene(ack=ack)
    request = Request(scene.join(1))
    await turns()
    scene.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await request.task


@both
async def test_a_source_that_never_waits_lets_the_subscribers_have_their_turns(ack: bool) -> None:
    class Greedy(Upstream):
        async def stream(self):
            self.opened += 1
            for number in range(5 * DEFAULT_SUBSCRIBER_QUEUE_MAX):
                yield f"e{number}"
            await asyncio.Event().wait()

    scene = Scene(ack=ack)
    scene.upstream = scene.producer.upstream = Greedy()
    scene.trigger_class = scene.trigger_class if ack else fast_class(scene.upstream)
    streams = [scene.join(number) for number in range(3)]
    found = await asyncio.gather(*(asyncio.create_task(_read(stream, 5000)) for stream in streams))
    assert found == [[f"e{number}" for number in range(5000)]] * 3
    await scene.manager.stop_all()


async def _read(stream: Any, count: int) -> list[Any]:
    return [await stream.__anext__() for _ in range(count)]


@both
async def test_polling_starts_only_after_the_grace_period(ack: bool) -> None:
    scene = Scene(ack=ack, cohort_grace_period=0.02)
    first = scene.join(1)
    await turns()
    assert scene.upstream.opened == 0
    second = scene.join(2)
    scene.put("e1")
    assert [await pull(first), await pull(second)] == [["e1"], ["e1"]]
    await scene.manager.stop_all()


async def test_a_subscriber_that_leaves_within_the_grace_period_never_builds_the_producer() -> None:
    scene = Scene(cohort_grace_period=30.0)
    scene.join(1)
    await turns()
    await scene.leave(1)
    assert (scene.made, scene.producer.closed) == (0, 0)


@both
async def test_a_subscriber_that_leaves_at_once_never_opens_the_upstream(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1)
    await scene.leave(1)
    await turns()
    assert (scene.upstream.opened, scene.made) == (0, 0)


@both
async def test_a_request_that_is_cancelled_loses_nothing(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    for _ in range(3):
        request = Request(stream)
        await turns(3)
        await request.cancel()
    scene.put("e1")
    assert await pull(stream) == ["e1"]
    await scene.manager.stop_all()


@both
async def test_two_requests_at_once_are_an_error(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    request = Request(stream)
    await turns(3)
    with pytest.raises(RuntimeError, match="two tasks"):
        await stream.__anext__()
    await request.cancel()
    await scene.manager.stop_all()


@both
async def test_the_stream_of_a_subscriber_that_left_has_ended(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    scene.join(2)
    request = Request(stream)
    await turns()
    await scene.leave(1)
    with pytest.raises(StopAsyncIteration):
        await request.task
    assert [event async for event in stream] == []
    await scene.leave(1)
    await scene.manager.unsubscribe(1, "unknown key")
    assert scene.polls
    await scene.manager.stop_all()


@both
async def test_a_poll_that_is_cancelled_from_outside_is_a_failure(ack: bool) -> None:
    scene = Scene(ack=ack)
    stream = scene.join(1)
    await turns()
    (poll,) = (task for task in asyncio.all_tasks() if task.get_name().startswith("shared-stream-poll"))
    poll.cancel()
    with pytest.raises(StreamEnded, match="was cancelled"):
        await pull(stream)
    assert not scene.polls


@both
async def test_an_unsubscribe_that_is_cancelled_does_not_end_the_closing(ack: bool) -> None:
    scene = Scene(ack=ack)
    scene.join(1)
    await turns()
    leaving = asyncio.ensure_future(scene.leave(1))
    await asyncio.sleep(0)
    leaving.cancel()
    await until(lambda: scene.upstream.closed == 1)
    await scene.manager.stop_all()


@both
async def test_closing_a_source_that_raises_is_logged(ack: bool) -> None:
    class Sticky(Upstream):
        async def stream(self):
            self.opened += 1
            try:
                await asyncio.Event().wait()
                yield "never"
            finally:
                raise OSError("cannot close")

    scene = Scene(ack=ack)
    scene.upstream = scene.producer.upstream = Sticky()
    scene.trigger_class = scene.trigger_class if ack else fast_class(scene.upstream)
    scene.join(1)
    await turns()
    await scene.leave(1)
    assert scene.producer.closed == ack


async def test_there_is_a_default_for_the_queue() -> None:
    assert DEFAULT_SUBSCRIBER_QUEUE_MAX == 1024


def test_public_names_are_attributes_of_the_modules() -> None:
    for name in (
        "AckTimeout",
        "AdvanceItem",
        "AdvanceOutcome",
        "DEFAULT_SUBSCRIBER_QUEUE_MAX",
        "SharedStreamManager",
        "SharedStreamProducer",
        "SubscriberOverflow",
        "reject_shared_stream_event",
    ):
        assert name in vars(shared_stream)
    assert issubclass(Trigger, BaseEventTrigger)
