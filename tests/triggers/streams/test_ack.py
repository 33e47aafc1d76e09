"""Shared streams with acknowledgement: when an event counts as dealt with, and what the producer is told of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import (
    KEY,
    Attending,
    Producer,
    Request,
    Scene,
    Trigger,
    Upstream,
    ack_class,
    pull,
    turns,
    until,
)

from tidemill.testing.clock import run_on_virtual_clock
from tidemill.triggers.base import TriggerEvent
from tidemill.triggers.shared_stream import (
    AckTimeout,
    AdvanceItem,
    AdvanceOutcome,
    SharedStreamManager,
    SharedStreamProducer,
)


async def test_the_producer_is_built_once_per_group_and_opened_when_the_poll_starts() -> None:
    scene = Scene()
    scene.join(1)
    assert scene.made == 0
    scene.join(2)
    await turns()
    assert (scene.made, scene.upstream.opened) == (1, 1)
    await scene.manager.stop_all()
    assert scene.producer.closed == 1


async def test_no_producer_is_opened_before_that_is_allowed_and_the_wait_ends_with_the_stream() -> None:
    allowed = asyncio.Event()

    async def may_open() -> None:
        await allowed.wait()

    scene = Scene(may_open=may_open)
    scene.join(1)
    await turns()
    assert scene.upstream.opened == 0
    await scene.leave(1)
    stream = scene.join(2)
    scene.put("e1")
    await turns()
    assert scene.upstream.opened == 0
    allowed.set()
    assert await pull(stream) == ["e1"]
    await scene.manager.stop_all()


async def test_an_event_is_acked_by_requesting_the_next_one_even_if_none_exists_yet() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1")
    assert await pull(stream) == ["e1"]
    await turns()
    assert scene.producer.advanced == []
    request = Request(stream)
    await turns(5)
    assert scene.producer.advanced == [("e1", (1, 0, 0))]
    await request.cancel()
    await scene.manager.stop_all()


async def test_an_event_is_acked_by_leaving_while_on_it() -> None:
    scene = Scene()
    stream, other = scene.join(1), scene.join(2)
    scene.put("e1")
    await pull(stream), await pull(other)
    request = Request(other)
    await turns()
    assert scene.producer.advanced == []
    await scene.leave(1)
    await turns(5)
    assert scene.producer.advanced == [("e1", (2, 0, 0))]
    await request.cancel()
    await scene.manager.stop_all()


async def test_the_last_one_leaving_while_on_an_event_acks_it_too() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1", "e2")
    await pull(stream)
    await scene.leave(1)
    assert scene.producer.advanced == [("e1", (1, 0, 0)), ("e2", (0, 1, 0))]
    assert scene.producer.closed == 1


async def test_derived_events_must_be_confirmed_in_any_order() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1", "e2", "e3")
    await pull(stream)
    first = [scene.bind(1), scene.bind(1)]
    await pull(stream)
    second = scene.bind(1)
    await pull(stream)
    await turns()
    scene.confirm([second])
    scene.confirm([first[1], second, 10**6])
    await turns()
    assert scene.producer.advanced == []
    scene.confirm(seq for seq in [first[0]])
    await turns(5)
    assert scene.producer.advanced == [("e1", (1, 0, 0)), ("e2", (1, 0, 0))]
    await scene.manager.stop_all()


async def test_an_event_that_the_filter_skips_is_acked_at_once() -> None:
    scene = Scene()
    trigger = scene.trigger_class(prefix="wanted")
    events = trigger.filter_shared_stream(scene.manager.subscribe(trigger_id=1, trigger=trigger, key=KEY))
    scene.put("other", "wanted")
    assert await pull(events) == [TriggerEvent("wanted")]
    await turns(5)
    assert scene.producer.advanced == [("other", (1, 0, 0))]
    await scene.manager.stop_all()


async def test_binding_is_possible_only_from_the_pull_of_an_event_to_the_next_pull() -> None:
    scene = Scene()
    assert scene.bind(1) is None
    stream = scene.join(1)
    assert scene.bind(1) is None
    scene.put("e1")
    await until(lambda: scene.upstream.pulled == 2)
    assert scene.bind(1) is None
    await pull(stream)
    assert scene.bind(1) is not None
    assert scene.bind(2) is None
    assert scene.bind(1, "unknown") is None
    request = Request(stream)
    await turns()
    assert scene.bind(1) is None
    await request.cancel()
    await scene.manager.stop_all()
    assert scene.bind(1) is None


async def test_nothing_is_bound_in_fast_mode() -> None:
    scene = Scene(ack=False)
    stream = scene.join(1)
    scene.put("e1")
    await pull(stream)
    assert scene.bind(1) is None
    scene.confirm([1, 2])
    await scene.manager.stop_all()


async def test_numbers_are_unique_over_all_groups() -> None:
    scene = Scene()
    streams = {key: scene.join(1, key) for key in ("a", "b")}
    await turns()
    for event in ("e1", "e2"):  # both polls wait at the same upstream: one event each
        scene.put(event)
        await turns()
    for stream in streams.values():
        await pull(stream)
    seqs = [scene.bind(1, key) for key in ("a", "b", "a")]
    assert len(set(seqs)) == 3
    await scene.manager.stop_all()


async def test_a_subscriber_that_joins_later_does_not_count_in_earlier_events() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.put("e1")
    await pull(stream)
    late = scene.join(2)
    scene.put("e2")
    assert await pull(stream) == ["e2"]
    assert await pull(late) == ["e2"]
    await turns()
    assert scene.producer.advanced == [("e1", (1, 0, 0))]
    await scene.manager.stop_all()


async def test_events_enqueued_but_never_pulled_fail_when_their_subscriber_leaves() -> None:
    scene = Scene()
    stream, leaver = scene.join(1), scene.join(2)
    scene.put("e1", "e2")
    await pull(stream, 2)
    await pull(leaver)
    seq = scene.bind(2)
    await scene.leave(2)
    request = Request(stream)
    await turns()
    assert scene.producer.advanced == []
    scene.confirm([seq])
    await turns(5)
    assert scene.producer.advanced == [("e1", (2, 0, 0)), ("e2", (1, 1, 0))]
    await request.cancel()
    await scene.manager.stop_all()


def test_what_was_pulled_and_never_confirmed_fails_at_the_ack_timeout_though_its_subscriber_has_left() -> None:
    async def main() -> None:
        scene = Scene(ack_timeout=10.0)
        stream, leaver = scene.join(1), scene.join(2)
        scene.put("e1")
        await pull(stream), await pull(leaver)
        seq = scene.bind(2)
        request = Request(stream)
        await scene.leave(2)
        scene.clock.now = 9.9
        await asyncio.sleep(2)
        assert scene.producer.advanced == []
        scene.clock.now = 10.0
        await asyncio.sleep(2)
        assert scene.producer.advanced == [("e1", (1, 1, 0))]
        scene.confirm([seq])
        assert request.waits
        await request.cancel()
        await scene.manager.stop_all()

    run_on_virtual_clock(main())


def test_the_ack_timeout_fails_only_those_still_pending_and_all_they_hold() -> None:
    async def main() -> None:
        scene = Scene(ack_timeout=10.0)
        still_on_it, unconfirmed, good = scene.join(1), scene.join(2), scene.join(3)
        scene.put("e1", "e2")
        for stream in (still_on_it, unconfirmed, good):
            await pull(stream)
        late = scene.bind(2)
        requests = [Request(stream) for stream in (unconfirmed, good)]
        await turns()
        requests = [Request(stream) for stream in (unconfirmed, good)]
        scene.clock.now = 10.0
        await asyncio.sleep(1.01)
        # e2: one never read it, one had moved past it.
        assert scene.producer.advanced == [("e1", (1, 2, 0)), ("e2", (2, 1, 0))]
        with pytest.raises(AckTimeout, match=r"trigger 2 .* within 10.0 s"):
            await requests[0].task
        with pytest.raises(AckTimeout):
            await pull(still_on_it)
        assert scene.bind(1) is None
        scene.confirm([late])
        assert requests[1].waits
        assert scene.manager.report()[0].failed == {1: 10.0, 2: 10.0}
        scene.put("e3")
        assert await requests[1].task == "e3"
        await pull_and_move(good)
        assert scene.producer.advanced[2:] == [("e3", (1, 0, 0))]
        await scene.manager.stop_all()

    run_on_virtual_clock(main())


async def pull_and_move(stream: Any) -> None:
    """Request the next event, which does not come, and stop waiting."""
    request = Request(stream)
    await turns(5)
    await request.cancel()


async def test_deadlines_are_compared_before_every_fan_out() -> None:
    scene = Scene(ack_timeout=1000.0)
    stream, other = scene.join(1), scene.join(2)
    scene.put("e1")
    await pull(stream)
    await pull(other)
    await pull_and_move(other)
    scene.clock.now = 1000.0
    scene.put("e2")
    await pull(other)
    await turns(5)
    assert scene.producer.advanced == [("e1", (1, 1, 0))]
    with pytest.raises(AckTimeout):
        await pull(stream)
    await pull_and_move(other)
    assert scene.producer.advanced[1:] == [("e2", (1, 0, 0))]
    await scene.manager.stop_all()


@pytest.mark.parametrize(("timeout", "cadence"), [(5.0, 0.5), (0.02, 0.01)])
def test_deadlines_are_compared_ten_times_per_timeout_but_not_more_often_than_every_10_ms(
    timeout: float, cadence: float
) -> None:
    async def main() -> None:
        scene = Scene(ack_timeout=timeout)
        stream = scene.join(1)
        scene.put("e1")
        await pull(stream)
        scene.clock.now = timeout
        await asyncio.sleep(cadence * 1.01)
        with pytest.raises(AckTimeout):
            await pull(stream)
        await scene.manager.stop_all()

    run_on_virtual_clock(main())


async def test_an_overflow_resolves_all_that_the_subscriber_holds_as_failed() -> None:
    scene = Scene(max_subscriber_queue=2)
    slow, good = scene.join(1), scene.join(2)
    scene.put("e0")
    await pull(slow), await pull(good)
    late = scene.bind(1)
    for number in range(1, 4):
        scene.put(f"e{number}")
        await pull(good)
    await pull_and_move(good)
    assert scene.producer.advanced == [(f"e{number}", (1, 1, 0)) for number in range(4)]
    assert scene.bind(1) is None
    scene.confirm([late])
    scene.put("after")
    await pull(good)
    await pull_and_move(good)
    assert scene.producer.advanced[4:] == [("after", (1, 0, 0))]
    await scene.manager.stop_all()


# -- advancing -----------------------------------------------------------------------------------------------------


async def test_one_advance_is_awaited_at_a_time_and_gets_what_is_resolved_when_it_begins() -> None:
    scene = Scene(lane=lambda payload: payload[-2])
    stream = scene.join(1)
    scene.producer.gate.clear()
    scene.put("a1", "b1", "a2", "b2")
    await pull(stream, 2)
    await turns()
    assert scene.producer.running == 1
    await pull(stream, 2)
    await pull_and_move(stream)
    scene.producer.gate.set()
    await turns()
    batches = [[item.broker_payload[-2:] for item in batch] for batch in scene.producer.batches]
    assert batches == [["a1"], ["b1", "b2"], ["a2"]]
    await scene.manager.stop_all()


async def test_lanes_do_not_wait_for_each_other_and_what_is_behind_a_pending_head_goes_into_the_next_batch() -> None:
    scene = Scene(lane=lambda payload: payload[-2])
    stream = scene.join(1)
    scene.put("a1", "b1", "a2", "b2", "end")
    await pull(stream)
    seq = scene.bind(1)
    await pull(stream, 4)
    await turns()
    assert [name for name, _ in scene.producer.advanced] == ["b1", "b2"]
    (report,) = scene.manager.report()
    assert [(lane.lane, lane.outstanding, lane.holders) for lane in report.lanes] == [("a", 2, (1,)), ("n", 1, (1,))]
    scene.confirm([seq])
    await turns(5)
    assert [len(batch) for batch in scene.producer.batches][-1] == 2
    assert [name for name, _ in scene.producer.advanced][2:] == ["a1", "a2"]
    assert [lane.lane for lane in scene.manager.report()[0].lanes] == ["n"]
    await scene.manager.stop_all()


async def test_the_default_lane_holds_everything() -> None:
    assert Producer(Upstream()).get_advance_lane("any") == Producer(Upstream()).get_advance_lane(7)


async def test_an_event_that_nobody_is_there_for_is_advanced_in_order_as_nothing() -> None:
    scene = Scene(max_subscriber_queue=1)
    stream = scene.join(1)
    scene.put("e1", "e2")
    await turns()
    scene.put("e3")
    await turns()
    assert scene.producer.advanced == [("e1", (0, 1, 0)), ("e2", (0, 1, 0)), ("e3", (0, 0, 0))]
    assert not any(item.outcome.is_clean for item in scene.producer.items)
    assert stream is not None
    await scene.manager.stop_all()


@pytest.mark.parametrize(
    ("outcome", "clean"), [((1, 0, 0), True), ((0, 0, 0), False), ((2, 1, 0), False), ((2, 0, 1), False)]
)
def test_an_outcome_is_clean_with_an_ack_and_without_failure_and_reject(outcome: tuple[int, int, int], clean: bool):
    assert AdvanceOutcome(*outcome).is_clean is clean
    payload, (acked, failed, rejected) = AdvanceItem("payload", AdvanceOutcome(*outcome))
    assert (payload, acked, failed, rejected) == ("payload", *outcome)


async def test_a_lane_function_that_raises_ends_the_group_after_advancing_what_was_resolved() -> None:
    def lane(payload: str) -> str:
        if payload.endswith("bad"):
            raise LookupError("no partition")
        return "lane"

    scene = Scene(lane=lane)
    stream = scene.join(1)
    scene.producer.gate.clear()
    scene.put("e1", "e2", "e3")
    await pull(stream, 2)
    await turns()
    await pull(stream)
    scene.put("bad")
    with pytest.raises(LookupError, match="no partition"):
        await pull(stream)
    assert not scene.polls
    assert scene.producer.closed == 0
    scene.producer.gate.set()
    await until(lambda: scene.producer.closed)
    # It moved past e3 when it got the failure.
    assert scene.producer.advanced == [("e1", (1, 0, 0)), ("e2", (1, 0, 0)), ("e3", (1, 0, 0))]


async def test_a_lane_that_is_not_hashable_ends_the_group() -> None:
    scene = Scene(lane=lambda payload: [payload])
    stream = scene.join(1)
    scene.put("e1")
    with pytest.raises(TypeError, match="unhashable"):
        await pull(stream)
    await until(lambda: scene.producer.closed)


@pytest.mark.parametrize("error", [OSError("cannot commit"), asyncio.CancelledError()])
async def test_an_advance_that_raises_is_logged_and_ends_the_group_for_every_subscriber(error: BaseException) -> None:
    scene = Scene()
    streams = [scene.join(number) for number in range(2)]
    scene.put("e1", "e2")
    scene.producer.error = error
    for stream in streams:
        await pull(stream, 2)
    await until(lambda: not scene.polls)
    caught = []
    for stream in streams:
        with pytest.raises(Exception, match=r"cannot commit|was cancelled") as failure:
            await pull(stream)
        caught.append(failure.value)
    assert caught[0] is caught[1]
    assert caught[0] is error or isinstance(error, asyncio.CancelledError)
    await until(lambda: scene.producer.closed)
    assert scene.producer.batches == []
    assert len(scene.log.said("error")) == 1
    await scene.manager.stop_all()
    assert (scene.producer.closed, scene.upstream.closed) == (1, 1)


async def test_stopping_waits_for_the_advance_in_flight_drains_what_is_resolved_and_abandons_the_rest() -> None:
    scene = Scene(lane=lambda payload: payload[-2])
    stream, other = scene.join(1), scene.join(2)
    scene.producer.gate.clear()
    scene.put("a1", "b1", "b2")
    await pull(stream, 2), await pull(other, 2)
    await turns()
    assert scene.producer.running
    await pull(stream), await pull(other)
    seq = scene.bind(1)
    stopping = asyncio.ensure_future(scene.manager.stop_all())
    await turns()
    assert not stopping.done()
    scene.confirm([seq])
    scene.producer.gate.set()
    await stopping
    assert scene.producer.advanced == [("a1", (2, 0, 0)), ("b1", (2, 0, 0))]
    assert (scene.producer.closed, scene.upstream.closed) == (1, 1)


async def test_stop_all_waits_for_a_group_that_is_ending_by_itself() -> None:
    scene = Scene()
    stream = scene.join(1)
    scene.producer.gate.clear()
    scene.put("e1")
    await pull(stream)
    request = Request(stream)
    await turns()
    assert scene.producer.running
    scene.put(OSError("gone"))
    await until(lambda: not scene.polls)
    stopping = asyncio.ensure_future(scene.manager.stop_all())
    await turns()
    assert not stopping.done()
    scene.producer.gate.set()
    await stopping
    assert scene.producer.advanced == [("e1", (1, 0, 0))]
    assert scene.producer.closed == 1
    await asyncio.wait({request.task})
    assert isinstance(request.task.exception(), OSError)


async def test_an_error_raised_by_closing_the_producer_is_logged() -> None:
    scene = Scene()
    scene.producer.close_error = OSError("already closed")
    scene.join(1)
    await turns()
    await scene.leave(1)
    assert scene.log.said("warning") == ["closing the producer of a shared stream failed"]


# -- bounds, reports, a store that is away -----------------------------------------------------------------------------


async def test_the_producer_is_not_pulled_beyond_what_may_be_outstanding_and_a_report_says_so() -> None:
    scene = Scene(max_outstanding=3)
    stream = scene.join(1)
    scene.clock.now = 7.0
    scene.put(*(f"e{number}" for number in range(10)))
    await turns()
    assert scene.upstream.pulled == 3
    (report,) = scene.manager.report()
    assert (report.outstanding, report.full_since) == (3, 7.0)
    await pull(stream, 2)
    await turns()
    assert scene.upstream.pulled == 4
    scene.confirm([])
    assert await pull(stream, 8) == [f"e{number}" for number in range(2, 10)]
    assert scene.manager.report()[0].full_since is None
    await scene.manager.stop_all()


async def test_a_report_says_which_subscriber_holds_the_head_of_a_lane_and_since_when() -> None:
    scene = Scene()
    slow, good = scene.join(1), scene.join(2)
    scene.clock.now = 5.0
    scene.put("e1")
    await pull(slow), await pull(good)
    scene.bind(1)
    request, other = Request(slow), Request(good)
    await turns()
    (report,) = scene.manager.report()
    (lane,) = report.lanes
    assert (report.key, report.subscribers, report.outstanding) == (KEY, (1, 2), 1)
    assert (lane.lane, lane.since, lane.holders) == (None, 5.0, (1,))
    await request.cancel(), await other.cancel()
    await scene.manager.stop_all()


async def test_while_it_is_held_no_producer_is_pulled() -> None:
    scene = Scene()
    scene.manager.hold()
    stream = scene.join(1)
    scene.put("e1", "e2", "e3")
    await turns()
    assert (scene.made, scene.upstream.pulled) == (1, 0)
    scene.manager.release()
    assert await pull(stream) == ["e1"]
    scene.manager.hold()
    await until(lambda: scene.upstream.items.empty())
    scene.put("e4", "e5")
    await turns()
    pulled = scene.upstream.pulled
    scene.put("e6")
    await turns()
    assert scene.upstream.pulled == pulled
    scene.manager.release()
    assert await pull(stream, 5) == ["e2", "e3", "e4", "e5", "e6"]
    await scene.manager.stop_all()


# -- producers that want to know who --------------------------------------------------------------------------------


class Telling(Attending):
    """Keeps what it is advanced over among what it is told of its subscribers."""

    async def advance(self, batch: Any) -> None:
        await super().advance(batch)
        self.told.append(("advanced", len(batch)))


async def test_a_producer_that_observes_is_told_the_subscribers_and_which_failed_what() -> None:
    scene = Scene()
    scene.producer = producer = Telling(scene.upstream)
    first = scene.join(1)
    await turns()
    scene.join(2)
    scene.put("e1")
    await pull(first)
    await scene.leave(2)
    scene.manager.note_gone(2, KEY)
    scene.manager.note_gone(2, "unknown")
    await pull_and_move(first)
    assert producer.told == [
        ("joined", 1),
        ("joined", 2),
        ("left", 2),
        ("gone", 2),
        ("failed", "payload of e1", {}, (2,)),
        ("advanced", 1),
    ]
    await scene.manager.stop_all()


async def test_many_deliveries_leave_nothing_behind() -> None:
    class Endless(SharedStreamProducer):
        def __init__(self) -> None:
            self.advanced = 0

        async def open_stream(self):
            while True:
                yield bytearray(100), None

        async def advance(self, batch: Any) -> None:
            self.advanced += len(batch)

    producer = Endless()
    manager = SharedStreamManager(max_outstanding=100)
    trigger: Trigger = ack_class(lambda: producer)()
    stream = manager.subscribe(trigger_id=1, trigger=trigger, key=KEY)
    for _ in range(20_000):
        await stream.__anext__()
        manager.confirm_persisted([manager.bind_pending_event(trigger_id=1, key=KEY)])
        assert manager.report()[0].outstanding <= 100 if producer.advanced % 1000 == 0 else True
    assert producer.advanced >= 19_000
    assert manager._pending_events.trim() < 2100
    await manager.stop_all()
