"""What the file of a DAG says of mapped tasks, and what it is refused for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tidemill.core.tasks.structure import MapSource, MapStructure, TaskStructure
from tidemill.dags import (
    DAG,
    BaseOperator,
    BashOperator,
    BranchPythonOperator,
    DagError,
    FileSensor,
    PythonOperator,
    ShortCircuitOperator,
    TaskGroup,
    setup,
    task,
    teardown,
)
from tidemill.dags.maps.mapped import MappedOperator
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure


class Load(BaseOperator):
    """Has a required argument that is a template, and one that is not."""

    template_fields = ("path",)

    def __init__(self, *, path: str, mode: str = "r", retries: int = 5, **kwargs: Any) -> None:
        super().__init__(retries=retries, **kwargs)
        if path == "":
            raise DagError(f"task {self.task_id!r}: path is empty")
        self.path = path
        self.mode = mode


@task
def add(x: int, y: int = 0) -> int:
    return x + y


@task
def numbers() -> list[int]:
    return [1, 2]


@task
def stream() -> Iterator[int]:
    yield 1


def find(dag: DAG, task_id: str) -> TaskStructure:
    """Return the structure of a task after it was written and read."""
    structure = read_structure(serialize_dag(dag))
    assert structure == build_structure(dag)
    return next(each for each in structure.tasks if each.id == task_id)


def test_an_operator_is_mapped_over_lists_and_dicts() -> None:
    with DAG("d") as dag:
        mapped = Load.partial(task_id="load", pool="slow", max_outstanding=7, max_failed_elements=0).expand(
            path=["a", "b", "c"], mode={"r": 1, "w": 2}
        )
        after = BashOperator(task_id="after", bash_command="true")
        mapped >> after
    assert isinstance(mapped, MappedOperator)
    assert dag.task_dict["load"] is mapped
    found = find(dag, "load")
    assert found.mapped == MapStructure(
        ("path", "mode"), (MapSource("literal", length=3), MapSource("literal", length=2)), 7, 0
    )
    assert (found.operator, found.pool, found.retries, found.template_fields) == ("Load", "slow", 5, ("path",))
    assert find(dag, "after").upstream == ("load",)
    assert find(dag, "after").mapped is None


def test_defaults_come_from_the_class_then_default_args_then_partial() -> None:
    with DAG("d", default_args={"retries": 2, "mode": "w", "max_outstanding": 9, "path": "unused"}) as dag:
        mapped = Load.partial(task_id="a").expand(path=["x"])
        Load.partial(task_id="b", retries=1, max_outstanding=3).expand(path=["x"])
    assert (find(dag, "a").retries, find(dag, "b").retries) == (2, 1)
    assert [find(dag, name).mapped.max_outstanding for name in "ab"] == [9, 3]  # type: ignore[union-attr]
    assert mapped.unmap({"path": "p"}).__dict__.items() >= {"mode": "w", "path": "p", "retries": 2}.items()


def test_the_output_of_a_task_is_a_source_and_an_edge() -> None:
    with DAG("d") as dag:
        values = numbers()
        total = add.partial(y=values).expand(x=values)
        add.override(task_id="other").expand(x=stream(), y=[1, 2])
        numbers.override(task_id="last")() << total
    assert find(dag, "add").mapped == MapStructure(("x",), (MapSource("xcom", "numbers", "return_value"),))
    assert find(dag, "add").upstream == ("numbers",)
    assert find(dag, "last").upstream == ("add",)
    generated = MapSource("generator", "stream", "return_value")
    assert find(dag, "other").mapped == MapStructure(("x", "y"), (generated, MapSource("literal", length=2)))
    assert (find(dag, "stream").is_generator, find(dag, "numbers").is_generator) == (True, False)


def test_a_map_over_a_map_follows_it_or_needs_it_as_a_whole() -> None:
    with DAG("d") as dag:
        first = add.expand(x=[1, 2])
        second = add.override(task_id="second").expand(x=first.map(str))
        add.override(task_id="third").partial(y=first).expand(x=second)
        add.override(task_id="rule", trigger_rule="all_done").partial(y=first).expand(x=first)
        add.override(task_id="cross").expand(x=first, y=[1])
    found = find(dag, "second")
    assert found.mapped == MapStructure(("x",), (MapSource("map", "add", "return_value"),))
    assert (found.follows, found.upstream) == ("add", ("add",))
    assert [find(dag, one).follows for one in ("third", "rule", "cross", "add")] == ["second", None, None, None]


def test_async_generators_and_operators_are_generators() -> None:
    async def produce() -> Any:
        yield 1

    with DAG("d") as dag:
        PythonOperator(task_id="a", python_callable=produce)
    assert find(dag, "a").is_generator


def test_map_zip_params_and_keys() -> None:
    with DAG("d") as dag:
        split = task(multiple_outputs=True)(lambda: {"a": [1]}).function
        parts = task(task_id="parts", multiple_outputs=True)(split)()
        pairs = parts["a"].map(str).zip(numbers().zip(dag.param("rows"), fillvalue=0))
        add.expand(x=pairs.map(len))
        add.override(task_id="kwargs").expand_kwargs(numbers())
    rows = MapSource(
        "zip", parts=(MapSource("xcom", "numbers", "return_value"), MapSource("param", key="rows")), fills=True
    )
    assert find(dag, "add").mapped == MapStructure(
        ("x",), (MapSource("zip", parts=(MapSource("xcom", "parts", "a"), rows)),)
    )
    assert find(dag, "add").upstream == ("numbers", "parts")
    assert find(dag, "kwargs").mapped == MapStructure(("**",), (MapSource("xcom", "numbers__1", "return_value"),))


def test_outputs_inside_literals_are_edges_and_no_sources() -> None:
    with DAG("d") as dag:
        first = numbers()
        add.expand(x=[first, 3])
        add.override(task_id="kwargs").expand_kwargs([{"x": first}, first, {"x": 1, "y": 2}])
        Load.partial(task_id="load").expand(path=[first])
    for name, length in (("add", 2), ("kwargs", 3), ("load", 1)):
        found = find(dag, name)
        assert found.upstream == ("numbers",)
        assert found.mapped is not None
        assert found.mapped.factors == (MapSource("literal", length=length),)


def test_options_of_the_map_come_from_the_decorator_override_and_partial() -> None:
    with DAG("d") as dag:
        labelled = task(map_index_template="{{ x }}")(add.function)
        labelled(x=1)
        labelled.override(max_outstanding=3, task_id="b").partial(max_failed_elements=2, y=1).expand(x=[1])
    assert find(dag, "add").mapped is None
    assert find(dag, "b").mapped == MapStructure(("x",), (MapSource("literal", length=1),), 3, 2, "{{ x }}")


def test_a_parameter_with_the_name_of_an_option_is_the_functions() -> None:
    @task
    def limit(max_outstanding: int, x: int) -> None: ...

    with DAG("d") as dag:
        limit.partial(max_outstanding=3).expand(x=[1])
    assert find(dag, "limit").mapped == MapStructure(("x",), (MapSource("literal", length=1),))


def test_maps_in_groups_and_calls_of_one_function_get_ids() -> None:
    with DAG("d") as dag, TaskGroup("g", default_args={"retries": 4}):
        add.expand(x=[1])
        add.expand(x=[2])
        Load.partial(task_id="load").expand(path=["a"])
    assert sorted(dag.task_dict) == ["g.add", "g.add__1", "g.load"]
    assert (find(dag, "g.add").group, find(dag, "g.add").retries) == ("g", 4)


def test_priority_is_the_tasks_own_weight() -> None:
    with DAG("d") as dag:
        (
            numbers.override(priority_weight=3)()
            >> Load.partial(task_id="load", priority_weight=5).expand(path=["a"])
            >> [numbers.override(task_id="last")()]
        )
    assert (find(dag, "numbers").priority, find(dag, "load").priority, find(dag, "last").priority) == (9, 5, 1)


def test_a_sensor_is_mapped() -> None:
    with DAG("d") as dag:
        FileSensor.partial(task_id="wait", soft_fail=True).expand(filepath=["/a", "/b"])
    assert (find(dag, "wait").is_sensor, find(dag, "wait").soft_fail) == (True, True)


def test_unmapping_leaves_the_dag_as_it_is() -> None:
    with DAG("d") as dag:
        mapped = Load.partial(task_id="load").expand(path=["a"])
        first = numbers()
        first >> mapped
        made = mapped.unmap({"path": "b"})
    assert list(dag.task_dict.values()) == [mapped, first.operator]
    assert (made.task_id, made.dag, made.upstream_task_ids) == ("load", dag, {"numbers"})
    assert type(made) is Load


def test_literals_can_be_empty_or_any_sequence() -> None:
    with DAG("d") as dag:
        add.expand(x=[])
        add.override(task_id="range").expand(x=range(1_000_000))
    assert [find(dag, name).mapped.factors[0].length for name in ("add", "range")] == [0, 1_000_000]  # type: ignore[union-attr]


def test_branches_and_short_circuits_can_be_mapped() -> None:
    with DAG("d") as dag:
        task.branch(task_id="a")(lambda x: None).expand(x=[1])
        task.short_circuit(task_id="b")(lambda x: x).expand(x=[1])
        BranchPythonOperator.partial(task_id="c", python_callable=lambda x: None).expand(op_args=[[1]])
        ShortCircuitOperator.partial(task_id="e", python_callable=bool).expand(op_args=[[1]])
    operators = [find(dag, name).operator for name in "abce"]
    assert operators == ["BranchPythonOperator", "ShortCircuitOperator"] * 2


def test_setups_and_teardowns_can_be_mapped() -> None:
    with DAG("d") as dag:
        up = setup(add.override()).expand(x=[1, 2])
        with Load.partial(task_id="down").expand(path=["a"]).as_teardown(setups=up, on_failure_fail_dagrun=True):
            Load(task_id="work", path="a")
        teardown(on_failure_fail_dagrun=True)(add.override(task_id="other")).expand_kwargs([{"x": 1}])
        Load.partial(task_id="late").expand(path=["a"]).as_setup()
    assert [(find(dag, name).is_setup, find(dag, name).is_teardown) for name in ("add", "down", "other", "late")] == [
        (True, False),
        (False, True),
        (False, True),
        (True, False),
    ]
    down = find(dag, "down")
    assert (down.setups, down.upstream, down.fails_run) == (("add",), ("add", "work"), True)
    assert (down.rule, find(dag, "other").rule, find(dag, "other").fails_run) == (*["all_done_setup_success"] * 2, True)
    operator = dag.task_dict["down"].unmap({"path": "b"})  # type: ignore[attr-defined]
    assert (operator.is_teardown, operator.trigger_rule) == (True, "all_done_setup_success")
    with pytest.raises(DagError):
        dag.task_dict["down"].as_setup()


def in_two_dags() -> None:
    with DAG("other"):
        values = numbers()
    add.override(task_id="t").expand(x=values)


def unexpanded() -> None:
    Load.partial(task_id="t", path="a")


def follow_with_all_results() -> None:
    values = add.expand(x=[1])
    T.partial(y=values).expand(x=values)


def with_cycle() -> None:
    mapped = add.override(task_id="t").expand(x=[1])
    mapped >> mapped


def bad_param() -> None:
    dag = DAG("rows")
    with dag:
        add.override(task_id="t").expand(x=dag.param("rows", 5))


T = add.override(task_id="t")
GENERATE = task(task_id="t")(stream.function)
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: T.expand(x=5), "'x' of expand() is of type int, not a sequence; pass a list"),
    "text": (lambda: T.expand(x="abc"), "'x' of expand() is a single text; pass a list of texts"),
    "set": (lambda: T.expand(x={1, 2}), "a set, whose order changes; pass sorted"),
    "iterator": (lambda: T.expand(x=iter([1])), "an iterator, which can be read only once; pass list"),
    "task": (lambda: T.expand(x=Load(task_id="l", path="a")), "pass the output of a task: `.output`"),
    "unknown argument": (lambda: Load.partial(task_id="t").expand(pat=["a"]), "'pat'; did you mean 'path'?"),
    "setting of the task in partial": (
        lambda: T.partial(pool="small").expand(x=[1]),
        "'pool' is a setting of the task; give it to @task(...) or override(...) instead of partial()",
    ),
    "unknown parameter": (lambda: T.expand(z=[1]), "add has no parameter 'z', which expand() gives; use one of x, y"),
    "unknown in partial": (lambda: Load.partial(task_id="t", pat=1), "has no argument 'pat'; did you mean 'path'?"),
    "twice": (lambda: Load.partial(task_id="t", path="a").expand(path=["a"]), "'path' is in partial() and in expand()"),
    "parameter twice": (lambda: T.partial(x=1).expand(x=[1]), "'x' is in partial() and in expand(); give it in one"),
    "kwargs twice": (lambda: T.partial(y=1).expand_kwargs([{"x": 1}, {"x": 1, "y": 2}]), "'y' is in partial()"),
    "positional": (lambda: T.expand([1]), "expand() accepts no positional arguments; pass them by name"),
    "positional partial": (lambda: T.partial(1), "partial() accepts no positional arguments; pass them by name"),
    "positional class": (lambda: Load.partial("t"), "partial() accepts no positional arguments"),
    "nothing": (lambda: T.expand(), "expand() needs the arguments to map over"),
    "no id": (lambda: Load.partial(path="a"), "Load.partial() needs task_id"),
    "required": (
        lambda: Load.partial(task_id="t").expand(mode=["r"]),
        "Load needs 'path', which neither partial() nor",
    ),
    "required parameter": (lambda: T.expand(y=[1]), "missing a required argument: 'x'"),
    "for all": (lambda: Load.partial(task_id="t").expand(path=["a"], retries=[1]), "'retries' of expand() has to be"),
    "kwargs for all": (
        lambda: Load.partial(task_id="t").expand_kwargs([{"path": "a", "pool": "b"}], strict=False),
        "'pool' of expand_kwargs() has to be the same for all elements; give it in partial()",
    ),
    "soft_fail": (
        lambda: FileSensor.partial(task_id="t", filepath="a").expand(soft_fail=[True]),
        "'soft_fail' of expand() has to be the same for all elements",
    ),
    "two generators": (
        lambda: T.expand(x=stream(), y=stream()),
        "the arguments 'x' and 'y' of expand() are both the output of a generator task; only one of them may be",
    ),
    "zip of a generator": (lambda: T.expand(x=numbers().zip(stream())), "pairs the values of a generator task"),
    "zip of a list": (lambda: T.expand(x=numbers().zip([1])), "zip() pairs outputs of tasks and params, got [1]"),
    "concat": (lambda: T.expand(x=numbers().concat(numbers())), "concat() is not supported; join the lists in a task"),
    "zip of pairs with a map": (
        lambda: T.expand(x=numbers().zip(numbers()).zip(add.expand(x=[1]))),
        "pairs the results of a mapped task with pairs of zip(); write one zip() of all",
    ),
    "all results of a map that is followed": (follow_with_all_results, "'op_kwargs' of partial() needs all results"),
    "operator with its arguments": (
        lambda: BashOperator(task_id="t", bash_command="true").expand(env=[{}]),
        "write BashOperator.partial(task_id='t', ...).expand(...)",
    ),
    "kwargs of an operator": (
        lambda: Load(task_id="t", path="a").expand_kwargs([{}]),
        "write Load.partial(task_id='t', ...).expand",
    ),
    "mapped twice": (
        lambda: Load.partial(task_id="t").expand(path=["a"]).expand(mode=["b"]),
        "write Load.partial(task_id='t', ...)",
    ),
    "mapped generator": (
        lambda: task(task_id="t")(lambda x: (yield x)).expand(x=[1]),
        "expand() of a generator function is not supported yet",
    ),
    "itself": (with_cycle, "task 't' cannot depend on itself"),
    "other DAG": (in_two_dags, "argument 'x' of expand() is the output of task 'numbers' of DAG 'other'; read it in a"),
    "not expanded": (unexpanded, "partial() alone creates no task; call .expand(...) on it, or remove it"),
    "edge of a partial": (lambda: numbers() >> Load.partial(task_id="t"), "without expand()> of type OperatorPartial"),
    "stores nothing": (
        lambda: T.expand(x=numbers.override(do_xcom_push=False)()),
        "is the output of task 'numbers', which stores none; remove do_xcom_push=False",
    ),
    "generator stores nothing": (
        lambda: GENERATE.override(do_xcom_push=False)(),
        "the function is a generator, whose values are stored one by one; remove do_xcom_push=False",
    ),
    "generator with outputs": (lambda: GENERATE.override(multiple_outputs=True)(), "remove multiple_outputs=True"),
    "branching generator": (
        lambda: task.branch(task_id="t")(stream.function)(),
        "the function is a generator, but BranchPythonOperator needs its return value",
    ),
    "sensing generator": (
        lambda: task.sensor(task_id="t")(stream.function)(),
        "the function is a generator, but PythonSensor needs its return value",
    ),
    "bash generator": (
        lambda: task.bash(task_id="t")(stream.function)(),
        "the function is a generator, but PythonBashOperator needs its return value",
    ),
    "output in no template": (
        lambda: Load.partial(task_id="t").expand(path=["a"], mode=[numbers()]),
        "argument 'mode' is the output of a task, which is not known before that task has run; add 'mode'",
    ),
    "output in partial": (
        lambda: Load.partial(task_id="t", mode=numbers()).expand(path=["a"]),
        "argument 'mode' is the",
    ),
    "kwargs of one": (
        lambda: T.expand_kwargs({"x": [1]}),
        "expand_kwargs() needs a list of dicts, a param or the output",
    ),
    "kwargs of numbers": (lambda: T.expand_kwargs([{"x": 1}, 2]), "with the names of arguments as keys; item 1 is 2"),
    "kwargs with keys": (lambda: T.expand_kwargs([{1: 1}]), "with the names of arguments as keys; item 0 is {1: 1}"),
    "kwargs unknown": (lambda: T.expand_kwargs([{"x": 1}, {"z": 1}]), "no parameter 'z', which expand_kwargs() gives"),
    "kwargs incomplete": (lambda: T.expand_kwargs([{"y": 1}]), "missing a required argument: 'x'"),
    "strict": (lambda: T.expand_kwargs([{"x": 1}], strict="no"), "strict must be True or False"),  # type: ignore[arg-type]
    "first element": (lambda: Load.partial(task_id="t").expand(path=["", "a"]), "path is empty"),
    "window": (lambda: T.partial(max_outstanding=10_001).expand(x=[1]), "max_outstanding must be at most 10,000"),
    "no window": (lambda: T.partial(max_outstanding=0).expand(x=[1]), "max_outstanding must be at least 1"),
    "failures": (lambda: T.partial(max_failed_elements=-1).expand(x=[1]), "max_failed_elements must be at least 0"),
    "map of a task": (lambda: T.expand(x=numbers().map(add)), "map() needs a plain function that takes an item"),
    "param": (bad_param, "'x' of expand() is of type int, not a sequence"),
    "unmapped option": (
        lambda: Load(task_id="t", path="a", max_outstanding=3),
        "give it to partial() of a mapped task",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_mapped_is_refused_by_name(case: str) -> None:
    make, text = REFUSED[case]
    dag = DAG("d")
    with pytest.raises(DagError) as caught:
        with dag:
            make()
        dag.validate()
    assert text in str(caught.value)
    assert "'t'" in str(caught.value) or case in (
        "no id",
        "positional class",
        "zip of a list",
        "concat",
        "map of a task",
    )


def test_outputs_of_maps_cannot_be_used_while_the_file_is_parsed() -> None:
    with DAG("d"):
        output = numbers().map(str)
        for use in (bool, list, str):
            with pytest.raises(TypeError, match="numbers"):
                use(output)


def test_arguments_of_a_mapped_task_are_its_attributes() -> None:
    with DAG("d"):
        mapped = Load.partial(task_id="load", mode="w").expand(path=["a"])
    assert mapped.mode == "w"
    with pytest.raises(AttributeError, match="mapped over 'path': only its elements have a value"):
        _ = mapped.path
    with pytest.raises(AttributeError, match="has no 'nothing'"):
        _ = mapped.nothing


def test_a_partial_function_can_be_called_and_extended() -> None:
    with DAG("d") as dag:
        output = add.partial(x=1).partial(y=2)()
        add.partial(x=1).override(task_id="other").expand(y=[1])
    assert output.operator.op_kwargs == {"x": 1, "y": 2}
    assert dag.task_dict["other"].is_mapped
