"""Backpressure: shares, hysteresis, and that one lane never pauses another."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.examples import examples

from tidemill.core.pipeline.backpressure import Backpressure

LANES = ("a", "b", "c", "d")


@dataclass
class Load:
    count: int = 0
    uncommitted: int = 0
    sizes: list[int] | None = None
    waiting: int = 0
    held: int = 0
    paused: bool = False


class BackpressureAgainstModel(RuleBasedStateMachine):
    @initialize(
        high=st.integers(1, 40),
        low=st.integers(1, 20),
        window=st.integers(1, 20),
        max_bytes=st.integers(1, 200),
        max_uncommitted=st.integers(1, 30),
        max_undelivered=st.integers(1, 30),
    )
    def begin(
        self, high: int, low: int, window: int, max_bytes: int, max_uncommitted: int, max_undelivered: int
    ) -> None:
        self.limits = (high, low, window, max_bytes, max_uncommitted, max_undelivered)
        self.pressure: Backpressure[str] = Backpressure(*self.limits)
        self.loads: dict[str, Load] = {}

    def high_mark(self) -> int:
        return max(self.limits[2], self.limits[0] // max(1, len(self.loads)))

    def left(self, load: Load) -> int:
        waiting_mark = max(self.limits[2], self.limits[5] // max(1, len(self.loads)))
        return min(self.high_mark() - load.count, self.limits[4] - load.uncommitted, waiting_mark - load.waiting)

    def full(self, load: Load) -> bool:
        share = max(1, self.limits[3] // max(1, len(self.loads)))
        return self.left(load) <= 0 or sum(load.sizes or []) >= share

    def room(self, lane: str) -> int:
        return self.pressure.find_room(lane, 0, self.loads[lane].waiting)

    @rule(lane=st.sampled_from(LANES))
    def a_lane_comes(self, lane: str) -> None:
        assume(lane not in self.loads)
        self.pressure.assign(lane)
        self.loads[lane] = Load(sizes=[])
        assert self.pressure.find_room(lane) > 0, "nothing is in flight, so there is room"

    @rule(lane=st.sampled_from(LANES))
    def a_lane_goes(self, lane: str) -> None:
        self.pressure.revoke(lane)
        self.loads.pop(lane, None)

    @rule(lane=st.sampled_from(LANES), share=st.floats(0, 1), size=st.integers(0, 30))
    def messages_are_handed_over(self, lane: str, share: float, size: int) -> None:
        others = {other: self.room(other) for other in self.loads if other != lane}
        count = int(self.room(lane) * share) if lane in self.loads else 0
        self.pressure.note_handed_over(lane, count, count * size)
        if lane in self.loads:
            load = self.loads[lane]
            load.count += count
            load.uncommitted += count
            load.sizes = [*(load.sizes or []), *[size] * count]
            assert load.count <= self.high_mark() or not count
            assert load.uncommitted <= self.limits[4]
        assert others == {other: self.room(other) for other in self.loads if other != lane}

    @rule(lane=st.sampled_from(LANES), amount=st.integers(-10, 10))
    def messages_wait_for_others_or_cease_to(self, lane: str, amount: int) -> None:
        load = self.loads.get(lane)
        if load is None:
            self.pressure.note_waiting(lane, amount)
            assert self.pressure.find_room(lane) == 0
            return
        amount = max(-load.held, min(amount, load.count))
        load.held += amount
        load.count -= amount
        self.pressure.note_waiting(lane, amount)

    @rule(lane=st.sampled_from(LANES), amount=st.integers(1, 10))
    def work_ends(self, lane: str, amount: int) -> None:
        load = self.loads.get(lane)
        if load is None:
            self.pressure.note_finished(lane, amount, amount)
            assert self.pressure.find_room(lane) == 0
            return
        amount = min(amount, load.count)
        load.count -= amount
        self.pressure.note_finished(lane, amount, 0)

    @rule(lane=st.sampled_from(LANES), amount=st.integers(1, 10))
    def messages_are_let_go(self, lane: str, amount: int) -> None:
        load = self.loads.get(lane)
        if load is not None and load.sizes:
            freed = sum(load.sizes[:amount])
            del load.sizes[:amount]
            self.pressure.note_finished(lane, 0, freed)

    @rule(lane=st.sampled_from(LANES), amount=st.integers(1, 10))
    def a_commit_passes(self, lane: str, amount: int) -> None:
        load = self.loads.get(lane)
        amount = min(amount, load.uncommitted) if load else amount
        if load:
            load.uncommitted -= amount
        self.pressure.note_committed(lane, amount)

    @rule(lane=st.sampled_from(LANES), amount=st.integers(-10, 10))
    def results_wait_for_sinks_or_are_delivered(self, lane: str, amount: int) -> None:
        if lane in self.loads:
            self.loads[lane].waiting = max(0, self.loads[lane].waiting + amount)

    @invariant()
    def a_lane_is_paused_by_its_own_load_with_hysteresis(self) -> None:
        if not hasattr(self, "loads"):
            return
        low_mark = min(self.high_mark() * self.limits[1] // self.limits[0], self.high_mark() - 1)
        for load in self.loads.values():
            if self.full(load):
                load.paused = True
            elif load.count <= low_mark:
                load.paused = False
        assert self.pressure.count_bytes() == sum(sum(load.sizes or []) for load in self.loads.values())
        closed = [lane for lane in self.loads if not self.room(lane)]
        assert closed == [lane for lane, load in self.loads.items() if load.paused]
        for lane, load in self.loads.items():
            assert self.room(lane) == (0 if load.paused else self.left(load))


TestBackpressureAgainstModel = BackpressureAgainstModel.TestCase
TestBackpressureAgainstModel.settings = settings(max_examples=examples(100), stateful_step_count=40)


def test_a_paused_lane_resumes_only_at_its_low_mark() -> None:
    pressure: Backpressure[str] = Backpressure(128, 16, 100, 1 << 26, 10_000, 4_000)
    pressure.assign("a")
    assert pressure.find_room("a") == 128
    pressure.note_handed_over("a", 128, 0)
    assert pressure.find_room("a") == 0
    pressure.note_finished("a", 111, 0)
    assert pressure.find_room("a") == 0
    pressure.note_finished("a", 1, 0)
    assert pressure.find_room("a") == 112


def test_shares_shrink_with_every_lane_but_never_below_a_window() -> None:
    pressure: Backpressure[int] = Backpressure(128, 16, 50, 1 << 26, 10_000, 4_000)
    rooms = []
    for lane in range(4):
        pressure.assign(lane)
        rooms.append(pressure.find_room(0))
    assert (rooms, pressure.lanes) == ([128, 64, 50, 50], 4)


def test_with_many_lanes_one_slow_message_does_not_hold_its_lane() -> None:
    pressure: Backpressure[int] = Backpressure(128, 16, 100, 1 << 26, 10_000, 4_000)
    for lane in range(50):
        pressure.assign(lane)
    pressure.note_handed_over(0, 100, 0)
    pressure.note_finished(0, 99, 0)
    assert pressure.find_room(0) == 99


def test_a_share_of_bytes_and_a_slow_head_pause_too() -> None:
    pressure: Backpressure[str] = Backpressure(128, 16, 100, 1000, 50, 4_000)
    pressure.assign("bytes")
    pressure.assign("head")
    pressure.note_handed_over("bytes", 1, 500)
    assert pressure.find_room("bytes") == 0
    assert pressure.find_room("head") == 50
    pressure.note_finished("bytes", 1, 500)
    assert pressure.find_room("bytes") == 49
    pressure.note_handed_over("head", 50, 0)
    pressure.note_finished("head", 50, 0)
    assert pressure.find_room("head") == 0
    pressure.note_committed("head", 10)
    assert pressure.find_room("head") == 10


def test_a_lane_that_reached_its_limit_is_paused_even_if_nobody_asked_for_room_meanwhile() -> None:
    pressure: Backpressure[str] = Backpressure(10, 2, 1, 1000, 50, 4_000)
    pressure.assign("a")
    pressure.note_handed_over("a", 10, 0)
    pressure.note_finished("a", 5, 0)
    assert pressure.find_room("a") == 0


def test_messages_that_wait_for_others_leave_their_room_until_they_stop() -> None:
    pressure: Backpressure[str] = Backpressure(10, 2, 1, 1000, 50, 4_000)
    pressure.assign("a")
    pressure.note_handed_over("a", 9, 0)
    pressure.note_waiting("a", 6)
    assert pressure.find_room("a") == 7
    pressure.note_handed_over("a", 6, 0)
    pressure.note_waiting("a", -6)
    assert pressure.find_room("a") == 0


def test_reports_about_an_unknown_lane_change_nothing() -> None:
    pressure: Backpressure[str] = Backpressure(10, 2, 1, 1000, 50, 4_000)
    pressure.note_handed_over("a", 10, 10)
    pressure.note_finished("a", 1, 1)
    pressure.note_committed("a", 1)
    pressure.revoke("a")
    assert pressure.find_room("a") == 0


def test_bytes_in_flight_besides_messages_count_too() -> None:
    pressure: Backpressure[str] = Backpressure(10, 2, 1, 1000, 50, 4_000)
    pressure.assign("a")
    pressure.note_handed_over("a", 1, 400)
    assert pressure.find_room("a", 599) == 9
    assert pressure.find_room("a", 600) == 0
    assert pressure.find_room("a", 599) == 9


def test_a_share_of_results_that_wait_for_sinks_pauses_too_but_a_window_always_fits() -> None:
    pressure: Backpressure[str] = Backpressure(100, 20, 10, 1 << 26, 10_000, 50)
    pressure.assign("a")
    assert pressure.find_room("a", 0, 45) == 5
    assert pressure.find_room("a", 0, 50) == 0
    assert pressure.find_room("a", 0, 20) == 30, "nothing else is in flight"
    for lane in range(9):
        pressure.assign(f"other {lane}")
    assert pressure.find_room("a") == 10
    assert pressure.find_room("a", 0, 10) == 0
    assert pressure.find_room("other 1", 0, 0) == 10
