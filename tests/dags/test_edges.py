from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.dags import (
    DAG,
    DagError,
    EmptyOperator,
    Label,
    TaskGroup,
    chain,
    chain_linear,
    cross_downstream,
    setup,
    task,
    task_group,
    teardown,
)
from tidemill.dags.structure.building import build_structure


def edges_of(dag: DAG) -> str:
    """Return the edges, sorted, as text."""
    dag.validate()
    return " ".join(f"{before}>{one.id}" for one in build_structure(dag).tasks for before in one.upstream)


def empties(names: str) -> list[EmptyOperator]:
    return [EmptyOperator(task_id=name) for name in names]


@pytest.mark.parametrize(
    ("draw", "expected"),
    [
        (lambda a, b, c, d: a >> b >> c >> d, "a>b b>c c>d"),
        (lambda a, b, c, d: d << c << b << a, "a>b b>c c>d"),
        (lambda a, b, c, d: a >> [b, c] >> d, "a>b a>c b>d c>d"),
        (lambda a, b, c, d: [a, b] >> c << d, "a>c b>c d>c"),
        (lambda a, b, c, d: [a, b] << c, "c>a c>b"),
        (lambda a, b, c, d: chain(a, [b, c], d), "a>b a>c b>d c>d"),
        (lambda a, b, c, d: chain([a, b], [c, d]), "a>c b>d"),
        (lambda a, b, c, d: chain_linear([a, b], [c, d]), "a>c b>c a>d b>d"),
        (lambda a, b, c, d: cross_downstream([a, b], [c, d]), "a>c b>c a>d b>d"),
        (lambda a, b, c, d: a.set_downstream([b, c]), "a>b a>c"),
        (lambda a, b, c, d: a.set_upstream(b), "b>a"),
        (lambda a, b, c, d: a >> Label("x") >> b, "a>b"),
        (lambda a, b, c, d: [a, b] >> Label("x") >> [c, d], "a>c b>c a>d b>d"),
        (lambda a, b, c, d: a << Label("x") << b, "b>a"),
        (lambda a, b, c, d: chain(a, Label("x"), b, c), "a>b b>c"),
    ],
)
def test_edges_are_drawn(draw: Any, expected: str) -> None:
    with DAG("d") as dag:
        draw(*empties("abcd"))
    assert edges_of(dag) == expected


def test_lists_of_different_lengths_are_not_chained() -> None:
    with DAG("d"):
        a, b, c, _ = empties("abcd")
        with pytest.raises(DagError, match="chain: adjacent lists have 1 and 2 tasks"):
            chain([a], [b, c])


def test_labels_are_kept_with_their_edges() -> None:
    with DAG("d") as dag:
        a, b, c, _ = empties("abcd")
        a >> [Label("one") >> b, Label("two") >> c]
        b >> Label("three") >> c
    structure = {one.id: one for one in build_structure(dag).tasks}
    assert structure["b"].edge_labels == {"c": "three"}


def test_groups_have_ids_edges_and_labels() -> None:
    with DAG("d") as dag:
        start, end, _, _ = empties("abcd")
        with TaskGroup("g", group_display_name="The group") as group:
            x, y = empties("xy")
            x >> y
            with TaskGroup("inner", prefix_group_id=False):
                EmptyOperator(task_id="z")
        start >> group >> end
    assert edges_of(dag) == "g.y>b z>b a>g.x g.x>g.y a>z"
    structure = build_structure(dag)
    assert structure.groups == {"g": "The group", "g.inner": "inner"}
    assert {one.id: (one.group, one.label) for one in structure.tasks}["g.x"] == ("g", "x")


def test_group_functions_pass_outputs_and_may_be_called_twice() -> None:
    with DAG("d") as dag:

        @task
        def add(x: Any, y: Any = 1) -> Any:
            return x + y

        @task_group
        def twice(x: Any) -> Any:
            """Adds twice."""
            return add(add(x))

        @task_group(group_id="other")
        def nothing() -> None:
            EmptyOperator(task_id="n")

        first = twice(add(1))
        second = twice(first)
        add.override(task_id="last")([second, 5], {"a": first})
        second >> nothing()
    assert sorted(dag.task_dict) == [
        *("add", "last", "other.n", "twice.add", "twice.add__1", "twice__1.add", "twice__1.add__1"),
    ]
    assert edges_of(dag) == (
        "twice.add__1>last twice__1.add__1>last twice__1.add__1>other.n add>twice.add twice.add>twice.add__1 "
        "twice.add__1>twice__1.add twice__1.add>twice__1.add__1"
    )
    assert dag.groups["twice"].tooltip == "Adds twice."


