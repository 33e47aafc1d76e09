"""Order per key: which tasks may start, compared with a model that scans every open task each time."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
from tests.core.examples import examples

from tidemill.core.pipeline.key_order import KeyOrder


@dataclass(eq=False)
class ModelEntry:
    """A task, or the hook of a message, at its place in the order."""

    messages: dict[str, set[int]]
    open: set[str]
    name: str = ""


@dataclass
class Model:
    """Everything that is open, in order; each call scans all of it."""

    entries_of_model: list[ModelEntry] = field(default_factory=list)
    started: set[str] = field(default_factory=set)

    def arranged(self, tasks: list[tuple[str, list[int]]], keys: dict[int, str | None], hooked: bool) -> None:
        ordered = sorted(tasks, key=lambda pair: min(pair[1] or keys))
        entries: list[ModelEntry] = []
        for name, offsets in ordered:
            messages: dict[str, set[int]] = {}
            for offset in offsets or sorted(keys):
                if (key := keys[offset]) is not None:
                    messages.setdefault(key, set()).add(offset)
            entries.append(ModelEntry(messages, {name}, name))
        if hooked:
            for offset, key in keys.items():
                theirs = [entry for entry in entries if key is not None and offset in entry.messages.get(key, ())]
                if theirs and key is not None:
                    entries.insert(entries.index(theirs[-1]) + 1, ModelEntry({key: {offset}}, {f"hook {offset}"}))
        self.entries_of_model += entries

    def is_before(self, earlier: ModelEntry, later: ModelEntry) -> bool:
        """Return whether a task has to wait for an earlier one, or for a hook."""
        return any(
            not (len(messages) == 1 and messages == later.messages[key])
            for key, messages in earlier.messages.items()
            if key in later.messages
        )

    def may_start(self) -> set[str]:
        free: set[str] = set()
        for index, entry in enumerate(self.entries_of_model):
            if not any(other.open and self.is_before(other, entry) for other in self.entries_of_model[:index]):
                free |= {name for name in entry.open if not name.startswith("hook")}
        return free - self.started

    def close(self, name: str) -> None:
        for entry in self.entries_of_model:
            entry.open.discard(name)

    def hooks_due(self) -> list[int]:
        """Return the messages whose tasks are all done and whose hook is not."""
        due = []
        for entry in self.entries_of_model:
            for name in entry.open:
                if name.startswith("hook"):
                    ((key, (offset,)),) = entry.messages.items()
                    tasks = [
                        each for each in self.entries_of_model if each.name and offset in each.messages.get(key, ())
                    ]
                    if not any(each.open for each in tasks):
                        due.append(offset)
        return due


def draw_window(
    dice: random.Random, first: int, number: int
) -> tuple[list[tuple[str, list[int]]], dict[int, str | None]]:
    keys = {first + n: dice.choice(["a", "b", "c", None]) for n in range(dice.randint(1, 6))}
    tasks = []
    for index in range(dice.randint(0, 8)):
        count = dice.choice([1, 1, 1, 2, 3, len(keys), 0])
        offsets = sorted(dice.sample(sorted(keys), min(count, len(keys))))
        tasks.append((f"w{number}.{index}", offsets))
    return tasks, keys


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("part", range(4))
def test_tasks_start_as_in_the_model_and_none_waits_for_ever(hooked: bool, part: int) -> None:
    for seed in range(part * 150, part * 150 + examples(150)):
        play(seed, hooked)


def play(seed: int, hooked: bool) -> None:
    dice = random.Random(seed)
    order: KeyOrder[str] = KeyOrder(hooked=hooked)
    model = Model()
    running: list[str] = []
    offset = 0
    windows = dice.randint(1, 8)
    number = replaced = 0

    def started(names: list[str]) -> None:
        assert len(set(names)) == len(names)
        assert model.may_start() == set(names), f"seed {seed}"
        model.started.update(names)
        running.extend(names)

    while number < windows or running or model.hooks_due():
        due = model.hooks_due()
        choices = ["window"] * (number < windows) + ["done"] * bool(running) * 2
        choices += ["replace"] * (bool(running) and replaced < 20) + ["hook"] * bool(due)
        match dice.choice(choices):
            case "window":
                tasks, keys = draw_window(dice, offset, number)
                offset += len(keys)
                number += 1
                model.arranged(tasks, keys, hooked)
                started(order.add_tasks(tasks, keys))
            case "done":
                name = running.pop(dice.randrange(len(running)))
                model.close(name)
                started(order.note_task_done(name))
                assert order.note_task_done(name) == [], "a second end changes nothing"
            case "replace":
                name = running.pop(dice.randrange(len(running)))
                others = [f"{name}/{n}" for n in range(dice.randint(0, 2))]
                replaced += 1
                entry = next(each for each in model.entries_of_model if name in each.open)
                entry.open = entry.open - {name} | set(others)
                started(order.replace(name, others))
            case "hook":
                message = dice.choice(due)
                model.close(f"hook {message}")
                started(order.note_message_done(message))
                assert order.note_message_done(message) == []
        waiting = {name for entry in model.entries_of_model for name in entry.open if not name.startswith("hook")}
        assert order.waiting_tasks == len(waiting - model.started)
    assert not any(entry.open for entry in model.entries_of_model), f"seed {seed}: something waits for ever"
    assert (order.waiting_tasks, order.waiting_messages) == (0, 0)
    assert [*order._queues, *order._positions, *order._hooks] == [], "memory is what is open"


@pytest.mark.parametrize("part", range(2))
def test_tasks_that_are_withdrawn_while_they_wait_let_nothing_start_early_or_never(part: int) -> None:
    for seed in range(part * 200, part * 200 + examples(200)):
        play_with_withdrawals(seed)


def play_with_withdrawals(seed: int) -> None:
    dice = random.Random(seed)
    order: KeyOrder[str] = KeyOrder()
    model = Model()
    running: list[str] = []
    waiting: list[str] = []
    offset = 0

    def started(names: list[str]) -> None:
        assert set(names) <= model.may_start(), f"seed {seed}"
        model.started.update(names)
        running.extend(names)
        for name in names:
            waiting.remove(name)

    for number in range(6):
        tasks, keys = draw_window(dice, offset, number)
        offset += len(keys)
        model.arranged(tasks, keys, False)
        waiting += [name for name, _ in tasks]
        started(order.add_tasks(tasks, keys))
        for _ in range(dice.randint(0, 4)):
            if waiting and dice.random() < 0.5:
                name = waiting.pop(dice.randrange(len(waiting)))
                if dice.random() < 0.5:
                    others = [f"{name}/{n}" for n in range(dice.randint(1, 2))]
                    entry = next(each for each in model.entries_of_model if name in each.open)
                    entry.open = entry.open - {name} | set(others)
                    waiting += others
                    started(order.replace(name, others))
                    continue
            elif running:
                name = running.pop(dice.randrange(len(running)))
            else:
                break
            model.close(name)
            started(order.note_task_done(name))
    while running:
        name = running.pop()
        model.close(name)
        started(order.note_task_done(name))
    assert waiting == [], f"seed {seed}: {waiting} never start"
    assert (order.waiting_tasks, order.waiting_messages) == (0, 0)
    assert [*order._queues, *order._positions] == []


def test_tasks_of_one_message_run_in_parallel_and_those_of_the_next_with_its_key_wait_for_all() -> None:
    order: KeyOrder[str] = KeyOrder()
    assert order.add_tasks([("a", [1]), ("b", [1]), ("c", [2])], {1: "k", 2: "k"}) == ["a", "b"]
    assert order.note_task_done("b") == []
    assert order.note_task_done("a") == ["c"]


def test_tasks_are_ordered_by_smallest_offset_and_then_by_index() -> None:
    order: KeyOrder[str] = KeyOrder()
    tasks = [("late", [2]), ("both", [1, 2]), ("early", [1])]
    assert order.add_tasks(tasks, {1: "k", 2: "k"}) == ["both"]
    assert order.note_task_done("both") == ["early"]
    assert order.note_task_done("early") == ["late"]


def test_a_task_without_offsets_works_for_every_message_of_its_window() -> None:
    order: KeyOrder[str] = KeyOrder()
    assert order.add_tasks([("all", ()), ("other", [3])], {1: "k", 2: "l", 3: None}) == ["all", "other"]
    assert order.add_tasks([("k", [4]), ("l", [5]), ("m", [6])], {4: "k", 5: "l", 6: "m"}) == ["m"]
    assert order.note_task_done("all") == ["k", "l"]


def test_a_key_is_open_until_its_tasks_and_the_hooks_of_their_messages_are_done() -> None:
    order: KeyOrder[str] = KeyOrder(hooked=True)
    assert not order.is_open("a")
    order.add_tasks([("first", [1])], {1: "a", 2: "b"})
    assert order.is_open("a")
    assert not order.is_open("b"), "its message has no task"
    order.note_task_done("first")
    assert order.is_open("a")
    order.note_message_done(1)
    assert not order.is_open("a")


def test_messages_without_a_key_never_wait() -> None:
    order: KeyOrder[str] = KeyOrder()
    assert order.add_tasks([("a", [1]), ("b", [2])], {1: None, 2: None}) == ["a", "b"]
    assert order.replace("a", ["a2"]) == ["a2"]
    assert order.note_task_done("a2") == []


def test_a_message_counts_as_waiting_once_until_none_of_its_tasks_waits() -> None:
    order: KeyOrder[str] = KeyOrder()
    order.add_tasks([("a", [1]), ("b", [2])], {1: "k", 2: "l"})
    order.add_tasks([("c", [3]), ("d", [3, 4])], {3: "k", 4: "l"})
    assert (order.waiting_messages, order.waiting_tasks) == (2, 2)
    assert order.note_task_done("a") == ["c"]
    assert (order.waiting_messages, order.waiting_tasks) == (2, 1)
    assert order.note_task_done("b") == ["d"], "both are of message 3"
    assert (order.waiting_messages, order.waiting_tasks) == (0, 0)


def test_nothing_is_left_of_a_partition_that_was_given_up() -> None:
    order: KeyOrder[str] = KeyOrder(hooked=True)
    order.add_tasks([("a", [1]), ("b", [2])], {1: "k", 2: "k"})
    order.clear()
    assert (order.note_task_done("a"), order.note_message_done(1)) == ([], [])
    assert (order.waiting_messages, order.waiting_tasks) == (0, 0)
    assert order.add_tasks([("c", [3])], {3: "k"}) == ["c"]


def cost_of(count: int) -> float:
    """Return the seconds per task of a queue of this many tasks of one key."""
    order: KeyOrder[int] = KeyOrder(hooked=True)
    keys = dict.fromkeys(range(count), "k")
    began = time.process_time()
    order.add_tasks([(n, [n]) for n in range(count)], keys)
    for n in range(count):
        order.note_message_done(n)
        order.note_task_done(n)
    return (time.process_time() - began) / count


def test_a_task_costs_the_same_however_long_its_queue_is() -> None:
    short = min(cost_of(1_000) for _ in range(5))
    long = min(cost_of(20_000) for _ in range(3))
    print(f"{short * 1e6:.1f} us a task in a line of 1,000, {long * 1e6:.1f} us in one of 20,000")
    assert long < short * 8


def test_waiting_messages_are_known():
    order: KeyOrder[str] = KeyOrder()
    order.add_tasks([("a", [10]), ("b", [11])], {10: b"x", 11: b"x"})
    assert [order.is_waiting(offset) for offset in (10, 11, 12)] == [False, True, False]
    order.note_task_done("a")
    assert not order.is_waiting(11)


def test_the_message_that_a_task_waits_for_is_known() -> None:
    order: KeyOrder[str] = KeyOrder(hooked=True)
    order.add_tasks([("a", [10]), ("b", [11]), ("c", [12])], {10: b"x", 11: b"x", 12: b"y"})
    assert [order.find_blocker(task) for task in ("a", "b", "c", "unknown")] == [None, 10, None, None]
    assert [order.find_waiting_task(offset) for offset in (10, 11, 12)] == [None, "b", None]
    order.note_task_done("a")
    assert order.find_blocker("b") == 10, "its hook has not run"
    order.note_message_done(10)
    assert order.find_blocker("b") is None


def test_a_task_behind_one_for_several_messages_waits_for_the_first_of_them() -> None:
    order: KeyOrder[str] = KeyOrder()
    order.add_tasks([("all", []), ("late", [11])], {10: b"x", 11: b"x"})
    assert order.find_blocker("late") == 10
