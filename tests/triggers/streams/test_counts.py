"""What is counted of shared streams, and told one by one."""

from __future__ import annotations

import pytest
from tests.triggers.streams.scripted_streams import KEY, Producer, Scene, ack_class, fast_class, pull, turns, until
from tests.triggers.streams.test_ack import pull_and_move

from tidemill.triggers.shared_stream import (
    AckTimeout,
    SharedStreamManager,
    StreamCounts,
    SubscriberOverflow,
    reject_shared_stream_event,
)
from tidemill.triggers.stream_api import UPSTREAM_COUNTS
from tidemill.triggers.streams.stream_counts import MAX_LANES, OTHERS, Incident, IncidentKind, StreamTally


def counted(**settings: object) -> tuple[Scene, StreamCounts, list[Incident]]:
    told: list[Incident] = []
    counts = StreamCounts(tell=told.append)
    return Scene(counts=counts, **settings), counts, told


async def test_what_is_advanced_failed_and_rejected_is_counted_per_stream_and_lane() -> None:
    scene, counts, told = counted(lane=lambda payload: (payload[-2], 7))
    first, second = scene.join(1), scene.join(2)
    scene.put("a1", "a2", "b1")
    await pull(first, 3)
    await anext(second)  # in this task, which is then the one that rejects
    reject_shared_stream_event()
    await pull(second, 2)
    await pull_and_move(first), await pull_and_move(second)

    tally = counts.tallies[KEY]
    assert (counts.advanced, tally.advanced, tally.failed, tally.rejected, tally.forced) == (3, 3, 0, 1, 0)
    assert {name: lane.advanced for name, lane in tally.lanes.items()} == {"a/7": 2, "b/7": 1}
    assert told == [Incident(IncidentKind.REJECTED, KEY, 2, ("a", 7), 0, "it rejected the event")]
    await scene.manager.stop_all()


async def test_who_is_forced_to_fail_is_told_with_the_reason() -> None:
    scene, counts, told = counted(ack_timeout=10.0)
    stream = scene.join(1)
    scene.put("e1")
    await pull(stream)
    scene.clock.now = 10.0
    scene.put("e2")
    with pytest.raises(AckTimeout):
        await pull(stream, 2)

    assert [(one.kind, one.trigger, one.position) for one in told] == [(IncidentKind.ACK_TIMEOUT, 1, 0)]
    assert "did not finish event 0 within 10.0 s" in told[0].text
    await until(lambda: counts.tallies[KEY].failed == 1)
    assert counts.tallies[KEY].forced == 1
    await scene.manager.stop_all()


@pytest.mark.parametrize("fast", [True, False])
async def test_an_overflow_is_told_of_both_kinds_of_stream(fast: bool) -> None:
    scene, counts, told = counted(max_subscriber_queue=2)
    if fast:
        scene.trigger_class = fast_class(scene.upstream)
    slow, good = scene.join(1), scene.join(2)
    for number in range(4):
        scene.put(f"e{number}")
        await pull(good)
    with pytest.raises(SubscriberOverflow):
        await pull(slow, 4)

    assert [(one.kind, one.trigger) for one in told] == [(IncidentKind.OVERFLOW, 1)]
    assert counts.tallies[KEY].forced == 1
    await scene.manager.stop_all()


async def test_an_advance_that_failed_is_told_with_its_lane_and_what_is_left_counts_as_given_up() -> None:
    scene, counts, told = counted(lane=lambda payload: payload[-2])
    stream = scene.join(1)
    scene.put("a1", "b1")
    scene.producer.error = OSError("cannot commit")
    await pull(stream, 2)
    await until(lambda: scene.producer.closed)
    await turns()

    assert [(one.kind, one.lane, one.text) for one in told] == [
        (IncidentKind.ADVANCE_FAILED, "a", "OSError: cannot commit"),
        (IncidentKind.STREAM_FAILED, None, "OSError: cannot commit"),
    ]
    tally = counts.tallies[KEY]
    assert (tally.advanced, tally.ended) == (0, 1)
    assert {name: lane.given_up for name, lane in tally.lanes.items()} == {"a": 1, "b": 1}
    await scene.manager.stop_all()


async def test_a_stream_that_failed_is_counted_until_its_subscribers_are_gone() -> None:
    scene, _, _ = counted(seat_seconds=60.0)
    stream = scene.join(1)
    scene.put(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await pull(stream)
    assert scene.manager.count_failed() == 1
    scene.manager.note_gone(1, KEY)
    assert scene.manager.count_failed() == 0
    await scene.manager.stop_all()


async def test_a_producer_finds_the_counts_of_its_process_when_it_is_created() -> None:
    scene, counts, _ = counted()
    found = []

    class Counting(Producer):
        def __init__(self) -> None:
            super().__init__(scene.upstream)
            found.append(UPSTREAM_COUNTS.get())

    scene.trigger_class = ack_class(Counting)
    scene.join(1)
    await until(lambda: found)
    assert found == [counts.upstream]
    await scene.manager.stop_all()


def test_lanes_and_streams_that_are_counted_are_bounded() -> None:
    tally = StreamTally()
    for number in range(MAX_LANES + 50):
        tally.find_lane(f"lane {number}").advanced += 1
        tally.find_lane(number).advanced += 1
    assert len(tally.lanes) == MAX_LANES + 1
    assert tally.lanes[OTHERS].advanced == 51
    assert tally.lanes[""].advanced == MAX_LANES + 50
    assert SharedStreamManager().count_failed() == 0
