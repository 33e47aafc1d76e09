"""Seats in shared streams: a trigger that is away for a while misses nothing, and holds up no other forever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import KEY, Attending, Producer, Request, Scene, pull, turns, until

from tidemill.triggers.shared_stream import StreamEnded, reject_shared_stream_event
from tidemill.triggers.stream_api import LIST_NAME


def scene(**settings: Any) -> Scene:
    found = Scene(**{"seat_seconds": 60.0, **settings})
    found.producer = Attending(found.upstream)
    return found


async def end_of(found: Scene) -> None:
    await found.manager.stop_all()
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert not [name for name in names if name.startswith("shared-stream")]


async def test_events_published_meanwhile_wait_for_the_trigger_that_is_away_and_only_for_it() -> None:
    found = scene()
    first, second = found.join(1), found.join(2)
    found.put("e1")
    await pull(first), await pull(second)
    found.manager.keep_seat(1, KEY)
    found.put("e2", "e3")
    assert await pull(second, 2) == ["e2", "e3"]
    back = found.join(1)
    assert await pull(back, 2) == ["e2", "e3"]
    requests = Request(back), Request(second)
    await until(lambda: len(found.producer.advanced) == 3)
    assert found.producer.advanced == [("e1", (2, 0, 0)), ("e2", (2, 0, 0)), ("e3", (2, 0, 0))]
    assert [raised.__class__ for raised in await ended(first)] == [StopAsyncIteration]
    for request in requests:
        await request.cancel()
    await end_of(found)


async def ended(stream: Any) -> list[BaseException]:
    try:
        await pull(stream)
    except BaseException as error:
        return [error]
    return []


async def test_a_stream_lives_on_while_its_only_subscriber_is_away_and_is_not_pulled() -> None:
    found = scene()
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    found.manager.keep_seat(1, KEY)
    found.put("e2", "e3")
    await turns()
    assert (found.polls, found.upstream.items.qsize()) == (True, 1)
    back = found.join(1)
    assert await pull(back, 2) == ["e2", "e3"]
    assert (found.made, found.upstream.opened) == (1, 1)
    await end_of(found)


async def test_a_subscriber_that_fails_an_event_and_keeps_its_seat_is_reported_as_left_and_joined_again() -> None:
    found = scene()
    stream, other = found.join(1), found.join(2)
    found.put("e1")
    await pull(stream), await pull(other)
    found.manager.fail_held(1, KEY, "broken")
    found.manager.keep_seat(1, KEY)
    request = Request(other)
    await until(lambda: found.producer.advanced)
    assert found.producer.advanced == [("e1", (1, 1, 0))]
    assert found.producer.told[2:] == [("left", 1), ("joined", 1), ("failed", "payload of e1", {1: "broken"}, ())]
    await request.cancel()
    await end_of(found)


async def test_a_producer_that_observes_is_told_which_subscriber_rejected_an_event() -> None:
    found = scene()
    stream, other = found.join(1), found.join(2)
    found.put("e1")
    await anext(stream)
    reject_shared_stream_event()
    await pull(other)
    request = Request(other)
    await until(lambda: found.producer.advanced)
    assert found.producer.told[2:] == [("failed", "payload of e1", {1: "it rejected the event"}, ())]
    await request.cancel()
    await end_of(found)


async def test_a_stream_that_failed_begins_again_with_all_that_took_part_and_they_get_every_event() -> None:
    found = scene()
    first, second = found.join(1), found.join(2)
    found.put("e1")
    await pull(first), await pull(second)
    found.put(OSError("the broker is gone"))
    for stream in (first, second):
        with pytest.raises(OSError, match="the broker is gone"):
            await pull(stream)
    found.manager.keep_seat(1, KEY)
    await until(lambda: found.producer.closed)
    found.producer = Attending(found.upstream)
    back = found.join(1)
    found.put("e2")
    assert await pull(back) == ["e2"]
    assert found.producer.told == [("joined", 1), ("joined", 2)] or found.producer.told == [
        ("joined", 2),
        ("joined", 1),
    ]
    found.manager.keep_seat(2, KEY)
    late = found.join(2)
    assert await pull(late) == ["e2"]
    await end_of(found)


async def test_a_trigger_that_is_gone_for_good_is_not_expected_by_the_stream_that_starts_again() -> None:
    found = scene()
    first, second = found.join(1), found.join(2)
    found.put(OSError("the broker is gone"))
    for stream in (first, second):
        with pytest.raises(OSError, match="gone"):
            await pull(stream)
    found.manager.note_gone(2, KEY)
    await until(lambda: found.producer.closed)
    found.producer = Attending(found.upstream)
    back = found.join(1)
    found.put("e1")
    await pull(back)
    request = Request(back)
    await until(lambda: found.producer.advanced)
    assert found.producer.advanced == [("e1", (1, 0, 0))]
    assert found.producer.told == [("joined", 1)]
    await request.cancel()
    await end_of(found)


async def test_seats_end_after_their_time_and_with_the_last_one_the_stream() -> None:
    found = scene(ack_timeout=1.0)
    stream = found.join(1)
    found.put("e1", "e2")
    await pull(stream)
    found.manager.keep_seat(1, KEY)
    await turns()
    found.clock.now = 60.0
    async with asyncio.timeout(30):
        while not found.producer.closed:
            await asyncio.sleep(0.01)
    assert ("failed", "payload of e2", {}, (1,)) in found.producer.told
    assert not found.polls
    assert any("seat" in line for line in found.log.said("warning"))
    again = found.join(1)
    found.put("e3")
    assert await pull(again) == ["e3"]
    await end_of(found)


async def test_a_seat_from_a_stream_that_failed_ends_too() -> None:
    found = scene()
    first, second = found.join(1), found.join(2)
    found.put(OSError("gone"))
    for stream in (first, second):
        with pytest.raises(OSError, match="gone"):
            await pull(stream)
    found.clock.now = 61.0
    await until(lambda: found.producer.closed)
    found.producer = Attending(found.upstream)
    back = found.join(1)
    found.put("e1")
    await pull(back)
    request = Request(back)
    await until(lambda: found.producer.advanced)
    assert found.producer.advanced == [("e1", (1, 0, 0))]
    await request.cancel()
    await end_of(found)


async def test_a_trigger_that_another_process_claims_takes_its_stream_along_and_nothing_more_is_advanced() -> None:
    found = scene()
    first, second = found.join(1), found.join(2)
    found.put("e1", "e2")
    await pull(first), await pull(second, 2)
    found.manager.fail_held(1, KEY, None)
    found.manager.hand_over(1, KEY)
    found.manager.hand_over(1, KEY)
    with pytest.raises(StreamEnded, match="another process has claimed trigger 1"):
        await pull(second)
    await until(lambda: found.producer.closed)
    assert (found.producer.advanced, found.polls) == ([], False)
    await end_of(found)


async def test_a_claimed_trigger_of_a_stream_that_is_only_read_leaves_it() -> None:
    found = Scene(ack=False, seat_seconds=60.0)
    found.join(1)
    found.put("e1")
    found.manager.hand_over(1, KEY)
    found.manager.hand_over(1, KEY)
    assert not found.polls
    await end_of(found)


async def test_a_subscriber_that_is_forced_to_fail_keeps_its_seat_from_then_on() -> None:
    found = scene(max_subscriber_queue=2)
    slow, good = found.join(1), found.join(2)
    for event in ("e1", "e2", "e3", "e4"):
        found.put(event)
        assert await pull(good) == [event]
    assert isinstance((await ended(slow))[0], Exception)
    found.manager.keep_seat(1, KEY)
    back = found.join(1)
    found.put("e5")
    assert await pull(back, 2) == ["e4", "e5"]
    await end_of(found)


async def test_a_subscriber_that_is_forced_to_fail_and_leaves_keeps_no_seat() -> None:
    found = scene(max_subscriber_queue=2)
    slow, good = found.join(1), found.join(2)
    for event in ("e1", "e2", "e3"):
        found.put(event)
        assert await pull(good) == [event]
    assert isinstance((await ended(slow))[0], Exception)
    await found.leave(1)
    found.put("e4")
    assert await pull(good) == ["e4"]
    request = Request(good)
    await until(lambda: ("e4", (1, 0, 0)) in found.producer.advanced)
    found.manager.note_gone(2, KEY)
    await until(lambda: found.producer.closed)
    await request.cancel()
    await end_of(found)


async def test_a_stream_whose_last_seat_ends_as_an_event_is_fanned_out_ends_at_once() -> None:
    found = scene(ack_timeout=10.0)
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    assert stream.bind() is not None
    await until(lambda: found.upstream.pulled == 2)
    found.manager.keep_seat(1, KEY)
    await turns()
    found.clock.now = 61.0
    found.put("e2")
    await until(lambda: found.producer.closed)
    assert not found.polls
    await end_of(found)


async def test_where_no_seats_are_kept_keep_seat_only_unsubscribes() -> None:
    for found in (Scene(), Scene(ack=False, seat_seconds=60.0)):
        stream = found.join(1)
        found.put("e1")
        await pull(stream)
        found.manager.keep_seat(1, KEY)
        await until(lambda found=found: found.upstream.closed)
        assert not found.polls
        found.manager.keep_seat(1, KEY)
        await end_of(found)


async def test_a_producer_is_created_under_the_name_of_its_list() -> None:
    seen = []

    class Named(Producer):
        def __init__(self, upstream: Any) -> None:
            super().__init__(upstream)
            seen.append(LIST_NAME.get())

    found = Scene(list_name="orders")
    found._make = lambda: Named(found.upstream)  # type: ignore[method-assign]
    found.trigger_class.create_shared_stream_producer = classmethod(  # type: ignore[method-assign]
        lambda cls, kwargs: found._make()
    )
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    assert (seen, LIST_NAME.get()) == (["orders"], "")
    await end_of(found)


# -- the end of a stream -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stored", [True, False])
async def test_events_moved_past_while_the_poll_fails_are_advanced_once_they_are_stored(stored: bool) -> None:
    found = scene()
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    found.put(OSError("gone"))
    await turns()
    assert not found.polls
    seq = stream.bind()
    assert seq is not None
    with pytest.raises(OSError, match="gone"):
        await pull(stream)
    await turns()
    assert found.producer.advanced == []
    if stored:
        found.confirm([seq])
    else:
        found.manager.refuse_persisted([seq], "too odd")
    await until(lambda: found.producer.closed)
    assert found.producer.advanced == [("e1", (1, 0, 0) if stored else (0, 1, 0))]
    await end_of(found)


async def test_events_unfinished_after_the_poll_failed_are_abandoned_when_the_host_stops() -> None:
    found = scene()
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    found.put(OSError("gone"))
    await turns()
    assert found.producer.closed == 0
    await found.manager.stop_all()
    assert (found.producer.closed, found.producer.advanced) == (1, [])


async def test_a_new_stream_of_a_key_polls_only_when_the_old_one_is_closed() -> None:
    found = scene()
    old = found.producer
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    old.gate.clear()
    request = Request(stream)
    await until(lambda: old.running)
    found.put(OSError("gone"))
    await turns()
    with pytest.raises(OSError, match="gone"):
        await request.task
    found.producer = Attending(found.upstream)
    back = found.join(1)
    found.put("e2")
    waiting = Request(back)
    await turns()
    assert (found.made, waiting.waits) == (1, True)
    old.gate.set()
    assert await asyncio.wait_for(waiting.task, 30) == "e2"
    assert old.closed == 1
    await end_of(found)


@pytest.mark.parametrize("hangs", ["advance", "source", "producer"])
async def test_leaving_does_not_wait_for_ever_for_a_broker_that_hangs(hangs: str) -> None:
    found = Scene(step_seconds=0.05)

    async def hang() -> None:
        await asyncio.Event().wait()

    class Hanging(Producer):
        async def open_stream(self) -> Any:
            try:
                async for item in super().open_stream():
                    yield item
            finally:
                if hangs == "source":
                    await hang()

        async def advance(self, batch: Any) -> None:
            if hangs == "advance":
                await hang()

        async def aclose(self) -> None:
            if hangs == "producer":
                await hang()

    found.producer = Hanging(found.upstream)
    stream = found.join(1)
    found.put("e1")
    await pull(stream)
    request = Request(stream)
    await turns()
    await asyncio.wait_for(found.leave(1), 30)
    assert len([line for line in found.log.said("error") if "hangs" in line]) == 1
    await request.cancel()
    await end_of(found)


async def test_a_task_of_a_stream_that_raises_ends_the_stream_and_every_subscriber_gets_the_error() -> None:
    class Wrong(Attending):
        def event_failed(self, broker_payload: Any, failures: Any, unread: Any) -> None:
            raise LookupError("attendance is broken")

    found = scene()
    found.producer = Wrong(found.upstream)
    stream, other = found.join(1), found.join(2)
    found.put("e1")
    await pull(stream), await pull(other)
    found.manager.fail_held(1, KEY, "broken")
    with pytest.raises(LookupError, match="attendance is broken"):
        await pull(other)
    with pytest.raises(LookupError, match="attendance is broken"):
        await pull(stream)
    await until(lambda: found.producer.closed)
    await end_of(found)


async def test_a_stream_that_ends_by_returning_says_so() -> None:
    found = scene()
    stream = found.join(1)
    found.put(StopAsyncIteration)
    with pytest.raises(StreamEnded, match="returned"):
        await pull(stream)
    await end_of(found)
