"""What the file of a DAG says of tasks that start in a trigger, what it is refused for, and how templates render."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from datetime import UTC, datetime, time, timedelta
from typing import Any

import pytest
from tests.dags.attempts import Claim, Resume, Services

from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.structure import StartStructure
from tidemill.dags import (
    DAG,
    BaseOperator,
    BaseSensorOperator,
    DagError,
    DateTimeSensor,
    EmptyOperator,
    HttpSensor,
    StartTriggerArgs,
    StreamOperator,
    TimeDeltaSensor,
    TimeSensor,
    task,
    task_group,
)
from tidemill.dags.execution.running import run_attempt
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.dags.structure.structures import read_structure
from tidemill.dags.triggers.start_templates import render_kwargs
from tidemill.runtime.json.codec import decode, encode
from tidemill.triggers import BaseTrigger, TriggerEvent
from tidemill.triggers.builtin.temporal import DateTimeTrigger, LaterTrigger, TimeOfDayTrigger


class Waits(BaseTrigger):
    def __init__(self, url: str = "", n: int = 0) -> None:
        super().__init__()
        self.url, self.n = url, n

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Waits", {"url": self.url, "n": self.n}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(self.url)


CLASSPATH = f"{__name__}.Waits"


STARTS: Any = {"start_from_trigger": True, "start_trigger_args": StartTriggerArgs(CLASSPATH, None)}


class Starts(BaseOperator):
    start_trigger_args = StartTriggerArgs(CLASSPATH, "go_on", {"url": "u"}, {"a": 1}, timedelta(seconds=5))
    start_from_trigger = True

    def go_on(self, context: Any, a: int, event: Any = None) -> Any:
        return event


class Plain(BaseOperator):
    def go_on(self, context: Any, event: Any = None) -> Any:
        return event


def find(dag: DAG, task_id: str = "t") -> StartStructure:
    """Return the start of a task after it was written and read."""
    (found,) = (one.start for one in read_structure(serialize_dag(dag)).tasks if one.id == task_id)
    assert found is not None
    return found


def refuse(*, kwargs: Any = None, dag_options: dict[str, Any] | None = None, **options: Any) -> str:
    with DAG("d", **(dag_options or {})) as dag:
        args = StartTriggerArgs(CLASSPATH, None, kwargs)
        Plain(task_id="t", start_from_trigger=True, **{"start_trigger_args": args, **options})
    with pytest.raises(DagError) as refused:
        build_structure(dag)
    assert "task 't'" in str(refused.value)
    return str(refused.value)


def test_a_class_says_how_its_tasks_start_and_an_argument_replaces_the_arguments_of_the_trigger():
    with DAG("d") as dag:
        Starts(task_id="t")
        Starts(task_id="other", trigger_kwargs={"url": "{{ ds }}"})
        Starts(task_id="no", start_from_trigger=False)
        Plain(task_id="own", start_from_trigger=True, start_trigger_args=StartTriggerArgs(Waits, "go_on"))  # type: ignore[arg-type]
    assert find(dag) == StartStructure(CLASSPATH, '{"url":"u"}', "go_on", '{"a":1}', 5_000_000)
    assert find(dag, "other") == StartStructure(CLASSPATH, '{"url":"{{ ds }}"}', "go_on", '{"a":1}', 5_000_000, True)
    assert find(dag, "own") == StartStructure(CLASSPATH, method="go_on")
    (none,) = (one.start for one in build_structure(dag).tasks if one.id == "no")
    assert none is None
    assert Starts.start_trigger_args.trigger_kwargs == {"url": "u"}


def test_a_constructor_may_set_them_as_airflow_shows_and_reaches_no_other_task():
    class Own(Starts):
        def __init__(self, *, trigger_kwargs: dict[str, Any] | None, start_from_trigger: bool, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            assert self.start_trigger_args is not None
            self.start_trigger_args.trigger_kwargs = trigger_kwargs
            self.start_from_trigger = start_from_trigger

    with DAG("d") as dag:
        Own(task_id="t", trigger_kwargs={"n": 1}, start_from_trigger=True)
        Own(task_id="u", trigger_kwargs={"n": 2}, start_from_trigger=True)
        Own.partial(task_id="m", start_from_trigger=True).expand(trigger_kwargs=[{"n": 3}, {"n": 4}])
    assert [find(dag, name).kwargs for name in "tu"] == ['{"n":1}', '{"n":2}']
    assert find(dag, "m").elements == ('{"n":3}', '{"n":4}')


def test_a_callable_and_what_cannot_be_stored_are_refused_by_task_and_argument():
    said = refuse(kwargs={"url": ["a", lambda: 1]})
    assert "argument 'trigger_kwargs' of start_trigger_args" in said
    assert "trigger_kwargs['url'][1]" in said
    assert "trigger_kwargs['n']" in refuse(kwargs={"n": threading.Lock()})
    args = StartTriggerArgs(CLASSPATH, "go_on", None, {"x": object()})
    assert "next_kwargs['x']" in refuse(start_trigger_args=args)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ shout(ds) }}", "uses 'shout', a macro of the DAG"),
        ("{{ ds | loud }}", "uses 'loud', a filter of the DAG"),
        ("{{ ds | nothing }}", "uses 'nothing', not a filter"),
        ("{{ ti.xcom_pull('a') }}", "uses 'xcom_pull'"),
        ("{{ task_instance['xcom_pull']('a') }}", "uses 'xcom_pull'"),
        ("{{ var.value.a }}", "uses 'var', which is not known there"),
        ("{{ macros.ds_add(ds, 1) }}", "uses 'macros', which is not known there"),
        ("{{ execution_date }}", "uses 'execution_date', which is not known there"),
        ("{{ run_idd }}", "did you mean 'run_id'?"),
        ("{{ ds ", "is invalid"),
        ("{% include 'a.sql' %}", "loads a file"),
        ("{{ element.x }}", "the task is not mapped"),
    ],
)
def test_a_template_that_needs_more_than_values_of_the_run_is_refused(text: str, said: str):
    macros = {"user_defined_macros": {"shout": str.upper}, "user_defined_filters": {"loud": str.upper}}
    assert said in refuse(kwargs={"url": [{"a": text}]}, dag_options=macros)


def test_what_is_not_known_when_the_trigger_starts_is_refused():
    assert "needs start_trigger_args" in refuse(start_trigger_args=None)
    assert "must be a StartTriggerArgs" in refuse(start_trigger_args={"trigger_cls": "a.B"})
    assert "cannot be imported" in refuse(start_trigger_args=StartTriggerArgs("no.such.Trigger", None))
    assert "import path" in refuse(start_trigger_args=StartTriggerArgs("Trigger", None))
    assert "is not a trigger class" in refuse(start_trigger_args=StartTriggerArgs("json.JSONDecoder", None))
    assert "do not fit" in refuse(kwargs={"urll": "u"})
    assert "has no method 'no'" in refuse(start_trigger_args=StartTriggerArgs(CLASSPATH, "no"))
    bad = StartTriggerArgs(CLASSPATH, "go_on", None, {"b": 1})
    assert "does not accept the arguments" in refuse(start_trigger_args=bad)
    assert "must be a dict" in refuse(kwargs=["u"])
    assert "timeout of start_trigger_args" in refuse(start_trigger_args=StartTriggerArgs(CLASSPATH, None, timeout="1"))  # type: ignore[arg-type]
    assert "on_execute_callback" in refuse(on_execute_callback=print)
    assert "params of the task itself" in refuse(kwargs={"url": "{{ params.x }}"}, params={"x": 1})


def test_the_output_of_a_task_is_refused_and_a_param_is_to_be_a_template():
    with DAG("d") as dag:
        before = EmptyOperator(task_id="before")
        kwargs = {"url": [before.output], "n": 1}
        Plain(task_id="t", start_from_trigger=True, start_trigger_args=StartTriggerArgs(CLASSPATH, None, kwargs))
    with pytest.raises(DagError, match=r"task 't': argument 'trigger_kwargs' .* has the output of task 'before'"):
        build_structure(dag)
    with DAG("d", params={"p": 1}) as dag:
        args = StartTriggerArgs(CLASSPATH, None, {"n": dag.param("p")})
        Plain(task_id="t", start_from_trigger=True, start_trigger_args=args)
    with pytest.raises(DagError, match=r"write it as a template: '\{\{ params.p \}\}'"):
        build_structure(dag)


def test_an_output_as_an_argument_and_an_argument_of_a_mapped_group_are_refused_with_other_advice():
    with DAG("d") as dag:
        Plain(task_id="t", **STARTS, trigger_kwargs={"url": EmptyOperator(task_id="before").output})
    with pytest.raises(DagError, match=r"task 't': .* map the task over it with expand\(trigger_kwargs=...\)"):
        build_structure(dag)

    @task_group
    def group(x: Any) -> None:
        Plain(task_id="t", **STARTS, trigger_kwargs={"url": x})

    with DAG("d") as dag:
        group.expand(x=[1, 2])
    with pytest.raises(DagError, match=r"task 'group.t': .* has argument 'x' of its mapped group"):
        build_structure(dag)


def test_a_generator_and_arguments_without_a_trigger_are_refused():
    with DAG("d") as dag:

        @task(start_from_trigger=True, start_trigger_args=StartTriggerArgs(CLASSPATH, None))
        def numbers():
            yield 1

        numbers()
    with pytest.raises(DagError, match="a generator task cannot start in a trigger"):
        build_structure(dag)
    with pytest.raises(DagError, match="trigger_kwargs needs start_trigger_args"):
        Plain(task_id="t", trigger_kwargs={})


def test_a_stream_operator_starts_in_its_trigger_and_is_a_source_of_maps():
    with DAG("d") as dag:
        stream = StreamOperator(task_id="s", trigger=Waits("{{ ds }}", 3), timeout=5)

        @task
        def use(url: Any) -> None: ...

        use.expand(url=stream.output)
    found = {one.id: one for one in build_structure(dag).tasks}
    assert found["s"].is_generator
    assert found["s"].start == StartStructure(
        CLASSPATH, '{"n":3,"url":"{{ ds }}"}', timeout_us=5_000_000, rendered=True, feeds=True
    )
    mapped = found["use"].mapped
    assert mapped is not None
    assert mapped.factors[0].kind == "generator"
    with DAG("e"), pytest.raises(DagError, match="always starts"):
        StreamOperator(task_id="s", trigger=Waits(), start_from_trigger=False)


def test_elements_of_a_map_start_with_their_own_arguments():
    with DAG("d", params={"all": []}) as dag:
        listing = EmptyOperator(task_id="listing")
        part = Starts.partial(task_id="literal", start_from_trigger=True)
        part.expand(trigger_kwargs=[{"url": "a"}, {"url": "{{ ds }}"}])
        Starts.partial(task_id="xcom").expand(trigger_kwargs=listing.output)
        Starts.partial(task_id="param").expand(trigger_kwargs=dag.param("all"))
        args = StartTriggerArgs(CLASSPATH, None, {"url": "{{ element.a }}"})
        shared = Plain.partial(task_id="shared", start_from_trigger=True, start_trigger_args=args)
        HttpSensor.partial(task_id="http", start_from_trigger=True).expand(url=["http://a/{{ ds }}", "http://b"])
        Starts.partial(task_id="kwargs").expand_kwargs([{"trigger_kwargs": {"n": 1}}])
        shared.expand(trigger_kwargs=[{"url": "{{ element.trigger_kwargs.n }}"}])
    literal = find(dag, "literal")
    assert (literal.elements, literal.rendered) == (('{"url":"a"}', '{"url":"{{ ds }}"}'), True)
    assert (find(dag, "xcom").leaf, find(dag, "xcom").rendered) == (0, False)
    assert find(dag, "param").leaf == 0
    assert [decode(one)["url"] for one in find(dag, "http").elements] == ["http://a/{{ ds }}", "http://b"]
    assert find(dag, "kwargs").kwargs == '{"n":1}'
    assert find(dag, "shared").items == (('{"url":"{{ element.trigger_kwargs.n }}"}',),)


class Takes(Starts):
    def __init__(self, *, a: Any = None, b: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def test_arguments_of_other_tasks_may_be_mapped_over_beside():
    with DAG("d") as dag:
        listing = EmptyOperator(task_id="listing")
        Takes.partial(task_id="second").expand(a=listing.output, trigger_kwargs=listing.output)
        Takes.partial(task_id="mixed").expand(a=listing.output, trigger_kwargs=[{"url": "{{ ds }}"}])
        args = StartTriggerArgs(CLASSPATH, None, {"url": "{{ element.a }}"})
        Takes.partial(task_id="named", start_trigger_args=args).expand(a=listing.output, b=[1, 2])
    assert find(dag, "second").leaf == 1
    mixed = find(dag, "mixed")
    assert (mixed.leaf, mixed.rendered, mixed.items) == (1, True, ((), ('{"url":"{{ ds }}"}',)))
    assert find(dag, "named").items == ((), ("1", "2"))


@pytest.mark.parametrize(
    ("expand", "said"),
    [
        (lambda part, out: part.expand(trigger_kwargs=out.map(lambda one: one)), "uses map\\(\\) or zip\\(\\)"),
        (lambda part, out: part.expand_kwargs(out), "needs a list of dicts in the file"),
        (lambda part, out: part.expand(a=out.map(lambda one: one)), "use 'element'"),
        (lambda part, out: part.expand(trigger_kwargs=[{"url": "{{ var.x }}"}], a=out), "uses 'var'"),
        (lambda part, out: part.expand(trigger_kwargs=[{"url": "u"}, {"url": "x" * (1 << 20)}]), "return them from a"),
    ],
)
def test_a_map_whose_arguments_need_a_worker_is_refused(expand: Any, said: str):
    with DAG("d") as dag:
        args = StartTriggerArgs(CLASSPATH, None, {"url": "{{ element.a }}"})
        part = Takes.partial(task_id="t", start_trigger_args=args)
        expand(part, EmptyOperator(task_id="listing").output)
    with pytest.raises(DagError, match=f"task 't'.*{said}"):
        build_structure(dag)


def test_a_sensor_that_computes_its_trigger_is_mapped_over_lists_only():
    with DAG("d") as dag:
        listing = EmptyOperator(task_id="listing")
        HttpSensor.partial(task_id="t", start_from_trigger=True).expand(url=listing.output)
    with pytest.raises(DagError, match="unless all arguments of expand"):
        build_structure(dag)


def test_a_map_over_nothing_starts_nothing():
    with DAG("d") as dag:
        Starts.partial(task_id="t").expand(trigger_kwargs=[])
    (found,) = build_structure(dag).tasks
    assert found.start is None


def test_sensors_of_today_start_in_their_triggers():
    at = datetime(2026, 1, 2, 3, tzinfo=UTC)
    with DAG("d") as dag:
        HttpSensor(task_id="http", url="https://a/{{ ds }}", start_from_trigger=True, poke_interval=3, timeout=60)
        DateTimeSensor(task_id="moment", target_time="{{ ds }}", start_from_trigger=True)
        TimeDeltaSensor(task_id="delta", delta=timedelta(hours=1), start_from_trigger=True)
        TimeSensor(task_id="time", target_time=time(3), start_from_trigger=True)
    http = find(dag, "http")
    assert (http.method, http.timeout_us, decode(http.kwargs)["url"]) == ("complete", 60_000_000, "https://a/{{ ds }}")
    assert {name: find(dag, name).method for name in ("moment", "delta", "time")} == dict.fromkeys(
        ("moment", "delta", "time"), ""
    )

    def create(name: str) -> DateTimeTrigger:
        start = find(dag, name)
        kwargs = decode(render_kwargs(start.kwargs, Claim("d", name), {}, at, native=False))
        cls = {"moment": LaterTrigger, "delta": LaterTrigger, "time": TimeOfDayTrigger}[name]
        assert start.classpath.endswith(cls.__name__)
        found = cls(**kwargs)
        assert found.serialize()[1]["end_from_trigger"] is True
        return found

    assert create("moment").moment == datetime(2026, 1, 1, tzinfo=UTC)
    assert create("delta").moment == datetime(2026, 1, 1, 1, tzinfo=UTC)
    assert create("time").moment == datetime(2026, 1, 2, 3, tzinfo=UTC)


def test_a_sensor_with_its_own_complete_is_resumed_by_a_worker():
    class Own(TimeDeltaSensor):
        def complete(self, context: Any, event: Any = None) -> None:
            return

    with DAG("d") as dag:
        Own(task_id="t", delta=1, start_from_trigger=True)
    assert find(dag).method == "complete"
    assert decode(find(dag).kwargs)["end_from_trigger"] is False


def test_a_base_sensor_without_a_trigger_cannot_start_in_one():
    with DAG("d") as dag:
        BaseSensorOperator(task_id="t", start_from_trigger=True)
    with pytest.raises(DagError, match="needs start_trigger_args"):
        build_structure(dag)


def test_an_event_without_a_method_to_resume_with_fails_the_task_finally():
    with DAG("d") as dag:
        Plain(task_id="t", start_from_trigger=True, start_trigger_args=StartTriggerArgs(CLASSPATH, None))
    result = run_attempt(dag, Claim("d", "t", resume=Resume("", "{}", "1")), Services())
    assert isinstance(result.ending, Failure)
    assert not result.ending.may_retry
    assert "next_method is not set" in result.ending.error


def test_templates_see_values_of_the_run_and_of_the_element():
    claim = Claim("d", "t", map_index=4, params=encode({"n": 5}), conf=encode({"n": 5}), try_number=2)
    kwargs = {
        "a": "{{ ds }} {{ run_id }} {{ params.n }} {{ dag_run.conf['n'] }} {{ ti.map_index }} {{ try_number }}",
        "{{ ds_nodash }}": ("{{ element.x.url }}", {"b": "{{ logical_date | ts }}"}),
        "plain": 7,
    }
    started = datetime(2026, 5, 1, tzinfo=UTC)
    found = decode(render_kwargs(encode(kwargs), claim, {"x": {"url": "u"}}, started, native=False))
    assert found == {
        "a": "2026-01-01 run 5 5 4 2",
        "20260101": ("u", {"b": "2026-01-01T00:00:00+00:00"}),
        "plain": 7,
    }
    native = decode(render_kwargs(encode({"n": "{{ params.n }}"}), claim, {}, started, native=True))
    assert native == {"n": 5}


@pytest.mark.parametrize(
    "text",
    [
        "{{ params.no }}",
        "{{ 10 ** (10 ** 9) }}",
        "{{ 'x' * 10 ** 9 }}",
        "{{ 2 * [1] * 10 ** 8 }}",
        "{{ ds.__class__ }}",
        "{{ ti.xcom_pulls() }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_a_template_that_cannot_be_rendered_says_so(text: str):
    with pytest.raises((ValueError, OverflowError)):
        render_kwargs(encode({"a": text}), Claim("d", "t"), {}, datetime.now(UTC), native=False)
