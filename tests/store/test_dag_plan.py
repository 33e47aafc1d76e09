from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.dependencies import NOTHING, REMOVED, TOLD, OutcomeTally, TaskOutcome, Told, Upstream
from tidemill.core.tasks.expansion import MapPolicy
from tidemill.core.tasks.structure import DagStructure, MapSource, MapStructure, TaskStructure
from tidemill.store.dag_plan import NO_COUNTS, DagPlan, build_plan, move_counts, read_counts, write_counts

S, F = TaskOutcome.SUCCESS, TaskOutcome.FAILED
parts = st.sampled_from([NOTHING, REMOVED, *TOLD.values()]) | st.builds(
    Told, st.frozensets(st.sampled_from(TaskOutcome), min_size=1), st.booleans()
)


def plan(*tasks: TaskStructure) -> DagPlan:
    return build_plan(DagStructure("d", tuple(sorted(tasks, key=lambda task: task.id))))


def mapped(*factors: MapSource, **limits: int) -> MapStructure:
    return MapStructure(tuple(f"x{place}" for place in range(len(factors))), factors, **limits)


def test_tallies_without_maps_are_stored_as_four_numbers_each() -> None:
    counts = move_counts(NO_COUNTS, (0,), NOTHING, TOLD[S])
    assert write_counts(counts) == "1 0 0 0"
    counts = move_counts(counts, (0, 1), NOTHING, TOLD[F])
    assert write_counts(counts) == "1 1 0 0 0 1 0 0 0 0 0 0"
    assert write_counts(move_counts(NO_COUNTS, (0,), NOTHING, Told(frozenset((S,))))) == "1 0 0 0 1"
    assert write_counts(move_counts(counts, (2,), NOTHING, REMOVED)) == "1 1 0 0 0 0 1 0 0 0 0 0 0 0 -1"
    assert write_counts(NO_COUNTS) == ""
    assert read_counts("") == NO_COUNTS


@given(st.lists(st.tuples(parts, st.sampled_from([(0,), (0, 1), (2,)])), max_size=6), st.data())
def test_stored_tallies_are_those_of_the_state_machine(told, data) -> None:
    upstream, setups, scope = ([name for name, (_, kinds) in enumerate(told) if kind in kinds] for kind in range(3))
    names = [f"t{name}" for name in range(len(told))]
    successor = TaskStructure(
        "u",
        upstream=tuple(names[name] for name in upstream),
        setups=tuple(names[name] for name in setups),
        scope=tuple(names[name] for name in scope),
    )
    task = plan(*map(TaskStructure, names), successor).tasks["u"]
    counts, tallies = NO_COUNTS, [OutcomeTally(len(group)) for group in (upstream, setups, scope)]
    for part, kinds in told:
        before = NOTHING
        for after in (data.draw(parts), part):
            counts = read_counts(write_counts(move_counts(counts, kinds, before, after)))
            for kind in kinds:
                tallies[kind] = tallies[kind].move(before, after)
            before = after
            assert task.build_upstream(counts) == Upstream(*tallies)
    assert counts[3::5] == tuple(tally.skipped for tally in tallies)[: len(counts) // 5]


def test_the_sources_of_a_map_are_upstream_of_it_but_not_in_its_tallies() -> None:
    lines = MapSource("xcom", "lines", "return_value")
    pairs = MapSource("zip", parts=(MapSource("xcom", "ids", "return_value"), MapSource("literal", length=3)))
    one = TaskStructure("map", upstream=("gate", "ids", "lines"), setups=("lines",), mapped=mapped(lines, pairs))
    built = plan(*map(TaskStructure, ("gate", "ids", "lines")), one, TaskStructure("after", upstream=("map",)))
    tasks = built.tasks
    assert tasks["map"].totals == (1, 0, 0)
    assert (tasks["gate"].successors, tasks["gate"].feeds) == ([("map", (0,))], [])
    assert (tasks["ids"].successors, tasks["ids"].feeds) == ([], ["map"])
    assert tasks["ids"].downstream == tasks["gate"].downstream == ["map"]
    assert built.list_downstream(["lines"]) == ["map", "after"]
    assert built.leaves == {"after"}


def test_a_map_that_is_followed_is_in_no_tallies_and_one_that_is_needed_as_a_whole_is() -> None:
    over = MapSource("map", "s", "return_value")
    follows = TaskStructure("f", upstream=("s",), mapped=mapped(over))
    cross = TaskStructure("w", upstream=("s",), mapped=mapped(over, MapSource("literal", length=2)))
    tasks = plan(TaskStructure("s", mapped=mapped(MapSource("literal", length=3))), follows, cross).tasks
    assert (tasks["s"].followers, tasks["s"].feeds, tasks["s"].successors) == (["f"], ["f", "w"], [("w", (0,))])
    assert (tasks["f"].totals, tasks["w"].totals) == ((0, 0, 0), (1, 0, 0))


def test_the_whole_map_has_a_life_of_its_own_and_its_elements_are_plain_tasks() -> None:
    one = TaskStructure("map", retries=3, mapped=mapped(MapSource("literal", length=2)))
    task, plain = (plan(one, TaskStructure("plain", retries=3)).tasks[name] for name in ("map", "plain"))
    assert (task.head_policy.is_map, task.head_policy.retries) == (True, 0)
    assert (task.policy.is_map, task.policy.retries) == (False, 3)
    assert plain.head_policy is plain.policy
    assert plain.build_map_policy(128, 9) is None


@pytest.mark.parametrize(
    ("window", "at_once", "expected"), [(None, None, 128), (7, None, 7), (7, 3, 3), (None, 3, 3), (2, 3, 2)]
)
def test_the_window_of_a_map_is_no_wider_than_its_elements_may_be_active(window, at_once, expected) -> None:
    structure = MapStructure(max_outstanding=window, max_failed_elements=1)
    one = TaskStructure("map", mapped=structure, max_active_per_run=at_once)
    assert plan(one).tasks["map"].build_map_policy(128, 9) == MapPolicy(expected, 1, 9)
