"""The brake, compared with a model that keeps every outcome and scans all of them each time."""

from __future__ import annotations

import random
import time
from collections import Counter
from itertools import pairwise

import pytest
from tests.core.examples import examples

from tidemill.core.pipeline.brake import (
    LEAST,
    TRIAL_SECONDS,
    WINDOW,
    Again,
    Brake,
    Effect,
    HoldCase,
    Off,
    On,
    TakeOne,
    Write,
)

Message = tuple[str, int]


class Model:
    """The expected effects of a brake, by scanning everything."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.outcomes: list[str | None] = []
        self.on = False
        self.due = 0.0
        self.queue: list[tuple[Message, str]] = []
        self.trials: list[Message] = []

    def note_finished(self, message: Message, cause: str | None, now: float) -> list[Effect[str]]:
        if self.on:
            return self.note_success(message) if cause is None else []
        self.outcomes.append(cause)
        return self.judge(now)

    def judge(self, now: float) -> list[Effect[str]]:
        last = self.outcomes[-WINDOW:]
        if len(last) >= LEAST and sum(each is not None for each in last) / len(last) > self.ratio:
            self.on, self.due = True, now + TRIAL_SECONDS
            return [On()]
        return []

    def note_window_failure(self, count: int, now: float) -> list[Effect[str]]:
        last = range(max(0, len(self.outcomes) - WINDOW), len(self.outcomes))
        well = [index for index in last if self.outcomes[index] is None]
        for index in well[::-1][:count]:
            self.outcomes[index] = "window"
        return [] if self.on else self.judge(now)

    def note_success(self, message: Message) -> list[Effect[str]]:
        if message not in self.trials:
            return []
        return [Off(), *(Again(case) for case in self.turn_off())]

    def turn_off(self) -> list[str]:
        self.on = False
        self.outcomes, self.trials = [], []
        messages = list(dict.fromkeys(message for message, _ in self.queue))
        queue, self.queue = self.queue, []
        return [case for wanted in messages for message, case in queue if message == wanted]

    def note_failure(self, message: Message, case: str) -> list[Effect[str]]:
        if not self.on:
            return [Write(case)]
        self.trials = [each for each in self.trials if each != message]
        self.queue.append((message, case))
        return [HoldCase(case)]

    def tick(self, now: float) -> list[Effect[str]]:
        if not self.on or now < self.due:
            return []
        self.due = now + TRIAL_SECONDS
        if not self.queue:
            return [TakeOne()]
        first = self.queue[0][0]
        self.trials.append(first)
        cases = [case for message, case in self.queue if message == first]
        self.queue = [each for each in self.queue if each[0] != first]
        return [Again(case) for case in cases]

    def release(self) -> list[Effect[str]]:
        return [Off(), *(Write(case) for case in self.turn_off())] if self.on else []

    def abandon(self, lane: str) -> None:
        self.queue = [each for each in self.queue if each[0][0] != lane]
        self.trials = [each for each in self.trials if each[0] != lane]


def play(seed: int) -> None:
    dice = random.Random(seed)
    ratio = dice.choice([0.1, 0.5, 0.9])
    brake: Brake[str, str] = Brake(ratio)
    model = Model(ratio)
    now = 0.0
    seen_cases: set[str] = set()
    settled: Counter[str] = Counter()
    gone: set[str] = set()
    number = 0
    share = dice.random()

    def apply(said: object, expected: list[Effect[str]]) -> None:
        effects = list(said)  # type: ignore[call-overload]
        assert effects == expected, f"seed {seed}"
        for effect in effects:
            if isinstance(effect, (Again, Write)):
                settled[effect.case] += 1
            if isinstance(effect, Write):
                assert not brake.is_on, "written while it is on"

    for step in range(700):
        message = (dice.choice("ab"), dice.randrange(30))
        now += dice.random()
        if step % 150 == 0:
            share = dice.random()
        kind = dice.choices(
            ["pass", "fail", "succeed", "tick", "taken", "release", "abandon", "late", "spoiled"],
            [60 * (1 - share), 60 * share, 2, 6, 1, 0.3, 0.3, 1, 0.3],
        )[0]
        match kind:
            case "pass":
                apply(brake.note_finished(message, None, now), model.note_finished(message, None, now))
            case "succeed":
                apply(brake.note_success(message), model.note_success(message))
            case "fail":
                number += 1
                case = f"{message[0]}{number}"
                seen_cases.add(case)
                apply(brake.note_failure(message, f"text {number}", case), model.note_failure(message, case))
                assert brake.summarize().last == f"text {number}"
                if not brake.is_on:
                    apply(brake.note_finished(message, "cause", now), model.note_finished(message, "cause", now))
            case "spoiled":
                count = dice.randint(0, 20)
                apply(brake.note_window_failure(count, "window", now), model.note_window_failure(count, now))
            case "late":
                apply(brake.note_finished(message, "cause", now), model.note_finished(message, "cause", now))
            case "tick":
                now += dice.choice([1.0, 20.0])
                apply(brake.tick(now), model.tick(now))
            case "taken":
                brake.note_taken(message)
                model.trials.append(message)
            case "release":
                apply(brake.release(), model.release())
            case "abandon":
                gone |= {case for (lane, _), case in model.queue if lane == message[0]}
                brake.abandon(message[0])
                model.abandon(message[0])
        assert brake.is_on is model.on
        assert brake.due == (model.due if model.on else None), "while it is on, a trial is due"
        assert brake.held == len({message for message, _ in model.queue})
        assert not model.queue or brake.is_on, "something is held while it is off"
        standing, last = brake.summarize(), model.outcomes[-WINDOW:]
        assert (standing.failed, standing.of) == (sum(each is not None for each in last), len(last))
    held = {case for _, case in model.queue}
    assert seen_cases == set(settled) | held | gone, "a case was forgotten"
    assert set(settled.values()) <= {1}, "a case was settled twice"
    assert not held & set(settled)


@pytest.mark.parametrize("part", range(4))
def test_the_brake_agrees_with_the_model_and_forgets_no_case(part: int) -> None:
    for seed in range(part * 25, part * 25 + examples(25)):
        play(seed)


def fill(brake: Brake[str, str], count: int, cause: str = "exit code 1") -> list[Effect[str]]:
    effects: list[Effect[str]] = []
    for n in range(count):
        effects += brake.note_failure(("a", n), "text", f"case {n}")
        if not brake.is_on:
            effects += brake.note_finished(("a", n), cause, 0.0)
    return effects


def on() -> Brake[str, str]:
    """Return a brake that is on and holds two messages."""
    brake: Brake[str, str] = Brake(0.5)
    fill(brake, LEAST + 2)
    assert brake.held == 2
    return brake


def test_fewer_than_fifty_finished_messages_are_not_judged() -> None:
    brake: Brake[str, str] = Brake(0.5)
    assert fill(brake, 49) == [Write(f"case {n}") for n in range(49)]
    assert not brake.is_on
    assert list(brake.note_finished(("a", 99), None, 1.0)) == [On()], "the fiftieth makes them enough, however it ended"


def test_only_the_last_two_hundred_count() -> None:
    brake: Brake[str, str] = Brake(0.5)
    for n in range(1_000):
        brake.note_finished(("a", n), None, 0.0)
    assert len(fill(brake, 100)) == 100
    assert not brake.is_on
    assert list(brake.note_finished(("a", 100), "c", 0.0)) == [On()]


def test_the_brake_is_off_while_the_ratio_only_equals_the_limit() -> None:
    brake: Brake[str, str] = Brake(0.5)
    for n in range(100):
        brake.note_finished(("a", n), None, 0.0)
    fill(brake, 100)
    assert not brake.is_on


def test_failures_while_the_brake_is_on_are_held_and_not_counted() -> None:
    brake = on()
    assert list(brake.note_failure(("a", 60), "text", "case 60")) == [HoldCase("case 60")]
    assert list(brake.note_finished(("a", 61), None, 1.0)) == [], "it was not tried"
    assert list(brake.note_finished(("a", 62), "cause", 1.0)) == []
    assert (brake.summarize().of, brake.summarize().held) == (50, 3)


def test_held_messages_are_tried_in_turn_and_one_that_fails_again_goes_to_the_end() -> None:
    brake = on()
    assert list(brake.tick(29.9)) == []
    assert list(brake.tick(30.0)) == [Again("case 50")]
    assert list(brake.note_failure(("a", 50), "text", "case 50")) == [HoldCase("case 50")]
    assert [list(brake.tick(at)) for at in (60.0, 90.0)] == [[Again("case 51")], [Again("case 50")]]


def test_all_cases_of_a_message_are_tried_together() -> None:
    brake = on()
    brake.note_failure(("a", 50), "text", "its other case")
    assert list(brake.tick(30.0)) == [Again("case 50"), Again("its other case")]
    brake.note_failure(("a", 50), "text", "its other case")
    assert list(brake.note_success(("a", 50))) == [], "one of them failed again"


def test_one_successful_trial_clears_the_count_and_runs_the_others_again() -> None:
    brake = on()
    brake.tick(30.0)
    assert list(brake.note_finished(("a", 51), None, 31.0)) == []
    assert list(brake.note_finished(("a", 50), None, 31.0)) == [Off(), Again("case 51")]
    assert brake.summarize().of == 0
    assert len(fill(brake, 49)) == 49
    assert not brake.is_on


def test_a_release_writes_what_is_held_and_starts_over() -> None:
    brake: Brake[str, str] = Brake(0.5)
    assert list(brake.release()) == []
    brake = on()
    assert list(brake.release()) == [Off(), Write("case 50"), Write("case 51")]
    assert list(brake.note_failure(("a", 9), "text", "next")) == [Write("next")]


def test_the_messages_of_a_failed_window_count_as_failed() -> None:
    brake: Brake[str, str] = Brake(0.5)
    for n in range(60):
        brake.note_finished(("a", n), None, 0.0)
    assert list(brake.note_window_failure(30, "on_window_complete", 0.0)) == []
    assert list(brake.note_window_failure(1, "on_window_complete", 0.0)) == [On()]
    assert (brake.summarize().failed, brake.summarize().of) == (31, 60)
    assert list(brake.note_window_failure(100, "on_window_complete", 0.0)) == []


def test_with_nothing_held_one_message_is_taken_and_tried() -> None:
    brake = on()
    brake.abandon("a")
    assert list(brake.tick(30.0)) == [TakeOne()]
    brake.note_taken(("b", 1))
    assert list(brake.note_success(("b", 1))) == [Off()]


def test_the_summary_names_the_most_frequent_cause_and_its_count() -> None:
    brake: Brake[str, str] = Brake(0.1)
    assert (brake.summarize().cause, brake.summarize().times) == ("", 0)
    for n in range(44):
        brake.note_finished(("a", n), None, 0.0)
    fill(brake, 2, "parse: ValueError")
    fill(brake, 9, "exit code 1")
    standing = brake.summarize()
    assert (standing.failed, standing.of, standing.cause, standing.times) == (6, 50, "exit code 1", 4)
    assert (standing.held, standing.last) == (5, "text")


def test_a_message_costs_the_same_however_many_are_held() -> None:
    costs = []
    for count in (1_000, 50_000):
        began = time.process_time()
        brake = on()
        for n in range(count):
            brake.note_failure(("a", n), "text", "case")
        brake.release()
        costs.append((time.process_time() - began) / count)
    print([f"{cost * 1e6:.2f} us" for cost in costs])
    assert all(later < earlier * 8 for earlier, later in pairwise(costs))
