from __future__ import annotations

import io
import json
import struct
import subprocess
import sys
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tidemill.dags
from tidemill.dags import (
    DAG,
    BaseOperator,
    BashOperator,
    DagError,
    EmptyOperator,
    Param,
    PythonOperator,
    TaskGroup,
    dag,
    task,
)
from tidemill.dags.structure.building import build_structure, serialize_dag
from tidemill.triggers.base import BaseTrigger
from tidemill.triggers.builtin.file import FileTrigger

#: A zone of the program itself, as its file would define it: UTC, under a name that no other program knows.
NOWHERE = ZoneInfo.from_file(
    io.BytesIO(b"TZif" + bytes(16) + struct.pack(">6l", 0, 0, 0, 0, 1, 4) + struct.pack(">lBB", 0, 0, 0) + b"UTC\0"),
    key="Nowhere/Near",
)
AIRFLOW_NAMES = (
    "BaseHook BaseOperator BaseSensorOperator Connection Context DAG EdgeModifier Label Param PokeReturnValue "
    "TaskGroup Variable XComArg chain chain_linear cross_downstream dag get_current_context literal setup task "
    "task_group teardown"
)


def test_the_names_of_airflow_are_there() -> None:
    for name in [*AIRFLOW_NAMES.split(), *tidemill.dags.__all__]:
        assert getattr(tidemill.dags, name)
    assert set(tidemill.dags.__all__) <= set(dir(tidemill.dags))
    with pytest.raises(AttributeError, match="has no attribute 'Dag'"):
        tidemill.dags.Dag  # type: ignore[attr-defined]  # noqa: B018


