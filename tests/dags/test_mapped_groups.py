"""What the file of a DAG says of mapped groups, what it is refused for, and attempts of their tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.dags.attempts import Services, attempt, value_of

from tidemill.core.tasks.endings import Failure, Skip
from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.dags import (
    DAG,
    AirflowSkipException,
    BaseOperator,
    DagError,
    EmptyOperator,
    TaskGroup,
    setup,
    task,
    task_group,
    teardown,
)
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.exceptions import DagCycleError
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure
from tidemill.runtime.json.codec import encode


class Plain(BaseOperator):
    """Has an argument that is no template."""

    def __init__(self, *, value: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value


class Handles(BaseOperator):
    """Handles a stream."""

    def handle_trigger_events(self, events: Any, context: Any) -> None: ...


@task
def numbers() -> Any: ...


@task
def show(x: Any, y: Any = None) -> Any:
    return [x, y]


@task
def stream() -> Iterator[int]:
    yield 1


@task_group
def etl(x: Any, y: Any = 0) -> Any:
    """Loads one file.

    More about it.
    """
    first = show.override(task_id="first")(x, y)
    return show.override(task_id="second")(first)


def make(fill: Callable[..., Any], **sources: Any) -> Any:
    """Create a mapped group `g` whose tasks are those that a function creates."""
    return task_group(group_id="g")(fill).expand(**(sources or {"x": [1, 2]}))


def find(dag: DAG) -> dict[str, TaskStructure]:
    """Return the structure after it was written and read, by task."""
    structure = read_structure(serialize_dag(dag))
    assert structure == build_structure(dag)
    return {each.id: each for each in structure.tasks}


def element(dag: DAG, task_id: str, index: int, *leaves: tuple[int, Any], **more: Any) -> AttemptResult:
    """Make an attempt in an element whose leaves have these indexes and items; `...`: the item is in the file."""
    texts = tuple(None if value is ... else encode(value) for _, value in leaves)
    indexes = tuple(number for number, _ in leaves)
    return attempt(dag, task_id, map_index=index, elements=texts, leaf_indexes=indexes, **more)


# -- structure ---------------------------------------------------------------------------------------------------------


def test_a_mapped_group_is_a_task_of_the_structure_between_its_sources_and_its_tasks() -> None:
    with DAG("d") as dag, TaskGroup("outer"):
        values = numbers.override(priority_weight=5)()
        done = etl.partial(y=1, max_outstanding=7, max_failed_elements=0).expand(x=values)
        show.override(task_id="last")(done) << EmptyOperator(task_id="also")
    found = find(dag)
    assert found["outer.etl"] == TaskStructure(
        id="outer.etl",
        operator="TaskGroup",
        upstream=("outer.numbers",),
        group="outer",
        label="etl",
        doc="Loads one file.",
        pool_slots=0,
        mapped=MapStructure(("x",), (MapSource("xcom", "outer.numbers", "return_value"),), 7, 0),
        is_group=True,
    )
    over = MapStructure((), (MapSource("group", task="outer.etl"),))
    first, second = found["outer.etl.first"], found["outer.etl.second"]
    assert (first.mapped, first.mapped_group, first.group, first.upstream) == (over, "outer.etl", "outer.etl", ())
    assert (second.mapped, second.mapped_group, second.upstream) == (over, "outer.etl", ("outer.etl.first",))
    assert found["outer.last"].upstream == ("outer.also", "outer.etl.second")
    # The weights behind the group count for its source; those of its own tasks are their own, as in a map.
    assert [found[f"outer.{name}"].priority for name in ("numbers", "etl.first", "last")] == [8, 1, 1]
    assert dag.find_relatives("outer.numbers") == {"outer.etl.first", "outer.etl.second", "outer.last"}
    assert dag.find_relatives("outer.last", upstream=True) >= {"outer.numbers"}


def test_groups_are_mapped_over_products_dicts_and_generators() -> None:
    with DAG("d") as dag:
        etl.expand(x=[1, 2, 3], y={"a": 1})
        etl.expand(x=stream().map(str), y=dag.param("rows"))
        etl.override(group_id="dicts").expand_kwargs(numbers())
        etl.override(group_id="list").expand_kwargs([{"x": 1}, {"x": 2, "y": 3}])
        etl(5)
    found = {name: each.mapped for name, each in find(dag).items() if each.is_group}
    literal = MapSource("literal", length=3)
    assert found["etl"] == MapStructure(("x", "y"), (literal, MapSource("literal", length=1)))
    generated = MapSource("generator", "stream", "return_value")
    assert found["etl__1"] == MapStructure(("x", "y"), (generated, MapSource("param", key="rows")))
    assert found["dicts"] == MapStructure(("**",), (MapSource("xcom", "numbers", "return_value"),))
    assert found["list"] == MapStructure(("**",), (MapSource("literal", length=2),))
    assert (find(dag)["etl__2.first"].mapped, find(dag)["etl__2.first"].mapped_group) == (None, "")


def test_edges_and_arguments_from_outside_are_those_of_the_tasks() -> None:
    def fill(x: Any, more: Any) -> None:
        with TaskGroup("deep"):
            show(x, more) >> EmptyOperator(task_id="end")

    with DAG("d") as dag:
        shared, listed, before = numbers(), numbers(), EmptyOperator(task_id="before")
        before >> task_group(group_id="g")(fill).partial(more=shared).expand(x=[listed, 3])
    found = find(dag)
    assert found["g"].upstream == ()
    assert found["g.deep.show"].upstream == ("before", "numbers", "numbers__1")
    assert [found[name].mapped_group for name in ("g.deep.show", "g.deep.end")] == ["g", "g"]


def test_setups_in_a_group_have_the_rest_of_the_group_in_their_scope() -> None:
    def fill(x: Any) -> None:
        setup(show.override(task_id="open"))(x) >> EmptyOperator(task_id="a") >> EmptyOperator(task_id="b")

    with DAG("d") as dag:
        make(fill) >> EmptyOperator(task_id="after")
    found = find(dag)
    assert (found["g.a"].setups, found["g.b"].scope, found["after"].scope) == (("g.open",), ("g.open",), ())


def test_a_group_is_mapped_over_the_output_of_a_map() -> None:
    with DAG("d") as dag:
        etl.expand(x=show.expand(x=[1]))
    assert find(dag)["etl"].mapped == MapStructure(("x",), (MapSource("map", "show", "return_value"),))
    assert (find(dag)["etl"].upstream, find(dag)["etl"].follows) == (("show",), None)


def test_a_task_is_mapped_over_the_output_of_a_group() -> None:
    with DAG("d") as dag:
        show.expand(x=make(lambda x: show.override(task_id="a")(x)))
    assert find(dag)["show"].mapped == MapStructure(("x",), (MapSource("map", "g.a", "return_value"),))
    assert find(dag)["show"].upstream == ("g.a",)


# -- refusals ----------------------------------------------------------------------------------------------------------


def with_rule(rule: str, *, outside: bool = True) -> Callable[[], Any]:
    def create() -> None:
        other = EmptyOperator(task_id="other")

        def fill(x: Any) -> None:
            after = EmptyOperator(task_id="after", trigger_rule=rule)
            show(x) >> after
            if outside:
                other >> after

        make(fill)

    return create


def nested(x: Any) -> None:
    etl.expand(x=[1])


def used_outside() -> None:
    leaked: list[Any] = []
    make(lambda x: (leaked.append(x), EmptyOperator(task_id="a"))[1])
    show(leaked[0])


def branches(x: Any) -> Any:
    return task.branch(task_id="b")(lambda x: None)(x)


def with_task_between() -> None:
    between = EmptyOperator(task_id="between")
    make(lambda x: show.override(task_id="a")(x) >> EmptyOperator(task_id="b"))
    dag_task("g.a") >> between >> dag_task("g.b")


def in_a_circle() -> None:
    source = numbers()
    etl.expand(x=source) >> source


def after_setup(x: Any) -> Any:
    return setup(show.override(task_id="open"))(x)


def with_outer_setup() -> None:
    opened = setup(show.override(task_id="open"))(1)
    make(lambda x: teardown(show.override(task_id="show"))(x))
    opened >> dag_task("g.show")


def dag_task(task_id: str) -> Any:
    from tidemill.dags.scope import open_dags

    return open_dags.current.task_dict[task_id]


JOINT = (
    *("all_failed", "all_skipped", "all_done_min_one_success", "none_failed_min_one_success"),
    *("one_success", "one_failed", "one_done"),
)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{rule: (with_rule(rule), f"has the trigger_rule '{rule}' over tasks of the group") for rule in JOINT},
    "always": (with_rule("always", outside=False), "'g.show' of the group, so its trigger_rule cannot be 'always'"),
    "empty": (lambda: make(lambda x: None), "group 'g' is mapped, but has no tasks; create them in its function"),
    "nested": (lambda: make(nested), "group 'g.etl': a mapped group in the mapped group 'g' is not supported"),
    "map": (
        lambda: make(lambda x: show.expand(x=x)),
        "task 'show': a mapped task in the mapped group 'g' is not supported; return the values of all elements",
    ),
    "operator map": (
        lambda: make(lambda x: Plain.partial(task_id="p").expand(value=[1])),
        "task 'p': a mapped task in the mapped group 'g' is not supported",
    ),
    "stream": (lambda: make(lambda x: Handles(task_id="s")), "'g.s' of the mapped group 'g' handles a stream, which"),
    "map over a generator": (
        lambda: show.expand(x=make(lambda x: stream())),
        "is the output of task 'g.stream', which yields its values in each element of its mapped group",
    ),
    "generator outside": (
        lambda: show.override(task_id="after")([make(lambda x: stream())]),
        "'g.stream' of the mapped group 'g' yields its values in each element, so task 'after' outside of the group",
    ),
    "no template": (
        lambda: make(lambda x: Plain(task_id="p", value=x)),
        "argument 'value' is <MappedArgument 'x' of group 'g'>, which is not known before the task runs; add 'value'",
    ),
    "outside": (used_outside, "its argument 'x' is used outside of the group, where it has no value"),
    "branch": (
        lambda: make(branches) >> EmptyOperator(task_id="after"),
        "task 'g.b' of the mapped group 'g' decides about 'after' outside of the group",
    ),
    "between": (
        with_task_between,
        "'g.b' of the mapped group 'g' depends on 'between' outside of the group, which depends",
    ),
    "setup": (lambda: make(after_setup) >> EmptyOperator(task_id="a"), "is a setup that 'a' outside of the group"),
    "teardown": (with_outer_setup, "is a teardown that directly follows 'open' outside of the group"),
    "circle": (in_a_circle, "the dependencies form a cycle: etl >> etl.second >> numbers >> etl"),
    "unknown": (lambda: etl.expand(z=[1]), "group 'etl': etl has no parameter 'z', which expand() gives; use one of"),
    "unknown in partial": (lambda: etl.partial(z=1), "etl has no parameter 'z', which partial() gives"),
    "unknown in dicts": (lambda: etl.expand_kwargs([{"x": 1, "z": 2}]), "'z', which expand_kwargs() gives"),
    "twice": (lambda: etl.partial(x=1).expand(x=[1]), "'x' is in partial() and in expand(); give it in one of them"),
    "missing": (lambda: etl.expand(y=[1]), "missing a required argument: 'x'; give it in partial() or expand()"),
    "nothing": (lambda: etl.expand(), "expand() needs the arguments to map over"),
    "positional": (lambda: etl.expand([1]), "expand() accepts no positional arguments; pass them by name"),
    "positional partial": (lambda: etl.partial(1), "partial() accepts no positional arguments"),
    "text": (lambda: etl.expand(x="abc"), "argument 'x' of expand() is a single text; pass a list of texts"),
    "no dicts": (lambda: etl.expand_kwargs([1]), "expand_kwargs() needs dicts with the names of arguments as keys"),
    "any arguments": (lambda: task_group(lambda **k: None).expand_kwargs([{}]), "so **k of <lambda> is not supported"),
    "window": (lambda: etl.partial(max_outstanding=0).expand(x=[1]), "max_outstanding must be at least 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_mapped_group_cannot_have_is_refused_by_name(case: str) -> None:
    create, text = REFUSED[case]
    dag = DAG("d")
    with pytest.raises((DagError, DagCycleError)) as caught:
        with dag:
            create()
        dag.validate()
    assert text in str(caught.value)


@pytest.mark.parametrize("rule", ["all_success", "all_done", "none_failed", "none_skipped"])
def test_rules_that_split_may_have_upstreams_on_both_sides(rule: str) -> None:
    with DAG("d") as dag:
        with_rule(rule)()
    for group in dag.mapped_groups:
        group.check()


def test_values_of_arguments_are_unknown_while_the_file_is_parsed() -> None:
    for use in (lambda x: x["a"], lambda x: list(x), lambda x: bool(x), lambda x: str(x)):
        with DAG("d"), pytest.raises(TypeError, match=r"the argument 'x' of the mapped group 'g' .*(known|string)"):
            make(use)


# -- attempts ----------------------------------------------------------------------------------------------------------


def test_arguments_are_the_items_of_the_element() -> None:
    with DAG("d") as dag:
        etl.expand(x=["a", "b"], y=numbers().map(lambda n: n + 1))
        etl.override(group_id="dicts").expand_kwargs(numbers())
    assert value_of(element(dag, "etl.first", 3, (1, ...), (1, 6))) == ["b", 7]
    assert value_of(element(dag, "dicts.first", 0, (0, {"x": "{{ ds }}"}))) == ["{{ ds }}", 0]
    assert value_of(element(dag, "dicts.first", 0, (0, {"x": 1, "y": 2}))) == [1, 2]


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"y": 1}, "expand_kwargs() of group 'etl' gives no 'x' for this element: add it to the dict"),
        ({"x": 1, "z": 1}, "expand_kwargs() of group 'etl' gives 'z' for this element, which the function does not"),
        ({"x": 1, "y": 1}, "gives 'y' for this element, which partial() gives already"),
        (5, "expand_kwargs() needs dicts"),
    ],
)
def test_dicts_that_do_not_fit_fail_the_task_for_good(item: Any, text: str) -> None:
    with DAG("d") as dag:
        (etl.partial(y=3) if "partial" in text else etl).expand_kwargs(numbers())
    ending = element(dag, "etl.first", 0, (0, item)).ending
    assert isinstance(ending, Failure)
    assert (text in ending.error, ending.may_retry) == (True, False)


def test_a_task_of_a_group_has_a_label() -> None:
    def fill(x: Any) -> Any:
        return show.override(map_index_template="{{ ti.map_index }}: {{ task.op_args[0] }}")(x)

    with DAG("d") as dag:
        make(fill)
        show.override(map_index_template="unused", task_id="other")(1)
    assert element(dag, "g.show", 1, (1, ...)).label == "1: 2"
    assert attempt(dag, "other").label is None
    mapped = find(dag)["g.show"].mapped
    assert mapped is not None
    assert mapped.index_template == "{{ ti.map_index }}: {{ task.op_args[0] }}"


def test_outputs_in_the_list_are_resolved_and_templates_of_partial_are_rendered() -> None:
    services = Services(xcoms={("numbers", "return_value"): "5"})
    with DAG("d") as dag:
        etl.partial(y="{{ ds }} {{ ti.map_index }} {{ expanded_ti_count }}").expand(x=[{"n": numbers()}, "{{ ds }}"])
    assert value_of(element(dag, "etl.first", 0, (0, ...), services=services)) == [{"n": 5}, "2026-01-01 0 None"]
    assert value_of(element(dag, "etl.first", 1, (1, ...), map_length=2)) == ["{{ ds }}", "2026-01-01 1 2"]


def test_a_function_of_map_can_skip_the_task() -> None:
    def refuse(value: Any) -> Any:
        raise AirflowSkipException("odd")

    with DAG("d") as dag:
        etl.expand(x=numbers().map(refuse))
    assert element(dag, "etl.first", 0, (0, 1)).ending == Skip("odd")


def test_outputs_in_the_group_are_those_of_the_same_element_and_outside_of_all() -> None:
    @task
    def pull(ti: Any) -> Any:
        return [
            ti.xcom_pull("g.first"),
            ti.xcom_pull(["numbers", "g.first"]),
            ti.xcom_pull("g.first", map_indexes=[0, 1]),
            list(ti.xcom_pull("g.first", run_id="other")),
        ]

    def fill(x: Any) -> Any:
        first = show.override(task_id="first")(x)
        show.override(task_id="text")(f"{first}")
        pull()
        return show.override(task_id="second")(first)

    with DAG("d") as dag:
        done = make(fill)
        numbers()
        task(task_id="last")(lambda x, y: [list(x), list(y)])(done, done.group.children["g.first"].output)
    services = Services(
        xcoms={("numbers", "return_value"): "5"},
        sequences={
            ("g.first", "return_value"): [(0, '"a"'), (1, '"b"')],
            ("g.second", "return_value"): [(1, '"c"')],
        },
    )
    assert value_of(element(dag, "g.second", 1, (1, ...), services=services)) == ["b", None]
    assert value_of(element(dag, "g.second", 2, (2, ...), services=services)) == [None, None]
    assert value_of(element(dag, "g.text", 0, (0, ...), services=services)) == ["a", None]
    assert value_of(element(dag, "g.pull", 1, (1, ...), services=services)) == ["b", [5, "b"], ["a", "b"], ["a", "b"]]
    assert value_of(attempt(dag, "last", services=services)) == [["c"], ["a", "b"]]


def test_a_generator_in_the_group_yields_in_each_element() -> None:
    @task
    def pull(values: Any, ti: Any) -> Any:
        return [list(values), list(ti.xcom_pull("g.stream")), repr(ti.xcom_pull("g.stream", map_indexes=0))]

    def fill(x: Any) -> Any:
        return pull(stream())

    with DAG("d") as dag:
        make(fill)
        task(task_id="named")(lambda ti: list(ti.xcom_pull("g.stream", map_indexes=1)))()
        task(task_id="unnamed")(lambda ti: ti.xcom_pull("g.stream"))()
    assert find(dag)["g.stream"].is_generator
    services = Services(
        sequences={
            ("g.stream[0]", "return_value"): [(0, "1"), (1, "2")],
            ("g.stream[1]", "return_value"): [(0, "3")],
        }
    )
    text = "<LazySequence of task 'g.stream[0]' with 2 values>"
    assert value_of(element(dag, "g.pull", 1, (1, ...), services=services)) == [[3], [3], text]
    assert value_of(element(dag, "g.pull", 2, (2, ...), services=services)) == [[], [], text]
    assert value_of(attempt(dag, "named", services=services)) == [3]
    ending = attempt(dag, "unnamed", services=services).ending
    assert isinstance(ending, Failure)
    assert "name one with map_indexes" in ending.error
    element(dag, "g.stream", 0, (0, ...), services=services)
    assert services.emitted == [(0, ("1",))]


def test_a_task_that_left_or_joined_a_group_fails_for_good() -> None:
    with DAG("d") as dag:
        make(lambda x: show(x))
        numbers()
    for index, name, text in ((-1, "g.show", "is mapped now"), (0, "numbers", "is no longer mapped")):
        ending = element(dag, name, index).ending
        assert isinstance(ending, Failure)
        assert (text in ending.error, ending.may_retry) == (True, False)
    ending = element(dag, "g.show", 0, (0, 1), (0, 1)).ending
    assert isinstance(ending, Failure)
    assert "have other sources than when the run began" in ending.error
