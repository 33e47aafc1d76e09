"""All slots of a pipeline: which may begin, and how the run ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import Consume, DrainSlot, PrepareSlot, RunFinished, SlotGroup, SubscribeSlot


def test_slot_0_is_ready_before_the_others_begin_and_all_subscribe_together() -> None:
    group = SlotGroup(4)
    assert group.note_connected(3) == []
    assert group.note_connected(2) == []
    assert group.note_connected(0) == [PrepareSlot(0)]
    assert group.note_ready(0, 100.0) == [PrepareSlot(2), PrepareSlot(3)]
    assert group.note_ready(3, 101.0) == []
    assert group.note_connected(1) == [PrepareSlot(1)]
    assert group.note_ready(2, 101.0) == []
    assert group.note_ready(1, 102.0) == [SubscribeSlot(0), SubscribeSlot(1), SubscribeSlot(2), SubscribeSlot(3)]


def test_no_engine_takes_messages_before_all_have_partitions() -> None:
    group = subscribed(3)
    assert group.holding
    assert group.note_partitions(0) == []
    assert group.note_partitions(0) == []
    assert group.note_partitions(2) == []
    assert group.note_partitions(1) == [Consume()]
    assert not group.holding
    assert group.due is None
    assert group.note_partitions(1) == []
    assert group.tick(200.0) == []


def test_no_more_slots_are_waited_for_than_there_are_partitions() -> None:
    group = subscribed(4, partitions=2)
    assert group.note_partitions(3) == []
    assert group.note_partitions(1) == [Consume()]


def test_a_slot_without_partitions_is_waited_for_5_seconds() -> None:
    group = subscribed(2)
    assert group.note_partitions(0) == []
    assert group.due == 105.0
    assert group.tick(104.9) == []
    assert group.tick(105.0) == [Consume()]


def test_a_slot_that_is_not_ready_holds_up_the_others_for_5_seconds() -> None:
    group = SlotGroup(3)
    assert group.due is None
    assert group.tick(50.0) == []
    for slot in (0, 1):
        group.note_connected(slot)
    group.note_ready(0, 100.0)
    group.note_ready(1, 101.0)
    assert group.tick(105.0) == [SubscribeSlot(0), SubscribeSlot(1), Consume()]
    assert group.note_connected(2) == [PrepareSlot(2)]
    assert group.note_ready(2, 110.0) == [SubscribeSlot(2)]


def test_a_single_slot_does_not_wait() -> None:
    group = SlotGroup(1)
    group.note_connected(0)
    assert not group.holding
    assert group.note_ready(0, 100.0) == [SubscribeSlot(0)]
    assert group.due is None


def test_an_engine_that_is_replaced_while_others_are_held_subscribes_at_once() -> None:
    group = subscribed(2)
    assert group.note_connected(1) == [PrepareSlot(1)]
    assert group.note_ready(1, 103.0) == [SubscribeSlot(1)]
    assert group.holding


def test_later_starts_are_not_held_up() -> None:
    group = subscribed(2)
    group.tick(105.0)
    assert group.note_connected(0) == [PrepareSlot(0)]
    assert group.note_connected(1) == [PrepareSlot(1)]
    assert group.note_ready(1, 110.0) == [SubscribeSlot(1)]
    assert group.note_ready(0, 110.0) == [SubscribeSlot(0)]
    assert not group.holding


def test_neither_time_nor_partitions_start_an_engine_while_the_pipeline_drains() -> None:
    group = subscribed(2)
    group.note_partitions(0)
    group.drain()
    assert group.due is None
    assert group.note_partitions(1) == []
    assert group.tick(200.0) == []


def subscribed(slots: int, partitions: int | None = None) -> SlotGroup:
    """Return a group whose slots have all subscribed; slot 0 was ready at 100."""
    group = SlotGroup(slots, partitions)
    for slot in range(slots):
        group.note_connected(slot)
    for slot in range(slots):
        group.note_ready(slot, 100.0)
    return group


def test_a_drain_goes_to_every_slot_and_nothing_begins_after_it() -> None:
    group = SlotGroup(2)
    group.note_connected(1)
    assert group.drain() == [DrainSlot(0), DrainSlot(1)]
    assert group.draining
    assert group.drain() == []
    assert group.note_connected(0) == []
    assert group.note_ready(0, 1.0) == []
    assert group.note_finished(1, EngineEnding.DRAINED) == []
    assert group.note_finished(0, EngineEnding.ABSENT) == [RunFinished(EngineEnding.DRAINED)]


def test_a_slot_that_finished_for_a_reason_of_its_own_ends_the_pipeline_for_that_reason() -> None:
    group = SlotGroup(3)
    assert group.note_finished(1, EngineEnding.FENCED, "taken") == [DrainSlot(0), DrainSlot(2)]
    assert group.note_finished(1, EngineEnding.FENCED, "taken") == []
    assert group.note_finished(0, EngineEnding.CRASHED, "later") == []
    assert group.note_finished(2, EngineEnding.DRAINED) == [RunFinished(EngineEnding.FENCED, 1, "taken")]


calls = st.lists(
    st.tuples(
        st.sampled_from(["connected", "ready", "owns", "tick", "finished", "drain"]),
        st.integers(0, 3),
        st.sampled_from(EngineEnding),
    )
)


@given(st.integers(1, 4), calls)
def test_a_run_ends_once_after_its_last_slot_and_no_slot_overtakes_slot_0(
    slots: int, script: list[tuple[str, int, EngineEnding]]
) -> None:
    group = SlotGroup(slots)
    ready_0 = False
    ready: set[int] = set()
    gone: set[int] = set()
    begun: set[int] = set()
    waiting: set[int] = set()
    finished: list[EngineEnding] = []
    seen: set[int] = set()
    ends = consumes = 0
    for now, (call, number, ending) in enumerate(script):
        slot = number % slots
        was_draining = group.draining
        match call:
            case "connected":
                effects = group.note_connected(slot)
                waiting.add(slot)
            case "ready":
                if slot not in begun:
                    continue  # an engine says so only after it was let begin
                effects = group.note_ready(slot, float(now))
                ready_0 = ready_0 or (slot == 0 and not was_draining)
                ready.add(slot)
            case "owns":
                effects = group.note_partitions(slot) if slot in gone else []
            case "tick":
                effects = group.tick(float(now))
            case "finished":
                effects = group.note_finished(slot, ending)
                if slot not in seen:
                    seen.add(slot)
                    finished.append(ending)
            case _:
                effects = group.drain()
        for effect in effects:
            match effect:
                case PrepareSlot(other):
                    assert not was_draining
                    begun.add(other)
                    assert other in waiting, "nobody is there to begin"
                    assert other == 0 or ready_0
                case SubscribeSlot(other):
                    assert not was_draining
                    assert other in ready, "it subscribes before it is ready"
                    gone.add(other)
                case Consume():
                    assert not was_draining
                    consumes += 1
                case DrainSlot(other):
                    assert not was_draining
                    assert other not in seen
                case RunFinished(end, _, _):
                    ends += 1
                    bad = [one for one in finished if one not in (EngineEnding.DRAINED, EngineEnding.ABSENT)]
                    assert end is (bad[0] if bad else EngineEnding.DRAINED)
        if not group.draining and (len(ready) == slots or not group.holding):
            assert gone >= ready, "all are ready, and one still waits"
        assert consumes == int(not group.holding and slots > 1)
        assert not group.draining or group.due is None
        assert ends == int(len(seen) == slots)
