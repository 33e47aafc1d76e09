"""Attempts of elements of maps, and what other tasks read of them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from tests.dags.attempts import Callback, Services, attempt, resume, value_of

from tidemill.core.tasks.endings import Deferral, Failure, Skip
from tidemill.dags import (
    DAG,
    AirflowSkipException,
    BaseOperator,
    BashOperator,
    Param,
    XComArg,
    get_current_context,
    task,
)
from tidemill.dags.attempt.lazy_sequence import LazySequence
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.exceptions import DagError
from tidemill.runtime.json.codec import encode
from tidemill.triggers.builtin.temporal import TimeDeltaTrigger


class Show(BaseOperator):
    """Returns its arguments."""

    template_fields = ("text", "more")

    def __init__(self, *, text: Any = None, more: Any = None, plain: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.text, self.more, self.plain = text, more, plain

    def execute(self, context: Any) -> Any:
        return [self.text, self.more, self.plain]


@task
def source() -> Any: ...


@task
def show(x: Any, y: Any = None) -> Any:
    return [x, y]


def element(dag: DAG, task_id: str, index: int, *leaves: tuple[int, Any], **more: Any) -> AttemptResult:
    """Make an attempt of an element whose leaves have these indexes and items; `...`: the item is in the file."""
    texts = tuple(None if value is ... else encode(value) for _, value in leaves)
    indexes = tuple(number for number, _ in leaves)
    return attempt(dag, task_id, map_index=index, elements=texts, leaf_indexes=indexes, **more)


def failure(result: AttemptResult) -> Failure:
    assert isinstance(result.ending, Failure)
    return result.ending


def test_an_element_gets_its_values_of_lists_dicts_and_outputs() -> None:
    with DAG("d") as dag:
        show.expand(x=["a", "b"], y={"k": 1, "l": 2})
        show.override(task_id="mixed").expand(x=source(), y=["a", "b"])
        Show.partial(task_id="op", plain=1).expand(text=source())
    assert value_of(element(dag, "show", 3, (1, ...), (0, ...))) == ["b", ("k", 1)]
    assert value_of(element(dag, "mixed", 3, (7, {"n": 1}), (1, ...))) == [{"n": 1}, "b"]
    assert value_of(element(dag, "op", 0, (0, (1, 2)))) == [(1, 2), None, 1]


def test_functions_and_pairs_are_evaluated_in_the_attempt() -> None:
    with DAG("d") as dag:
        pairs = source().map(str).zip(source(), dag.param("rows"), fillvalue="-").map(list)
        show.expand(x=pairs.map(tuple), y=source().map(lambda n: n + 1).map(str))
        nested = source().zip(source())
        show.override(task_id="nested").expand(x=nested.zip(source(), fillvalue=0))
    assert value_of(element(dag, "show", 0, (0, 1), (0, 2), (0, 3), (4, 5))) == [("1", 2, 3), "6"]
    assert value_of(element(dag, "show", 0, (0, 1), (-1, ...), (0, 3), (4, 5))) == [("1", "-", 3), "6"]
    assert value_of(element(dag, "nested", 0, (0, 1), (0, 2), (0, 3)))[0] == ((1, 2), 3)
    assert value_of(element(dag, "nested", 0, (0, 1), (-1, ...), (0, 3)))[0] == (0, 3)


def test_a_function_can_skip_the_element_and_any_other_exception_fails_it() -> None:
    def choose(value: int) -> int:
        if value == 1:
            raise AirflowSkipException("odd")
        assert get_current_context()["ti"].map_index == 5
        return 10 // value

    with DAG("d") as dag:
        show.expand(x=source().map(choose))
    assert element(dag, "show", 5, (1, 1)).ending == Skip("odd")
    assert value_of(element(dag, "show", 5, (1, 2))) == [5, None]
    assert failure(element(dag, "show", 5, (1, 0))).may_retry


def test_templates_are_those_of_the_file_and_not_of_the_data() -> None:
    with DAG("d") as dag:
        Show.partial(task_id="op", more="{{ ti.map_index }} of {{ expanded_ti_count }}").expand(text=["{{ ds }}"])
        Show.partial(task_id="data", more="{{ ds }}").expand(text=source())
        show.partial(y="{{ ds }}").expand(x=source())
        BashOperator.partial(task_id="bash").expand(bash_command=source())
    assert value_of(element(dag, "op", 2, (0, ...), map_length=9)) == ["2026-01-01", "2 of 9", None]
    assert value_of(element(dag, "op", 2, (0, ...)))[1] == "2 of None"
    for name in ("data", "show"):
        assert value_of(element(dag, name, 0, (0, {"a": ["{{ ds }}"]})))[:2] == [{"a": ["{{ ds }}"]}, "2026-01-01"]
    assert value_of(element(dag, "bash", 0, (0, "echo '{{ ds }}'"))) == "{{ ds }}"
    assert value_of(element(dag, "bash", 0, (0, "echo a.sh"))) == "a.sh"


def test_outputs_inside_literals_are_resolved() -> None:
    services = Services(xcoms={("source", "return_value"): "5", ("other", "return_value"): '{"x":"{{ ds }}"}'})
    with DAG("d") as dag:
        first, other = source(), source.override(task_id="other")()
        show.expand(x=[first])
        show.override(task_id="kwargs").expand_kwargs([{"x": first}, other])
    assert value_of(element(dag, "show", 0, (0, ...), services=services)) == [5, None]
    assert value_of(element(dag, "kwargs", 0, (0, ...), services=services)) == [5, None]
    assert value_of(element(dag, "kwargs", 1, (1, ...), services=services)) == ["{{ ds }}", None]


def test_the_operator_stands_in_the_place_of_the_map() -> None:
    seen: list[Any] = []

    class Look(Show):
        def execute(self, context: Any) -> Any:
            ti = context["ti"]
            seen.extend((ti.task is self, context["task"] is self, self.dag, self.task_id, self.upstream_task_ids))
            seen.extend((ti.operator, ti.map_index, ti.xcom_pull(key="k")))

    services = Services(sequences={("look", "k"): [(4, '"mine"')]})
    with DAG("d") as dag:
        Look.partial(task_id="look").expand(text=source())
    element(dag, "look", 4, (4, 1), services=services)
    assert seen == [True, True, dag, "look", {"source"}, "Look", 4, "mine"]


def test_an_element_pulls_its_own_xcoms_unless_it_names_a_task_or_an_index() -> None:
    class Pull(Show):
        def execute(self, context: Any) -> Any:
            ti = context["ti"]
            ti.xcom_pull()
            ti.xcom_pull("source")
            ti.xcom_pull("source", map_indexes=4)
            ti.xcom_pull(map_indexes=5)
            return [ti.map_index, ti.key, repr(ti)]

    services = Services()
    with DAG("d") as dag:
        Pull.partial(task_id="t").expand(text=source())
    result = element(dag, "t", 3, (3, 1), services=services)
    assert value_of(result) == [3, "d__t[3]__run", "<TaskInstance d.t[3] run try 1>"]
    assert services.indexes == [3, -1, 4, 5]


def test_expand_kwargs_names_what_is_wrong_with_an_element() -> None:
    with DAG("d") as dag:
        Show.partial(task_id="strict", plain=1).expand_kwargs(source())
        Show.partial(task_id="loose", plain=1).expand_kwargs(source(), strict=False)
        show.partial(y=1).expand_kwargs(source())
    assert value_of(element(dag, "strict", 0, (0, {"text": "a"}))) == ["a", None, 1]
    assert value_of(element(dag, "loose", 0, (0, {"plain": 2}))) == [None, None, 2]
    assert value_of(element(dag, "show", 0, (0, {"x": 2}))) == [2, 1]
    for name, item, text in (
        ("strict", {"plain": 2}, "argument 'plain' is in partial() and in expand_kwargs()"),
        ("strict", {"tex": 2}, "Show has no argument 'tex'; did you mean 'text'?"),
        ("loose", {"retries": 2}, "argument 'retries' of expand_kwargs() has to be the same for all elements"),
        ("strict", {1: 2}, "with the names of arguments as keys; this element has {1: 2}"),
        ("strict", 5, "this element has 5"),
        ("show", {"z": 2}, "show has no parameter 'z', which expand_kwargs() gives"),
        ("show", {"x": 1, "y": 2}, "argument 'y' is in partial() and in expand_kwargs()"),
        ("show", {}, "missing a required argument: 'x'"),
    ):
        assert text in failure(element(dag, name, 0, (0, item))).error, name


def test_an_element_of_a_branch_and_of_a_short_circuit_says_what_it_skips() -> None:
    with DAG("d") as dag:
        chosen = task.branch(task_id="choose")(lambda x: x).expand(x=source())
        chosen >> [task(task_id=name)(lambda: None)() for name in ("a", "b")]
        task.short_circuit(task_id="go")(lambda x: x).expand(x=source())
    assert element(dag, "choose", 1, (1, "a")).skip == ("b",)
    assert element(dag, "choose", 1, (1, None)).skip == ("a", "b")
    assert element(dag, "go", 0, (0, False)).skip_all_downstream
    assert not element(dag, "go", 0, (0, True)).skip_all_downstream


def test_a_long_list_of_the_configuration_is_read_lazily() -> None:
    with DAG("d", params={"rows": [], "n": 0}) as dag:

        @task(params={"rows": Param([], type="array")})
        def read(rows: Any, text: str, dag_run: Any, params: Any) -> Any:
            return [list(rows), text, dag_run.conf["rows"][1], len(params["rows"]), dag_run.conf["n"], repr(rows)]

        read(dag.param("rows"), "{{ dag_run.conf['rows'][0] }} {{ params.n }}")
    services = Services(sequences={("", "rows"): [(0, '"a"'), (1, '"b"')]})
    conf = '{"rows":{"$tidemill":"items","value":2},"n":1}'
    found = value_of(attempt(dag, "read", services=services, conf=conf, params=conf))
    assert found == [["a", "b"], "a 1", "b", 2, 1, "<LazySequence of conf['rows'] with 2 values>"]


def test_a_changed_file_is_named() -> None:
    with DAG("d") as dag:
        show.expand(x=[1])
        source()
    assert "no longer has a value for this element" in failure(element(dag, "show", 1, (1, ...))).error
    assert "other sources than when the run began" in failure(element(dag, "show", 0)).error
    assert "is mapped now" in failure(attempt(dag, "show")).error
    assert "is no longer mapped" in failure(element(dag, "source", 0, (0, 1))).error


def test_a_missing_argument_of_a_constructor_is_named() -> None:
    class Needs(Show):
        def __init__(self, *, needed: Any, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    with DAG("d") as dag:
        Needs.partial(task_id="needs").expand_kwargs(source())
    assert "missing 1 required keyword-only argument: 'needed'" in failure(element(dag, "needs", 0, (0, {}))).error


def test_the_label_is_rendered_after_the_attempt(caplog: pytest.LogCaptureFixture) -> None:
    @task(map_index_template="{{ name }} {{ task.op_kwargs['x'] }} {{ ti.map_index }}")
    def named(x: str, name: bool = True) -> None:
        if name:
            get_current_context()["name"] = x.upper()
        if x == "bad":
            raise ValueError(x)
        if x == "skip":
            raise AirflowSkipException

    with DAG("d") as dag:
        named.expand(x=source())
        named.override(task_id="unnamed").partial(name=False).expand(x=source())
        named.override(task_id="long", map_index_template="{{ task.op_kwargs['x'] * 300 }}").expand(x=source())
    assert element(dag, "named", 3, (3, "a")).label == "A a 3"
    assert element(dag, "named", 3, (3, "bad")).label == "BAD bad 3"
    assert element(dag, "named", 3, (3, "skip")).label == "SKIP skip 3"
    assert len(element(dag, "long", 3, (3, "a")).label or "") == 250
    with caplog.at_level(logging.WARNING):
        result = element(dag, "unnamed", 3, (3, "a"))
    assert result.label is None
    assert value_of(result) is None
    assert "map_index_template" in caplog.text


class Waits(Show):
    def execute(self, context: Any) -> Any:
        self.defer(trigger=TimeDeltaTrigger(5), method_name="resumed")

    def resumed(self, context: Any, event: Any) -> Any:
        return [self.text, event]


def test_an_element_defers_and_resumes_with_its_values() -> None:
    with DAG("d") as dag:
        Waits.partial(task_id="waits", map_index_template="{{ task.text }}").expand(text=source())
    deferred = element(dag, "waits", 1, (1, "a"))
    assert isinstance(deferred.ending, Deferral)
    assert deferred.label is None
    resumed = resume(dag, "waits", deferred, 3, map_index=1, elements=('"a"',), leaf_indexes=(1,))
    assert (value_of(resumed), resumed.label) == (["a", 3], "a")


@pytest.mark.parametrize("name", ["on_success", "on_failure", "on_retry", "on_skipped"])
def test_callbacks_of_an_element_see_its_operator_and_its_index(name: str) -> None:
    seen: list[Any] = []
    with DAG("d") as dag:
        Show.partial(task_id="t", plain=3, **{f"{name}_callback": seen.append}).expand(text=source().map(str.upper))
    element(dag, "t", 2, (2, "a"), callback=Callback(name, "broken"), map_length=4)
    (context,) = seen
    task = context["task"]
    assert (type(task), task.text, task.plain, task.task_id, context["ti"].task is task) == (Show, "A", 3, "t", True)
    assert (context["ti"].map_index, context["ti"].operator, context["expanded_ti_count"]) == (2, "Show", 4)


@pytest.mark.parametrize("leaves", [(), ((2, 5),)])
def test_callbacks_of_an_element_whose_arguments_cannot_be_found_see_the_mapped_task(
    leaves: tuple[tuple[int, Any], ...], caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []
    with DAG("d") as dag:
        Show.partial(task_id="t", plain=3, on_failure_callback=seen.append).expand(text=source().map(str.upper))
    element(dag, "t", 2, *leaves, callback=Callback("on_failure", "broken"))
    (context,) = seen
    assert (context["ti"].map_index, context["task"].plain, context["ti"].operator) == (2, 3, "Show")
    assert "the arguments of element 2 are not known to its callbacks" in caplog.text


# -- what other tasks read ---------------------------------------------------------------------------------------------


def test_an_unmapped_task_gets_the_results_of_a_map_and_of_a_generator() -> None:
    @task
    def generate() -> Any:
        yield 1

    with DAG("d") as dag:
        mapped = show.expand(x=[1, 2])
        task(task_id="sum")(lambda values: [list(values), values.__class__.__name__])(mapped)
        task(task_id="key")(lambda values: list(values))(mapped["k"])
        task(task_id="yields")(lambda values: values)(generate())
        task(task_id="applied")(lambda values: [values[1], list(values[:1]), len(values)])(mapped.map(lambda n: n * 10))
        task(task_id="zipped")(lambda values: values)(mapped.zip(source(), fillvalue=0))
        task(task_id="paired")(lambda values: values)(mapped.map(lambda n: n * 10).zip(mapped["j"]))
    services = Services(
        xcoms={("source", "return_value"): encode({"a": 1})},
        sequences={
            ("show", "return_value"): [(0, "1"), (7, "2")],
            ("show", "k"): [(1, "5")],
            ("show", "j"): [(1, "5"), (7, "6")],
            ("generate", "return_value"): [(0, "8")],
        },
    )
    assert value_of(attempt(dag, "sum", services)) == [[1, 2], "LazySequence"]
    assert value_of(attempt(dag, "key", services)) == [5]
    assert value_of(attempt(dag, "yields", services)) == [8]
    assert value_of(attempt(dag, "applied", services)) == [20, [10], 2]
    assert value_of(attempt(dag, "zipped", services)) == [(1, ("a", 1)), (2, 0)]
    assert value_of(attempt(dag, "paired", services)) == [(20, 6)]


def test_items_of_a_number_cannot_be_mapped_or_zipped() -> None:
    with DAG("d") as dag:
        task(task_id="sum")(lambda values: list(values))(source().map(str))
    services = Services(xcoms={("source", "return_value"): "5"})
    assert "is of type int; map() and zip() need a list or a dict" in failure(attempt(dag, "sum", services)).error


def pull(services: Services, *args: Any, **kwargs: Any) -> Any:
    """Return what `xcom_pull` gives in a task after a map `m`, a generator `g` and a plain task `p`."""
    with DAG("d") as dag:
        show.override(task_id="m").expand(x=[1])
        task(task_id="g")(lambda: (yield 1))()
        source.override(task_id="p")()
        task(task_id="puller")(lambda ti: ti.xcom_pull(*args, **kwargs))()
    return attempt(dag, "puller", services)


def test_xcom_pull_reads_maps_by_index_or_as_a_whole() -> None:
    services = Services(
        xcoms={("p", "return_value"): "9", ("g", "k"): "8"},
        sequences={("m", "return_value"): [(0, "1"), (7, "2")], ("g", "return_value"): [(0, "5")]},
    )
    assert value_of(pull(services, "m")) == [1, 2]
    assert value_of(pull(services, "g")) == [5]
    assert value_of(pull(services, "g", key="k")) == 8
    assert value_of(pull(services, "m", map_indexes=7)) == 2
    assert value_of(pull(services, "m", map_indexes=3, default="none")) == "none"
    assert value_of(pull(services, "m", map_indexes=[7, 3, 0])) == [2, None, 1]
    assert value_of(pull(services, ["p"])) == [9]
    assert value_of(pull(services, "m", key="nothing").ending and pull(services, "m", key="nothing")) == []
    assert (
        "is not supported, because it stores a sequence" in failure(pull(services, "m", include_prior_dates=True)).error
    )


def test_xcom_pull_reads_maps_of_other_dags_and_runs() -> None:
    services = Services(xcoms={("p", "return_value"): "9"}, sequences={("far", "return_value"): [(0, "1"), (7, "2")]})
    assert value_of(pull(services, "far", dag_id="other")) == [1, 2]
    assert value_of(pull(services, "far")) is None
    assert value_of(pull(services, "near", dag_id="other", default="none")) == "none"
    assert value_of(pull(services, ["p", "near"], dag_id="other", run_id="r")) == [9, None]
    assert value_of(pull(services, "m", run_id="r")) == []


def lazy(count: int, page_values: int = 1_000) -> tuple[LazySequence, Services]:
    values = [(2 * number, str(number)) for number in range(count)]
    services = Services(sequences={("m", "k"): values}, page_values=page_values)
    return LazySequence(services, "m", "k"), services


def test_a_lazy_sequence_is_a_sequence_of_what_was_stored() -> None:
    values, _ = lazy(5)
    assert isinstance(values, Sequence)
    assert (len(values), values[0], values[-1], list(values)) == (5, 0, 4, [0, 1, 2, 3, 4])
    assert list(values.items()) == [(0, 0), (2, 1), (4, 2), (6, 3), (8, 4)]
    assert values == [0, 1, 2, 3, 4]
    assert values != [0, 1, 2, 3]
    assert values != 5
    assert 3 in values
    assert list(reversed(values)) == [4, 3, 2, 1, 0]
    assert values.index(3) == 3
    assert repr(values) == "<LazySequence of task 'm' with 5 values>"
    with pytest.raises(IndexError):
        values[5]


def test_slices_are_lazy() -> None:
    values, _ = lazy(10)
    assert values[2:5] == [2, 3, 4]
    assert values[2:8][1:3] == [3, 4]
    assert list(values[::3]) == [0, 3, 6, 9]
    assert values[::-1] == list(range(9, -1, -1))
    assert values[3:][0] == 3
    assert values[20:] == []
    assert repr(values[:2]) == "<2 values of <LazySequence of task 'm' with 10 values>>"


@pytest.mark.parametrize("page_values", [1, 7, 1_000])
def test_pages_may_end_early(page_values: int) -> None:
    values, _ = lazy(50, page_values)
    assert list(values) == list(range(50))
    assert [values[place] for place in reversed(range(50))] == list(reversed(range(50)))
    assert list(values[5:45]) == list(range(5, 45))


def test_values_are_read_a_page_at_a_time() -> None:
    values, services = lazy(5_000)
    assert sum(values) == sum(range(5_000))
    assert len(services.pages) == 6
    services.pages.clear()
    assert [values[place] for place in range(5_000)] == list(range(5_000))
    assert len(services.pages) == 5
    services.pages.clear()
    assert values[2_500:4_700] == list(range(2_500, 4_700))
    assert len(services.pages) == 3


def test_a_sequence_whose_values_are_deleted_meanwhile_says_so() -> None:
    values, services = lazy(2_000)
    assert len(values) == 2_000
    services.sequences.clear()
    assert list(values) == []
    assert list(values[:3]) == []
    with pytest.raises(IndexError, match="has been deleted"):
        values[1_500]


def test_map_functions_are_checked() -> None:
    with DAG("d"):
        output: XComArg = source()
        with pytest.raises(DagError, match="map\\(\\) needs a plain function"):
            output.map(5)  # type: ignore[arg-type]


def test_an_element_whose_counterpart_has_no_result_says_so_and_may_be_retried() -> None:
    with DAG("d") as dag:
        show.override(task_id="after").expand(x=show.expand(x=["a"]).map(str))
    assert value_of(element(dag, "after", 0, (0, "b"))) == ["b", None]
    failed = failure(attempt(dag, "after", map_index=0, elements=(None,), leaf_indexes=(0,)))
    assert "element 0 of task 'show' has no result now" in failed.error
    assert failed.may_retry