def test_an_argument_of_an_operator_may_have_any_name() -> None:
    class Reads(BaseOperator):
        def __init__(self, *, cls: str, function: str, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.names = cls, function

    with DAG("names"):
        assert Reads(task_id="reads", cls="a", function="b").names == ("a", "b")


def test_importing_it_is_cheap() -> None:
    heavy = "jinja2 jsonschema sqlalchemy pyspark confluent_kafka pydantic asyncio httpx"
    script = (
        f"import sys; import tidemill.dags; print(*[name for name in {heavy!r}.split() if name in sys.modules]);"
        "from tidemill.dags import DAG, task, EmptyOperator;"
        "heavy = ('jsonschema', 'sqlalchemy', 'pyspark', 'confluent_kafka', 'httpx');"
        "print(*[name for name in heavy if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.split() == []


LOOP: dict[str, Any] = {}
LOOP["again"] = LOOP


class Wrong(BaseOperator):
    template_fields = ("value", "missing")

    def __init__(self, *, value: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value


class Plain(BaseOperator):
    def __init__(self, *, value: Any = None, needed: int = 0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.value = value
        self.needed = needed


class Strict(BaseOperator):
    def __init__(self, *, needed: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.needed = needed


class Forgetful(BaseTrigger):
    """Does not serialize what it was created with."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number = number

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Forgetful", {}

    async def run(self) -> Any:
        yield None


class Renamed(Forgetful):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Other", {}


class Picky(Forgetful):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Picky", {"nummer": 1}


class Rising(Forgetful):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Rising", {"number": self.number + 1}


class Foreign(Forgetful):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.Foreign", {"number": object()}


class Raising(Forgetful):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        raise RuntimeError("not today")


def empty(**arguments: Any) -> Any:
    return EmptyOperator(**{"task_id": "t", **arguments})


@pytest.mark.parametrize(
    ("create", "message"),
    [
        (lambda: empty(task_id="a b"), "task_id 'a b' may contain only letters, digits, '-', '_' and '.'"),
        *((lambda id=id: empty(task_id=id), "must not start with '-' or '.'") for id in (".", "..", ".a", "-x")),
        (lambda: empty(task_id=7), "task_id must be a string, got 7"),
        (lambda: empty(task_id="x" * 251), "has 251 characters; at most 250"),
        (lambda: EmptyOperator(), "a task without task_id: .*missing 1 required keyword-only argument: 'task_id'"),
        (lambda: EmptyOperator("t"), "a task without task_id: EmptyOperator accepts no positional arguments"),
        (lambda: empty(retires=1), "task 't': EmptyOperator has no argument 'retires'; did you mean 'retries'"),
        (lambda: empty(colour=1), "task 't': EmptyOperator has no argument 'colour'; remove it"),
        (lambda: empty(retries="2"), "task 't': retries must be a whole number, got '2'"),
        (lambda: empty(retries=-1), "task 't': retries must be at least 0"),
        (lambda: empty(retries=True), "task 't': retries must be a whole number, got True"),
        (lambda: empty(retry_delay="5m"), "task 't': retry_delay must be a timedelta or a number of seconds"),
        (lambda: empty(retry_delay=-1), "task 't': retry_delay must not be negative"),
        (lambda: empty(retry_delay=1e300), "task 't': retry_delay is 1e.300 seconds; at most 100 years"),
        (lambda: empty(retry_delay=float("nan")), "task 't': retry_delay is nan seconds"),
        (lambda: empty(retry_delay=timedelta(days=99_999)), "at most 100 years are allowed"),
        (lambda: empty(execution_timeout=0), "task 't': execution_timeout must be positive"),
        (lambda: empty(pool=7), "task 't': pool must be a string, got 7"),
        (lambda: empty(pool=""), "task 't': pool is empty"),
        (lambda: empty(pool_slots=0), "task 't': pool_slots must be at least 1"),
        (lambda: empty(queue=["a"]), r"task 't': queue must be a string, got \['a'\]"),
        (lambda: empty(queue="a\0"), "task 't': queue contains a NUL character"),
        (lambda: empty(doc_md="\ud800"), "task 't': doc_md is not Unicode text"),
        (
            lambda: empty(trigger_rule="all_sucess"),
            "task 't': trigger_rule is 'all_sucess'; did you mean 'all_success'",
        ),
        (lambda: empty(weight_rule="up"), "task 't': weight_rule is 'up'; use one of downstream, upstream, absolute"),
        (lambda: empty(depends_on_past="yes"), "task 't': depends_on_past must be True or False, got 'yes'"),
        (lambda: empty(max_active_tis_per_dag=0), "task 't': max_active_tis_per_dag must be at least 1"),
        (lambda: empty(on_failure_callback="mail"), "task 't': on_failure_callback must be a function"),
        (lambda: empty(params=[1]), r"task 't': params must be a mapping of names to values, got \[1\]"),
        (
            lambda: BashOperator(task_id="t", bash_command="a", env=LOOP),
            "task 't': argument 'env' contains itself, or is nested too deep",
        ),
        (lambda: Plain(task_id="t", value=LOOP), "task 't': argument 'value' contains itself, or is nested too deeply"),
        (lambda: empty(params={"n": LOOP}), "task 't': the default of param 'n' is too large, or contains itself"),
        (lambda: empty(params={"n": Param("x", type="integer")}), "task 't': the default of param 'n': 'x' is not of"),
        (lambda: empty(params={"n": Param(1, type="number!")}), "task 't': the schema of param 'n' is invalid"),
        (lambda: Wrong(task_id="t"), "task 't': 'missing' is in template_fields, but Wrong does not set it"),
        (lambda: Plain(task_id="t", value=empty(task_id="u").output), "task 't': argument 'value' is the output of a"),
        (lambda: Plain(task_id="t", value=empty(task_id="u")), "task 'u' is passed as an argument; pass its output"),
        (lambda: Strict(task_id="t"), "task 't': .*missing 1 required keyword-only argument: 'needed'"),
        (lambda: PythonOperator(task_id="t", python_callable=7), "task 't': python_callable must be a function, got 7"),
        (
            lambda: PythonOperator(task_id="t", python_callable=lambda a: a),
            r"task 't': <lambda>\(a\) cannot be called with these arguments: missing a required argument: 'a'",
        ),
        (lambda: BashOperator(task_id="t"), "missing 1 required keyword-only argument: 'bash_command'"),
        (lambda: [empty(), empty()], "DAG 'd' already has a task 't'"),
        (lambda: [TaskGroup("t"), empty()], "DAG 'd' already has a group 't'"),
        (lambda: [empty(), TaskGroup("t")], "DAG 'd' already has a task 't'"),
        (lambda: TaskGroup("a b"), "group_id 'a b' may contain only letters"),
        (lambda: empty() >> 7, "7 of type int cannot have edges"),
        (lambda: [one := empty(), one >> one], "task 't' cannot depend on itself"),
        (lambda: empty() >> EmptyOperator(task_id="u", dag=DAG("other")), "task 'u' of DAG 'other' cannot depend on"),
        (lambda: Plain(task_id="t", value=Forgetful(3)), None),
        (lambda: Plain(task_id="t", value=Renamed()), "task 't': argument 'value': Renamed cannot be imported as"),
        (lambda: Plain(task_id="t", value=Picky()), "task 't': argument 'value': .*Picky does not accept the kwargs"),
        (
            lambda: Plain(task_id="t", value=Rising()),
            r"must return the arguments that the trigger was created with; .*number=1",
        ),
        (
            lambda: Plain(task_id="t", value=Foreign()),
            r"task 't': argument 'value': kwargs of Foreign\['number'\] is of",
        ),
        (
            lambda: Plain(task_id="t", value=Raising()),
            r"serialize\(\) of Raising must return .*RuntimeError: not today",
        ),
        (lambda: Plain(task_id="t", value=FileTrigger("/tmp/x")), None),
    ],
)
def test_a_wrong_task_is_refused_with_its_id_and_the_argument(create: Any, message: str | None) -> None:
    with DAG("d"):
        if message is None:
            create()
            return
        with pytest.raises(DagError, match=message):
            create()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dag_id": "a/b"}, "dag_id 'a/b' may contain"),
        ({"schedule": "@dayly"}, "DAG 'd': schedule is '@dayly'; did you mean '@daily'"),
        ({"schedule": "0 25 * * *"}, "DAG 'd': schedule '0 25 \\* \\* \\*' is not a valid cron expression: bad hour"),
        ({"schedule": 5}, "DAG 'd': schedule must be a cron expression, a preset like '@daily', a timedelta or None"),
        ({"schedule": timedelta()}, "DAG 'd': schedule must be positive"),
        ({"start_date": "2026-01-01"}, "DAG 'd': start_date must be a datetime, got '2026-01-01'"),
        (
            {"start_date": datetime(2026, 1, 2), "end_date": datetime(2026, 1, 1)},
            "end_date 2026-01-01.* is before start_date",
        ),
        (
            {"schedule": "@daily", "start_date": datetime(2026, 1, 1, tzinfo=timezone(timedelta(hours=2)))},
            "DAG 'd': the time zone of start_date, UTC.02:00, has no name",
        ),
        (
            {"schedule": "@daily", "start_date": datetime(2026, 1, 1, tzinfo=NOWHERE)},
            "DAG 'd': this machine does not know 'Nowhere/Near', the time zone of start_date",
        ),
        ({"start_date": datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=2)))}, "is outside the years 1 to 9999"),
        ({"catchup": 1}, "DAG 'd': catchup must be True or False, got 1"),
        ({"max_active_runs": 0}, "DAG 'd': max_active_runs must be at least 1"),
        ({"dagrun_timeout": "1h"}, "DAG 'd': dagrun_timeout must be a timedelta"),
        ({"default_args": [1]}, "DAG 'd': default_args must be a mapping"),
        ({"tags": "etl"}, r"DAG 'd': tags must be a list of strings, got 'etl'; write \['etl'\]"),
        ({"tags": 5}, "DAG 'd': tags must be a list of strings, got 5"),
        ({"tags": [1]}, "DAG 'd': tags must be a string, got 1"),
        ({"params": {1: 2}}, "DAG 'd': the name of a param must be a string, got 1"),
        (
            {"params": {"n": Param(type="integer")}, "schedule": "@daily"},
            "DAG 'd': param 'n' has no default, which scheduled runs need",
        ),
        ({"params": {"n": Param(1, **{"$ref": "#/none"})}}, "DAG 'd': the schema of param 'n' is invalid: "),
        (
            {"params": {"n": Param("a", pattern="(")}},
            r"DAG 'd': the schema of param 'n' is invalid: pattern '\(': unclosed group",
        ),
        (
            {"params": {"n": Param("a", items={"pattern": "^(?!b)"})}},
            "DAG 'd': the schema of param 'n' is invalid: pattern .* look-around, .* use `not` and `allOf`",
        ),
        ({"params": {"n": float("nan")}}, "DAG 'd': the default of param 'n' is nan"),
        ({"on_success_callback": 1}, "DAG 'd': on_success_callback must be a function"),
        (
            {"default_args": {"retires": 1}},
            "DAG 'd': no task accepts 'retires' of default_args; did you mean 'retries'",
        ),
    ],
)
def test_a_wrong_dag_is_refused_with_its_id_and_the_argument(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DagError, match=message):
        with DAG(**{"dag_id": "d", **arguments}) as found:
            empty()
        found.validate()
        serialize_dag(found)


def test_a_circle_is_shown() -> None:
    with DAG("d") as found:
        tasks = [EmptyOperator(task_id=name) for name in "abcd"]
        tasks[0] >> tasks[1] >> tasks[2] >> tasks[3]
        tasks[2] >> tasks[1]
    with pytest.raises(DagError, match="DAG 'd': the dependencies form a cycle: b >> c >> b; remove one"):
        found.validate()


def test_what_follows_a_setup_directly_has_to_wait_for_its_success() -> None:
    with DAG("d") as found:
        EmptyOperator(task_id="s").as_setup() >> EmptyOperator(task_id="w", trigger_rule="all_done")
    with pytest.raises(
        DagError, match="task 'w' directly follows the setup 's'; its trigger_rule must be 'all_success'"
    ):
        found.validate()


def test_default_args_hold_for_tasks_groups_over_dag() -> None:
    arguments = {"retries": 3, "queue": "q", "owner": "me", "email": ["x"], "bash_command": "true"}
    with DAG("d", default_args=arguments) as found:
        BashOperator(task_id="a")
        with TaskGroup("g", default_args={"retries": 4}):
            EmptyOperator(task_id="b", default_args={"queue": "own"})
            EmptyOperator(task_id="c", retries=0)
    found.validate()
    tasks = {one.id: one for one in build_structure(found).tasks}
    assert [(tasks[name].retries, tasks[name].queue) for name in ("a", "g.b", "g.c")] == [
        (3, "q"),
        (4, "own"),
        (0, "q"),
    ]
    assert found.get_task("a").bash_command == "true"  # type: ignore[attr-defined]


def test_a_dag_without_tasks_and_one_with_all_arguments_are_described() -> None:
    assert build_structure(DAG("d")).tasks == ()
    zone = ZoneInfo("Europe/Vienna")
    with DAG(
        "d",
        description="text",
        schedule="0 2 * * *",
        start_date=datetime(2026, 7, 1, 2, tzinfo=zone),
        end_date=datetime(2027, 1, 1),
        catchup=True,
        max_active_runs=2,
        max_active_tasks=5,
        dagrun_timeout=timedelta(hours=1),
        params={"n": Param(5, "how many", type="integer", minimum=1), "must": Param("x", type="string")},
        tags=["b", "a"],
        dag_display_name="The DAG",
        fail_fast=True,
        on_failure_callback=print,
    ) as found:
        EmptyOperator(
            task_id="t",
            retry_delay=1.5,
            execution_timeout=timedelta(minutes=1),
            wait_for_downstream=True,
            on_retry_callback=[print],
            task_display_name="The task",
        )
    structure = build_structure(found)
    assert structure.schedule.cron == "0 2 * * *"
    assert structure.schedule.zone == "Europe/Vienna"
    assert structure.schedule.start_us == datetime(2026, 7, 1, tzinfo=UTC).timestamp() * 1e6
    assert structure.schedule.catchup
    assert [(param.name, param.default) for param in structure.params] == [("must", '"x"'), ("n", "5")]
    assert structure.params[1].schema == '{"minimum":1,"type":"integer"}'
    assert structure.tags == ("a", "b")
    assert structure.callbacks == ("on_failure",)
    assert structure.run_timeout_us == 3_600_000_000
    (one,) = structure.tasks
    assert (one.retry_delay_us, one.execution_timeout_us, one.label) == (1_500_000, 60_000_000, "The task")
    assert one.depends_on_past
    assert one.callbacks == ("on_retry",)


@pytest.mark.parametrize("schema", [{}, {"type": "array"}])
def test_a_default_built_of_shared_parts_is_refused_before_it_is_written(schema: dict[str, Any]) -> None:
    default: Any = [0]
    for _ in range(60):
        default = [default, default]
    with pytest.raises(
        DagError, match="the default of param 'tree' is too large, or contains itself; pass a path or a key"
    ):
        DAG("large", params={"tree": Param(default, **schema)})


def test_a_dag_function_has_params_and_may_be_called_twice() -> None:
    text = Param(type="string")

    @dag(schedule=None, tags=["t"])
    def build(n: int = 3, name: Any = text) -> None:
        """What it is for."""

        @task
        def use(value: int) -> int:
            return value

        use(n)  # type: ignore[arg-type]

    first = build(n=5)
    assert first.dag_id == "build"
    assert first.doc_md == "What it is for."
    assert first.params["n"].default == 5
    assert not first.params["name"].has_default
    assert build().params["n"].default == 3

    @dag("named")
    def other() -> None:
        EmptyOperator(task_id="t")

    assert other().dag_id == "named"


SEEDED = """
from tidemill.dags import DAG, EmptyOperator, Param, TaskGroup, Label, task, setup, teardown, cross_downstream
from tidemill.dags.structure.building import serialize_dag
class Custom(EmptyOperator):
    template_fields = ("items",)
    def __init__(self, items, **kwargs):
        super().__init__(**kwargs)
        self.items = items
with DAG("d", tags={"x", "y", "z", "w"}, params={"s": {"a", "b", "c"}, "p": Param(1, enum=[1, 2])}) as dag:
    tasks = [Custom(task_id=f"t{n}", items={object(), "a"}, on_failure_callback=lambda c: None) for n in range(9)]
    cross_downstream(tasks[:4], tasks[4:])
    with TaskGroup("g") as g:
        a = EmptyOperator(task_id="s").as_setup()
        b = EmptyOperator(task_id="e").as_teardown(setups=a)
        a >> EmptyOperator(task_id="w") >> b
    tasks[0] >> Label("x") >> g
print(serialize_dag(dag).decode())
"""


def test_the_structure_is_the_same_in_every_process() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", SEEDED],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(tidemill.dags.__file__).parents[2])},
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert len(found) == 1
    assert "0x" not in found.pop()


edges = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda edge: edge[0] < edge[1]), max_size=14)
weights = st.lists(st.integers(-3, 5), min_size=8, max_size=8)
rules = st.lists(st.sampled_from(["downstream", "upstream", "absolute"]), min_size=8, max_size=8)


@given(edges, weights, rules)
def test_priorities_are_the_sums_that_the_weight_rules_say(
    drawn: list[tuple[int, int]], weights: list[int], rules: list[str]
) -> None:
    with DAG("d") as found:
        tasks = [
            EmptyOperator(task_id=f"t{number}", priority_weight=weights[number], weight_rule=rules[number])
            for number in range(8)
        ]
        for before, after in drawn:
            tasks[before] >> tasks[after]
    found.validate()
    for one, operator in zip(build_structure(found).tasks, tasks, strict=True):
        if operator.weight_rule == "absolute":
            assert one.priority == operator.priority_weight
            continue
        relatives = operator.get_flat_relative_ids(upstream=operator.weight_rule == "upstream")
        total = sum(found.get_task(name).priority_weight for name in relatives)
        assert one.priority == operator.priority_weight + total
        assert one.upstream == tuple(sorted(operator.upstream_task_ids))


class Length(timedelta):
    """A duration that does not divide as a timedelta does; that of pendulum raises, too."""

    def __floordiv__(self, other: Any) -> Any:
        raise AttributeError("_to_microseconds")


class Moment(datetime):
    def __sub__(self, other: Any) -> Any:
        raise AttributeError("not this way")


def test_times_of_other_libraries_are_what_they_stand_for() -> None:
    start = Moment(2026, 1, 1, tzinfo=ZoneInfo("Europe/Vienna"))
    with DAG("d", schedule="@daily", start_date=start, end_date=Moment(2027, 1, 1), dagrun_timeout=Length(2)) as found:
        EmptyOperator(task_id="t", retry_delay=Length(seconds=2), execution_timeout=Length(1))
    structure = build_structure(found)
    assert structure.schedule.zone == "Europe/Vienna"
    assert structure.schedule.start_us == datetime(2025, 12, 31, 23, tzinfo=UTC).timestamp() * 1_000_000
    assert (structure.run_timeout_us, structure.tasks[0].retry_delay_us) == (172_800_000_000, 2_000_000)
    with DAG("e", schedule=Length(hours=1)) as found:
        pass
    assert build_structure(found).schedule.interval_us == 3_600_000_000


def test_a_start_date_of_a_zone_that_has_no_name_is_refused_by_name() -> None:
    class Local(tzinfo):
        def utcoffset(self, moment: datetime | None) -> timedelta | None:
            return None if moment is None else timedelta(hours=1)

    with pytest.raises(DagError, match=r"DAG 'd': start_date cannot be read: the rules of time zone .* are unknown"):
        DAG("d", schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=Local()))


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("retry_delay", "soon", "task 't': retry_delay must be a timedelta or a number of seconds, got 'soon'"),
        ("retries", "3", r"DAG 'd': an attribute .* has an invalid value: ValidationError: Expected `int`, got `str`"),
        ("template_fields", None, "DAG 'd': an attribute .* has an invalid value: TypeError"),
    ],
)
def test_an_attribute_that_a_file_sets_to_a_wrong_value_later_is_its_own_error(
    attribute: str, value: Any, message: str
) -> None:
    with DAG("d") as found:
        operator = EmptyOperator(task_id="t")
    setattr(operator, attribute, value)
    with pytest.raises(DagError, match=message):
        serialize_dag(found)


def test_numbers_as_keys_of_the_schema_of_a_param_are_texts_as_in_json() -> None:
    shown = Param(1, type="integer", values_display={1: "one", 2: "two"}, properties={1: {"type": "string"}})
    with DAG("d", params={"n": shown}) as found:
        pass
    schema = json.loads(build_structure(found).params[0].schema)
    assert schema["values_display"] == {"1": "one", "2": "two"}
    assert schema["properties"] == {"1": {"type": "string"}}


@pytest.mark.parametrize("default", [None, 5])
def test_a_default_that_its_schema_does_not_allow_has_to_be_given_where_no_schedule_creates_runs(default: Any) -> None:
    param = Param(default, type="string", description="who")
    with DAG("d", params={"name": param}) as found:
        pass
    (built,) = build_structure(found).params
    assert (built.default, built.description) == (None, "who")
    assert param.default == default
    with pytest.raises(DagError, match=f"DAG 'd': the default of param 'name': {default} is not of type 'string'"):
        DAG("d", params={"name": param}, schedule="@daily")

    @dag
    def flow(name: Any = Param(default, type="string")) -> None:  # noqa: B008
        return

    assert not flow().params["name"].has_default
