"""All slots of a pipeline: who may begin, and how it ends."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.roster import Begin, DrainSlot, Go, Roster, RunFinished
from tidemill.core.slot_events import Ending


def test_slot_0_is_ready_before_the_others_begin_and_those_there_subscribe_together() -> None:
    roster = Roster(4)
    assert roster.connected(3) == []
    assert roster.connected(2) == []
    assert roster.connected(0) == [Begin(0)]
    assert roster.ready(0) == [Begin(2), Begin(3)]
    assert roster.connected(1) == [Begin(1)]
    assert roster.ready(3) == []
    assert roster.ready(1) == [Go(1)], "who comes later is not waited for and does not wait"
    assert roster.ready(2) == [Go(0), Go(3), Go(2)]


def test_slot_0_waits_for_nobody_if_nobody_is_there() -> None:
    roster = Roster(2)
    roster.connected(0)
    assert roster.ready(0) == [Go(0)]


def test_later_starts_are_not_held_up() -> None:
    roster = Roster(2)
    roster.connected(0)
    roster.ready(0)
    roster.connected(1)
    assert roster.connected(0) == [Begin(0)]
    assert roster.connected(1) == [Begin(1)]
    assert roster.ready(1) == [Go(1)]
    assert roster.ready(0) == [Go(0)]


def test_a_drain_goes_to_every_slot_and_nothing_begins_after_it() -> None:
    roster = Roster(2)
    roster.connected(1)
    assert roster.drain() == [DrainSlot(0), DrainSlot(1)]
    assert roster.draining
    assert roster.drain() == []
    assert roster.connected(0) == []
    assert roster.ready(0) == []
    assert roster.finished(1, Ending.DRAINED) == []
    assert roster.finished(0, Ending.ABSENT) == [RunFinished(Ending.DRAINED)]


def test_a_slot_that_finished_for_a_reason_of_its_own_ends_the_pipeline_for_that_reason() -> None:
    roster = Roster(3)
    assert roster.finished(1, Ending.FENCED, "taken") == [DrainSlot(0), DrainSlot(2)]
    assert roster.finished(1, Ending.FENCED, "taken") == []
    assert roster.finished(0, Ending.CRASHED, "later") == []
    assert roster.finished(2, Ending.DRAINED) == [RunFinished(Ending.FENCED, 1, "taken")]


calls = st.lists(
    st.tuples(st.sampled_from(["connected", "ready", "finished", "drain"]), st.integers(0, 3), st.sampled_from(Ending))
)


@given(st.integers(1, 4), calls)
def test_a_run_ends_once_after_its_last_slot_and_nobody_overtakes_slot_0(
    slots: int, script: list[tuple[str, int, Ending]]
) -> None:
    roster = Roster(slots)
    ready_0 = False
    ready: set[int] = set()
    gone: set[int] = set()
    begun: set[int] = set()
    waiting: set[int] = set()
    finished: list[Ending] = []
    seen: set[int] = set()
    ends = 0
    for call, number, ending in script:
        slot = number % slots
        was_draining = roster.draining
        match call:
            case "connected":
                effects = roster.connected(slot)
                waiting.add(slot)
            case "ready":
                if slot not in begun:
                    continue  # an engine says so only after it was let begin
                effects = roster.ready(slot)
                ready_0 = ready_0 or (slot == 0 and not was_draining)
                ready.add(slot)
            case "finished":
                effects = roster.finished(slot, ending)
                if slot not in seen:
                    seen.add(slot)
                    finished.append(ending)
            case _:
                effects = roster.drain()
        for effect in effects:
            match effect:
                case Begin(other):
                    assert not was_draining
                    begun.add(other)
                    assert other in waiting, "nobody is there to begin"
                    assert other == 0 or ready_0
                case Go(other):
                    assert not was_draining
                    assert other in ready, "it subscribes before it is ready"
                    gone.add(other)
                case DrainSlot(other):
                    assert not was_draining
                    assert other not in seen
                case RunFinished(end, _, _):
                    ends += 1
                    bad = [one for one in finished if one not in (Ending.DRAINED, Ending.ABSENT)]
                    assert end is (bad[0] if bad else Ending.DRAINED)
        if not roster.draining and ready_0 and ready >= waiting:
            assert gone >= ready, "all who are there are ready, and one still waits"
        assert ends == int(len(seen) == slots)
