"""The graph of messages and tasks, compared with a model made of sets."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.core.examples import examples

from tidemill.core.errors import InvariantError
from tidemill.core.pipeline.arrangement import Arrangement, Effect, MessageComplete, MessageResolved, WindowComplete

picks = st.integers(0, 1000)


class ArrangementAgainstSets(RuleBasedStateMachine):
    """The model: per message the set of its open tasks, a multiset of holds, and the messages whose hook was due."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 0
        self.tasks: dict[int, set[int]] = {}
        self.ever: list[int] = []
        self.holds: Counter[int] = Counter()
        self.open_holds: list[list[int]] = []
        self.complete: set[int] = set()
        self.hooked: set[int] = set()
        self.resolved: set[int] = set()
        self.window = 0

    @initialize(size=st.integers(0, 6), data=st.data())
    def arranged(self, size: int, data: st.DataObject) -> None:
        self.size = size
        self.graph = Arrangement(size)
        indexes = st.lists(st.integers(0, size - 1), unique=True) if size else st.just([])
        tasks = data.draw(st.lists(indexes, max_size=6))
        for key, own in enumerate(tasks):
            self.tasks[key] = set(own) or set(range(size))
            self.ever.append(key)
        self.take(self.graph.set_tasks(list(enumerate(tasks))))

    def waiting_for(self, index: int) -> set[int]:
        return {key for key, own in self.tasks.items() if index in own}

    def take(self, effects: list[Effect]) -> None:
        """Check that each effect is allowed by the sets, and new."""
        for effect in effects:
            match effect:
                case MessageComplete(index):
                    assert index not in self.complete
                    assert not self.waiting_for(index)
                    self.complete.add(index)
                case MessageResolved(index):
                    assert index not in self.resolved
                    assert index in self.hooked
                    assert not self.holds[index]
                    self.resolved.add(index)
                case WindowComplete():
                    self.window += 1

    @rule(pick=picks)
    def a_task_ends(self, pick: int) -> None:
        if self.ever:
            key = self.ever[pick % len(self.ever)]
            self.tasks.pop(key, None)
            self.take(self.graph.note_task_done(key))

    @rule(pick=picks, count=st.integers(0, 3))
    def a_task_is_replaced(self, pick: int, count: int) -> None:
        if self.ever:
            key = self.ever[pick % len(self.ever)]
            own = self.tasks.pop(key, None)
            new = list(range(len(self.ever), len(self.ever) + count))
            if own is not None:
                self.tasks.update(dict.fromkeys(new, own))
            self.ever += new
            self.take(self.graph.replace(key, new))

    @rule(pick=picks)
    def a_hook_ends(self, pick: int) -> None:
        if self.size:
            index = pick % self.size
            if index in self.complete:
                self.hooked.add(index)
            self.take(self.graph.note_hook_done(index))

    @rule(data=st.data())
    def a_delivery_opens(self, data: st.DataObject) -> None:
        open_ = [index for index in range(self.size) if index not in self.resolved]
        if open_:
            indexes = data.draw(st.lists(st.sampled_from(open_), unique=True, min_size=1))
            self.holds.update(indexes)
            self.open_holds.append(indexes)
            self.graph.hold(indexes)

    @rule(pick=picks)
    def a_delivery_is_confirmed(self, pick: int) -> None:
        if self.open_holds:
            indexes = self.open_holds.pop(pick % len(self.open_holds))
            self.holds.subtract(indexes)
            self.take(self.graph.release(indexes))

    @rule(pick=picks)
    def somebody_is_late(self, pick: int) -> None:
        if self.resolved:
            index = sorted(self.resolved)[pick % len(self.resolved)]
            self.graph.hold([index])
            assert self.graph.release([index, index]) == []
            assert self.graph.note_hook_done(index) == []
        assert self.graph.note_task_done("unknown") == []
        assert self.graph.replace("unknown", ["x"]) == []
        assert self.graph.find_indexes("x") == ()

    @invariant()
    def nothing_is_forgotten(self) -> None:
        everything = set(range(self.size)) if hasattr(self, "graph") else set()
        assert self.complete == {index for index in everything if not self.waiting_for(index)}
        assert self.resolved == {index for index in self.hooked if not self.holds[index]}
        assert self.window == int(hasattr(self, "graph") and self.hooked == everything)
        for key, own in self.tasks.items():
            assert set(self.graph.find_indexes(key)) == own


TestArrangementAgainstSets = ArrangementAgainstSets.TestCase
TestArrangementAgainstSets.settings = settings(max_examples=examples(100), stateful_step_count=40)