def scopes_of(dag: DAG) -> dict[str, tuple[str, ...]]:
    dag.validate()
    return {one.id: one.scope for one in build_structure(dag).tasks if one.scope}


def test_setups_and_teardowns_have_scopes() -> None:
    with DAG("d") as dag:
        s, w1, w2, t = empties("swvt")
        s.as_setup() >> w1 >> w2 >> t.as_teardown(setups=s, on_failure_fail_dagrun=True)
        w2 >> EmptyOperator(task_id="after")
    assert scopes_of(dag) == {"v": ("s",)}
    found = {one.id: one for one in build_structure(dag).tasks}
    assert (found["t"].rule, found["t"].setups, found["t"].fails_run) == ("all_done_setup_success", ("s",), True)
    assert (found["s"].is_setup, found["w"].setups, found["w"].scope) == (True, ("s",), ())


def test_a_setup_without_teardown_holds_for_all_after_it() -> None:
    with DAG("d") as dag:
        s, a, b, _ = empties("sabc")
        s.as_setup() >> a >> b
    assert scopes_of(dag) == {"b": ("s",)}


def test_functions_become_setups_and_teardowns() -> None:
    with DAG("d") as dag:

        @setup
        def create() -> str:
            return "c"

        @task
        def work() -> None:
            return None

        @teardown(on_failure_fail_dagrun=True)
        def remove(name: Any) -> None:
            return None

        made = create()
        with remove(made).as_teardown(setups=made):
            work() >> EmptyOperator(task_id="more")
    assert edges_of(dag) == "create>more work>more create>remove more>remove work>remove create>work"
    assert dag.get_task("remove").on_failure_fail_dagrun


def test_nothing_waits_for_the_teardowns_of_a_group() -> None:
    with DAG("d") as dag:
        with TaskGroup("g") as group:
            s, w, t, _ = empties("swtx")
            s.as_setup() >> w >> t.as_teardown(setups=s)
        group >> EmptyOperator(task_id="after")
    assert "g.w>after" in edges_of(dag)
    assert "g.t>after" not in edges_of(dag)
    assert "g.x>after" in edges_of(dag)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda a: a.as_setup().as_teardown(), "task 'a' is a setup and cannot also be a teardown"),
        (lambda a: a.as_teardown().as_setup(), "task 'a' is a teardown and cannot also be a setup"),
        (lambda a: a.__enter__(), "task 'a' is not a teardown"),
        (lambda a: a.as_teardown(on_failure_fail_dagrun=1), "on_failure_fail_dagrun must be True or False"),
        (lambda a: a.as_teardown(setups="s"), "'s' is not a task"),
    ],
)
def test_wrong_setups_and_teardowns_are_refused(wrong: Any, message: str) -> None:
    with DAG("d"), pytest.raises(DagError, match=message):
        wrong(EmptyOperator(task_id="a"))


def test_the_rule_of_a_teardown_cannot_be_chosen() -> None:
    with DAG("d"), pytest.raises(DagError, match="a teardown cannot have a trigger_rule"):
        EmptyOperator(task_id="a", trigger_rule="one_done").as_teardown()


drawn_edges = st.lists(
    st.tuples(st.integers(0, 8), st.integers(0, 8)).filter(lambda edge: edge[0] < edge[1]), max_size=16
)
kinds = st.lists(st.sampled_from("wwwst"), min_size=9, max_size=9)


@given(drawn_edges, kinds)
def test_scopes_are_what_lies_between_setups_and_their_teardowns(drawn: list[tuple[int, int]], kinds: str) -> None:
    with DAG("d") as dag:
        tasks = [EmptyOperator(task_id=f"t{number}") for number in range(9)]
        for before, after in drawn:
            tasks[before] >> tasks[after]
        for one, kind in zip(tasks, kinds, strict=True):
            if kind != "w":
                one.as_setup() if kind == "s" else one.as_teardown()
    for one in build_structure(dag).tasks:
        operator = dag.get_task(one.id)
        expected = set()
        for other in dag.tasks:
            if not other.is_setup or one.id not in other.get_flat_relative_ids() or operator.is_teardown:
                continue
            teardowns = [after for after in other.downstream_list if after.is_teardown]
            inside = any(one.id in after.get_flat_relative_ids(upstream=True) for after in teardowns)
            if inside or not teardowns:
                expected.add(other.task_id)
        assert set(one.scope) == expected - operator.upstream_task_ids
        assert set(one.setups) == {name for name in one.upstream if dag.get_task(name).is_setup}