@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_whatever_the_order_every_message_is_resolved_once_and_the_window_completes_once(size: int, random) -> None:
    graph = Arrangement(size)
    tasks = [(key, random.sample(range(size), random.randint(0, size))) for key in range(random.randint(0, 5))]
    todo = [("effects", graph.set_tasks(tasks)), *(("task", key) for key, _ in tasks)]
    seen: Counter[Effect] = Counter()
    while todo:
        kind, what = todo.pop(random.randrange(len(todo)))
        effects = {
            "effects": lambda what=what: what,
            "task": lambda what=what: graph.note_task_done(what),
            "hook": lambda what=what: graph.note_hook_done(what),
            "release": lambda what=what: graph.release([what]),
        }[kind]()
        seen.update(effects)
        for effect in effects:
            if isinstance(effect, MessageComplete):
                if random.random() < 0.5:
                    graph.hold([effect.index])
                    todo.append(("release", effect.index))
                todo.append(("hook", effect.index))
    expected: Counter[Effect] = Counter([WindowComplete()])
    for index in range(size):
        expected.update([MessageComplete(index), MessageResolved(index)])
    assert seen == expected


def test_a_message_without_a_task_completes_at_once() -> None:
    assert Arrangement(2).set_tasks([("task", [1])]) == [MessageComplete(0)]


def test_fan_in_reports_one_task_to_each_of_its_messages() -> None:
    graph = Arrangement(3)
    assert graph.set_tasks([("task", [])]) == []
    assert list(graph.find_indexes("task")) == [0, 1, 2]
    assert graph.note_task_done("task") == [MessageComplete(0), MessageComplete(1), MessageComplete(2)]


def test_fan_out_completes_a_message_after_its_last_task() -> None:
    graph = Arrangement(1)
    graph.set_tasks([("a", [0]), ("b", [0])])
    assert graph.note_task_done("b") == []
    assert graph.note_task_done("b") == []
    assert graph.note_task_done("a") == [MessageComplete(0)]


def test_replacements_join_the_messages_and_an_empty_list_ends_the_task() -> None:
    graph = Arrangement(1)
    graph.set_tasks([("a", [0])])
    assert graph.replace("a", ["b", "c"]) == []
    assert graph.note_task_done("b") == []
    assert graph.replace("c", []) == [MessageComplete(0)]


def test_a_message_waits_for_its_hook_and_for_all_its_deliveries() -> None:
    graph = Arrangement(1)
    graph.set_tasks([("a", [0])])
    graph.hold([0])
    graph.hold([0])
    graph.note_task_done("a")
    assert graph.release([0]) == []
    assert graph.note_hook_done(0) == [WindowComplete()]
    assert graph.release([0]) == [MessageResolved(0)]


def test_a_release_without_a_hold_changes_nothing() -> None:
    graph = Arrangement(1)
    graph.set_tasks([])
    assert graph.release([0]) == []
    graph.hold([0])
    assert graph.note_hook_done(0) == [WindowComplete()]
    assert graph.release([0]) == [MessageResolved(0)]
    assert graph.release([0]) == []


def test_a_window_is_arranged_once_and_a_key_is_one_task() -> None:
    graph = Arrangement(1)
    graph.set_tasks([("a", [0]), ("b", [0])])
    with pytest.raises(InvariantError, match="twice"):
        graph.set_tasks([])
    with pytest.raises(InvariantError, match="'b'"):
        graph.replace("a", ["b"])
    with pytest.raises(InvariantError, match="'a'"):
        Arrangement(1).set_tasks([("a", [0]), ("a", [0])])


def test_tasks_that_end_together_complete_what_each_of_them_would_without_message_hooks() -> None:
    window = Arrangement(4)
    window.set_tasks([("a", [0]), ("b", [1]), ("c", [1, 2]), ("d", [3])])
    window.hold([0, 2])
    assert window.end_tasks([]) == (0, [], False)
    assert window.end_tasks(["a", "b", "b", "unknown"]) == (1, [], False)
    assert window.end_tasks(["c"]) == (2, [1], False)
    assert window.release_all([0, 2]) == [0, 2]
    assert window.note_task_done("c") == []
    assert window.end_tasks(["d"]) == (1, [3], True)
    assert window.end_tasks(["d"]) == (0, [], False), "the window's own hook is due once"


def test_a_window_without_tasks_and_hooks_is_resolved_but_for_what_is_held() -> None:
    window = Arrangement(3)
    window.hold([1, 2, 2])
    assert window.complete_all() == [0]
    assert window.release_all([0, 1, 2]) == [1]
    assert window.note_hook_done(2) == [], "its hook is over already"
    assert window.release_all([1, 2]) == [2]
    assert window.release_all([2]) == []
    with pytest.raises(InvariantError):
        window.complete_all()
    with pytest.raises(InvariantError):
        window.set_tasks([])
