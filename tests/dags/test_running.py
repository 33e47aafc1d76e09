from __future__ import annotations

import logging
import sys
import threading
import traceback
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from tests.dags.attempts import LOGICAL_US, Callback, Claim, Resume, Services, attempt, resume, value_of

from tidemill.core.tasks.endings import Deferral, Failure, Skip, Success
from tidemill.dags import (
    DAG,
    AirflowFailException,
    AirflowSkipException,
    BaseHook,
    BaseOperator,
    BashOperator,
    Connection,
    EmptyOperator,
    Param,
    TaskDeferred,
    TaskGroup,
    TaskTimeout,
    Variable,
    get_current_context,
    literal,
    task,
)
from tidemill.dags.attempt.current import NotRunningError, get_current_operator, serving
from tidemill.dags.attempt.results import AttemptResult
from tidemill.dags.exceptions import NotFoundError
from tidemill.dags.execution.running import run_attempt
from tidemill.triggers.base import BaseTrigger
from tidemill.triggers.builtin.temporal import DateTimeTrigger

MOMENT = datetime(2030, 1, 1, tzinfo=UTC)


class Call(BaseOperator):
    """Calls a function with itself and the context."""

    template_fields = ("value",)

    def __init__(self, *, function: Any = None, value: Any = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.function = function
        self.value = value
        self.killed = False

    def execute(self, context: Any) -> Any:
        return self.function(self, context) if self.function else self.value

    def resumed(self, context: Any, event: Any = None, more: Any = None) -> Any:
        return {"event": event, "more": more, "try": context["ti"].try_number}

    def strict(self, context: Any, event: Any) -> Any: ...

    def eventless(self, context: Any) -> Any: ...

    def needy(self, context: Any, more: Any, event: Any) -> Any: ...

    def on_kill(self) -> None:
        self.killed = True
        KILLED.append(self.task_id)


KILLED: list[str] = []


def run(
    function: Any = None, *, services: Services | None = None, claim: Any = None, **arguments: Any
) -> AttemptResult:
    with DAG("d") as dag:
        Call(task_id="t", function=function, **arguments)
    return attempt(dag, "t", services, **(claim or {}))


def raising(error: BaseException) -> Any:
    def raise_it(*_: Any) -> None:
        raise error

    return raise_it


# -- how attempts end --------------------------------------------------------------------------------------------------


def test_what_is_returned_is_kept() -> None:
    assert run(lambda *_: {"a": (1, date(2026, 1, 1))}).ending == Success()
    assert value_of(run(lambda *_: {"a": (1, date(2026, 1, 1))})) == {"a": (1, date(2026, 1, 1))}
    assert run(lambda *_: None).xcoms == ()
    assert run(lambda *_: 5, do_xcom_push=False).xcoms == ()


def test_several_outputs_are_kept_under_their_keys() -> None:
    result = run(lambda *_: {"a": 1, "b": None}, multiple_outputs=True)
    assert dict(result.xcoms) == {"a": "1", "b": "null", "return_value": '{"a":1,"b":null}'}
    for value in ([1], {1: 2}):
        ending = run(lambda *_, value=value: value, multiple_outputs=True).ending
        assert isinstance(ending, Failure)
        assert "multiple_outputs needs a dict" in ending.error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ValueError("no"), Failure("ValueError: no")),
        (AirflowFailException("never"), Failure("TaskFailed: never", may_retry=False)),
        (AirflowSkipException("not today"), Skip("not today")),
        (SystemExit(3), Failure("the task called sys.exit(3)")),
        (SystemExit(0), Failure("the task called sys.exit(0)")),
        (GeneratorExit(), Failure("GeneratorExit: ")),
        (ValueError("\ud800"), Failure("ValueError: \\ud800")),
        (ValueError("a\0b"), Failure("ValueError: a\\x00b")),
        (AirflowSkipException("\ud800\0"), Skip("\\ud800\\x00")),
        (ValueError("x" * 1_100_000), Failure(f"ValueError: {'x' * 999_988}...")),
    ],
)
def test_what_is_raised_ends_the_attempt(error: BaseException, expected: Any) -> None:
    assert run(raising(error)).ending == expected


def test_ctrl_c_goes_through() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(raising(KeyboardInterrupt()))


def test_a_timeout_calls_on_kill() -> None:
    KILLED.clear()
    assert run(raising(TaskTimeout("too long"))).ending == Failure("TaskTimeout: too long")
    assert KILLED == ["t"]


@pytest.mark.parametrize(
    "error", [SystemExit(3), ValueError("no"), TaskDeferred(trigger=None, method_name="x"), TaskTimeout("again")]
)
def test_what_on_kill_raises_does_not_hide_the_timeout(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    class Raises(BaseOperator):
        def execute(self, context: Any) -> None:
            raise TaskTimeout("too long")

        def on_kill(self) -> None:
            raise error

    with DAG("d") as dag:
        Raises(task_id="t")
    assert attempt(dag, "t").ending == Failure("TaskTimeout: too long")
    assert "on_kill of task 't' failed" in caplog.text


def test_the_traceback_is_logged_from_the_users_code_on(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        run(raising(ValueError("no")))
    text = caplog.text
    assert "the attempt failed: ValueError: no" in text
    assert "raise_it" in text
    assert "tidemill/dags/execution/" not in text


def test_a_value_that_cannot_be_written_down_is_named() -> None:
    ending = run(lambda *_: {"a": [float("nan")]}).ending
    assert ending == Failure(
        "EncodingError: the returned value['a'][0] is nan, which JSON cannot represent; use None or text"
    )


def test_a_task_that_is_gone_fails_by_name() -> None:
    ending = run_attempt(DAG("d"), Claim("d", "gone"), Services()).ending
    assert ending == Failure("DAG 'd' no longer has a task 'gone' (file.py)")


def test_each_attempt_has_its_own_operator() -> None:
    with DAG("d") as dag:
        Call(task_id="t", function=lambda self, _: (setattr(self, "seen", True), self.value)[1], value="{{ ds }}")
    assert value_of(attempt(dag, "t")) == "2026-01-01"
    original: Any = dag.get_task("t")
    assert original.value == "{{ ds }}"
    assert not hasattr(original, "seen")


# -- deferral ----------------------------------------------------------------------------------------------------------


def defer(**arguments: Any) -> Any:
    given = {"trigger": DateTimeTrigger(MOMENT), "method_name": "resumed", **arguments}
    return lambda self, _: self.defer(**given)


def test_a_task_defers_and_continues_as_a_new_instance() -> None:
    with DAG("d") as dag:
        Call(task_id="t", function=defer(kwargs={"more": (1, MOMENT)}, timeout=timedelta(seconds=1.5)))
    result = attempt(dag, "t")
    ending = result.ending
    assert isinstance(ending, Deferral)
    assert ending.classpath == "tidemill.triggers.builtin.temporal.DateTimeTrigger"
    assert ending.kwargs == '{"moment":"2030-01-01T00:00:00+00:00"}'
    assert (ending.method, ending.timeout_us) == ("resumed", 1_500_000)
    assert value_of(resume(dag, "t", result, [1, {2}])) == {"event": [1, {2}], "more": (1, MOMENT), "try": 1}


def test_a_deferral_goes_through_except_exception_at_any_depth() -> None:
    def deep(self: Any, _: Any) -> None:
        try:
            raise TaskDeferred(trigger=DateTimeTrigger(MOMENT), method_name="resumed")
        except Exception:
            raise AssertionError from None

    assert isinstance(run(deep).ending, Deferral)


@pytest.mark.parametrize("accepts", [True, False])
def test_execute_may_continue_itself(accepts: bool) -> None:
    class Again(BaseOperator):
        def execute(self, context: Any, event: Any = None) -> Any:
            return event or self.defer(trigger=DateTimeTrigger(MOMENT), method_name="execute")

    class Plain(BaseOperator):
        def execute(self, context: Any) -> Any:
            return "again" if context["ti"].try_number == 2 else None

    with DAG("d") as dag:
        (Again if accepts else Plain)(task_id="t")
    if accepts:
        assert value_of(resume(dag, "t", attempt(dag, "t"), "fired")) == "fired"
    else:
        assert value_of(attempt(dag, "t", resume=Resume("execute", "{}", "1"), try_number=2)) == "again"


class Local(BaseTrigger):
    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "nowhere.Local", {}

    async def run(self) -> Any:
        yield None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method_name": "missing"}, "task 't': Call has no method 'missing' to resume with"),
        ({"method_name": None}, "task 't': defer needs method_name"),
        ({"kwargs": {"more": object()}}, "kwargs of the deferral['more'] is of type builtins.object"),
        ({"kwargs": {1: 2}}, "task 't': the kwargs of the deferral have the key 1; argument names must be strings"),
        (
            {"kwargs": {"context": 1}},
            "task 't': the kwargs of the deferral have 'context', which tidemill passes to resumed itself",
        ),
        (
            {"kwargs": {"event": 1}},
            "task 't': the kwargs of the deferral have 'event', which tidemill passes to resumed itself",
        ),
        (
            {"kwargs": [1]},
            "task 't': the kwargs of the deferral must be a dict with the arguments of resumed, not list",
        ),
        (
            {"kwargs": {"unknown": 1}, "method_name": "strict"},
            "Call.strict does not accept the arguments of the deferral (context, unknown, event): got an "
            "unexpected keyword argument 'unknown'",
        ),
        ({"kwargs": {"self": 1}, "method_name": "strict"}, "got an unexpected keyword argument 'self'"),
        ({"method_name": "eventless"}, "got an unexpected keyword argument 'event'"),
        ({"method_name": "needy"}, "missing a required argument: 'more'"),
        ({"timeout": -1}, "task 't': timeout of the deferral must be positive"),
        ({"timeout": "1h"}, "task 't': timeout of the deferral must be a timedelta or a number of seconds"),
        ({"trigger": "later"}, "'later' is not a trigger"),
        ({"trigger": Local()}, "Local cannot be imported as 'nowhere.Local'"),
    ],
)
def test_a_wrong_deferral_fails_the_attempt_at_once(arguments: dict[str, Any], message: str) -> None:
    ending = run(defer(**arguments)).ending
    assert isinstance(ending, Failure)
    assert message in ending.error


def test_a_method_that_is_gone_fails_the_attempt() -> None:
    ending = run(claim={"resume": Resume("gone", "{}", "null")}).ending
    assert ending == Failure("DagError: task 't': Call has no method 'gone' to resume with")


@pytest.mark.parametrize(
    ("method", "advice"),
    [("resumed", "an operator with execute() and resumed(), or"), ("execute", "an operator with execute(), or")],
)
def test_a_function_cannot_defer(method: str, advice: str) -> None:
    with DAG("d") as dag:

        @task
        def wait() -> None:
            raise TaskDeferred(trigger=DateTimeTrigger(MOMENT), method_name=method)

        wait()
    ending = attempt(dag, "wait").ending
    assert isinstance(ending, Failure)
    assert "a @task function cannot defer" in ending.error
    assert advice in ending.error
    assert not ending.may_retry


# -- the context -------------------------------------------------------------------------------------------------------


def test_the_context_has_the_keys_of_airflow() -> None:
    seen: dict[str, Any] = {}
    run(lambda self, context: seen.update(context, current=get_current_context(), operator=get_current_operator()))
    assert seen["ds"] == "2026-01-01"
    assert seen["ts"] == "2026-01-01T00:00:00+00:00"
    assert (seen["ds_nodash"], seen["ts_nodash"]) == ("20260101", "20260101T000000")
    assert seen["ts_nodash_with_tz"] == "20260101T000000+0000"
    assert seen["logical_date"] == seen["data_interval_start"] == datetime(2026, 1, 1, tzinfo=UTC)
    assert seen["run_id"] == seen["dag_run"].run_id == seen["ti"].run_id == "run"
    assert seen["fencing_token"] == seen["ti"].fencing_token == 3
    assert seen["ti"] is seen["task_instance"]
    assert seen["task"] is seen["operator"] is seen["current"]["task"]
    assert (seen["ti"].try_number, seen["ti"].max_tries, seen["ti"].map_index) == (1, 2, -1)
    assert {"conn", "var", "macros", "params", "task_state_store", "dag", "test_mode"} <= set(seen)
    assert get_current_operator() is None
    with pytest.raises(NotRunningError, match="while no task runs; call it inside a task"):
        get_current_context()


NO_DATE = {"logical_us": None, "interval_start_us": None, "interval_end_us": None}


def test_a_run_without_logical_date_has_no_texts_of_it() -> None:
    seen: dict[str, Any] = {}
    run(lambda self, context: seen.update(context), claim=NO_DATE)
    assert seen["logical_date"] is None
    assert "ds" not in seen
    result = run(lambda self, context: context["ds"], claim=NO_DATE)
    assert "no 'ds', because the run has no logical date" in str(result.ending)


class Earlier:
    """The run of the day before."""

    dag_id, run_id, kind, state, conf = "d", "earlier", "scheduled", "success", '{"n":1}'
    logical_us = interval_start_us = LOGICAL_US - 86_400_000_000
    interval_end_us = LOGICAL_US
    created_us, started_us, ended_us = LOGICAL_US + 1, LOGICAL_US + 2, LOGICAL_US + 3


PREVIOUS = {
    "prev_data_interval_start_success": datetime(2025, 12, 31, tzinfo=UTC),
    "prev_data_interval_end_success": datetime(2026, 1, 1, tzinfo=UTC),
    "prev_start_date_success": datetime(2026, 1, 1, microsecond=2, tzinfo=UTC),
    "prev_end_date_success": datetime(2026, 1, 1, microsecond=3, tzinfo=UTC),
}


@pytest.mark.parametrize("name", PREVIOUS)
def test_the_last_success_before_this_run_is_asked_for_once_and_only_if_it_is_read(name: str) -> None:
    services = Services(earlier=Earlier())
    assert "prev_" not in str(run(lambda self, context: sorted(context), services=services).xcoms)
    assert services.asked == []

    seen = run(lambda self, context: [name in context, context[name], context.get(name)], services=services)
    assert value_of(seen) == [True, PREVIOUS[name], PREVIOUS[name]]
    assert services.asked == [("earlier", "success")]
    assert value_of(run(value=f"{{{{ {name} }}}}", services=services)) == str(PREVIOUS[name])
    assert value_of(run(value=f"{{{{ {name} }}}}", claim=NO_DATE, services=services)) == "None"
    assert value_of(run(value=f"{{{{ {name} is none }}}}", services=Services())) == "True"


def test_functions_get_the_last_success_by_name_and_with_all_of_the_context() -> None:
    with DAG("d") as dag:

        @task
        def by_name(prev_start_date_success: Any = None) -> Any:
            return prev_start_date_success

        @task
        def with_all(**context: Any) -> Any:
            return [context[name] for name in PREVIOUS]

        by_name()
        with_all()
    services = Services(earlier=Earlier())
    assert value_of(attempt(dag, "by_name", services)) == PREVIOUS["prev_start_date_success"]
    assert value_of(attempt(dag, "with_all", services)) == list(PREVIOUS.values())


def test_a_task_reads_xcoms_and_states_of_other_runs() -> None:
    services = Services(earlier=Earlier())
    services.xcoms["a", "return_value"] = "5"

    def look(self: Any, context: Any) -> list[Any]:
        ti = context["ti"]
        ti.xcom_pull("a", include_prior_dates=True)
        ti.xcom_pull("a", run_id="other")
        ti.xcom_pull("a", dag_id="elsewhere", run_id="run")
        ti.xcom_pull("a", dag_id="d", run_id="run")
        before = ti.get_previous_dagrun()
        assert ti.get_template_context() is context
        assert ti.get_first_reschedule_date(context) is None
        return [before.run_id, before.state, before.conf, before.end_date, ti.get_dagrun_state("d", "earlier")]

    ended = PREVIOUS["prev_end_date_success"]
    assert value_of(run(look, services=services)) == ["earlier", "success", {"n": 1}, ended, "success"]
    assert services.asked == [
        (True, None, None),
        (False, None, "other"),
        (False, "elsewhere", "run"),
        (False, None, None),
        ("earlier", None),
    ]
    result = run(lambda self, context: context["ti"].get_dagrun_state("d", "none"), services=services)
    assert "DAG 'd' has no run 'none'" in str(result.ending)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("{{ outlet_events }}", "the context has no 'outlet_events': tidemill has no assets"),
        ("{{ prev_ds }}", "the context has no 'prev_ds': Airflow 3 no longer has it; use logical_date"),
        ("{{ ti.log_url }}", "a task instance has no 'log_url': a task does not know the address of the web UI"),
        ("{{ ti.get_ti_count('d') }}", "a task instance has no 'get_ti_count': a task cannot query other tasks"),
        ("{{ nothing }}", "'nothing' is undefined"),
    ],
)
def test_what_airflow_has_and_this_has_not_is_refused_by_name(value: str, said: str) -> None:
    assert said in str(run(value=value).ending)


def test_threads_of_a_task_see_its_context() -> None:
    def start(self: Any, context: Any) -> list[str]:
        found: list[str] = []
        thread = threading.Thread(target=lambda: found.append(get_current_context()["run_id"] + Variable.get("v")))
        thread.start()
        thread.join()
        return found

    assert value_of(run(start, services=Services(variables={"v": "1"}))) == ["run1"]


def test_xcoms_are_pushed_at_once_and_pulled() -> None:
    services = Services(xcoms={("a", "return_value"): "[1]", ("b", "k"): '"x"'})

    def work(self: Any, context: Any) -> list[Any]:
        ti = context["ti"]
        ti.xcom_push("mine", {1: 2})
        return [
            ti.xcom_pull("a"),
            ti.xcom_pull(["a", "missing"]),
            ti.xcom_pull("b", key="k"),
            ti.xcom_pull(key="mine"),
            ti.xcom_pull("missing", default=5),
        ]

    assert value_of(run(work, services=services)) == [[1], [[1], None], "x", {1: 2}, 5]
    assert services.xcoms["t", "mine"]


@pytest.mark.parametrize("key", ["", "a\0", "\ud800", 5])
def test_keys_that_no_store_accepts_are_refused(key: Any) -> None:
    ending = run(lambda _, context: context["ti"].xcom_push(key, 1)).ending
    assert isinstance(ending, Failure)
    assert "xcom_push: key" in ending.error
    ending = run(lambda *_: {key: 1}, multiple_outputs=True).ending
    assert isinstance(ending, Failure)


class Looped:
    template_fields = ("value",)

    def __init__(self) -> None:
        self.value = self


def test_a_field_that_contains_itself_fails_in_a_line(caplog: pytest.LogCaptureFixture) -> None:
    with DAG("d") as dag:
        Call(task_id="t", value=Looped())
    ending = attempt(dag, "t").ending
    assert ending == Failure("ValueError: a template field contains itself, or is nested too deeply")
    assert len(caplog.text.splitlines()) < 30


def test_the_state_of_a_task_outlives_its_tries() -> None:
    services = Services()

    def work(self: Any, context: Any) -> Any:
        store = context["task_state_store"]
        found = store.get("n", 0)
        store.set("n", found + 1)
        store.set("other", {1})
        store.delete("other")
        store.delete("never")
        return found

    assert [value_of(run(work, services=services)) for _ in range(3)] == [0, 1, 2]
    run(lambda _, context: context["task_state_store"].clear(), services=services)
    assert services.state == {}


def test_variables_and_connections_are_asked_for() -> None:
    services = Services(
        variables={"plain": "text", "json": '{"a": 1}'},
        connections={
            "db": '{"conn_type": "pg", "host": "h", "login": "me", "password": "p/w", "port": 5, "extra": "{}"}'
        },
    )

    def work(self: Any, context: Any) -> list[Any]:
        Variable.set("new", {"b": 2}, serialize_json=True)
        Variable.delete("plain")
        assert "p/w" not in repr(BaseHook.get_connection("db"))
        return [
            Variable.get("json", deserialize_json=True),
            Variable.get("missing", None),
            context["var"].json.new,
            context["var"].value.get("missing", "default"),
            Connection.get("db").get_uri(),
            context["conn"].db.port,
            context["conn"].get("missing"),
        ]

    assert value_of(run(work, services=services)) == [
        *({"a": 1}, None, {"b": 2}, "default", "pg://me:p%2Fw@h:5", 5, None)
    ]
    ending = run(lambda *_: Variable.get("missing"), services=services).ending
    assert ending == Failure(
        "NotFoundError: variable 'missing' does not exist; set it with `tidemill variables set missing VALUE`"
    )
    with pytest.raises(NotRunningError, match="variable 'v' is available only while a task or trigger runs"):
        Variable.get("v")
    with serving(services), pytest.raises(NotFoundError, match="connection 'c' does not exist"):
        Connection.get("c")


@pytest.mark.parametrize("uri", ["pg://me:p%2Fw@h:5/db?a=1", "http://h", "my-kind://u@h/s"])
def test_connections_are_written_as_addresses(uri: str) -> None:
    connection = Connection.from_uri("c", uri)
    assert connection.get_uri() == uri
    assert Connection.from_json("c", connection.to_json()) == connection
    assert Connection("c", extra="[").extra_dejson == {}


# -- templates and params ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("{{ ds }} {{ params.n }}", "2026-01-01 4"),
        (["{{ run_id }}", {"{{ ds }}": ("{{ ts }}", 5)}], ["run", {"2026-01-01": ("2026-01-01T00:00:00+00:00", 5)}]),
        ("{{ macros.ds_add(ds, 5) }}", "2026-01-06"),
        ("{{ macros.ds_format(ds, '%Y-%m-%d', '%d.%m.') }}", "01.01."),
        ("{{ logical_date | ds_nodash }} {{ logical_date | ts }}", "20260101 2026-01-01T00:00:00+00:00"),
        ("{{ var.value.v }} {{ conn.c.host }}", "text host"),
        ("{# comment #}x", "x"),
        ("no { template", "no { template"),
        (literal("{{ ds }}"), "{{ ds }}"),
        ("<&>", "<&>"),
    ],
)
def test_template_fields_are_rendered(value: Any, expected: Any) -> None:
    services = Services(variables={"v": "text"}, connections={"c": '{"host": "host"}'})
    assert value_of(run(value=value, services=services, claim={"params": '{"n":4}'})) == expected


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{{ missing }}", "ValueError: the template field 'value' cannot be rendered: 'missing' is undefined"),
        ("{{ 1 + }}", "ValueError: the template field 'value' cannot be rendered: unexpected 'end of print"),
        ("{{ 1 / 0 }}", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_wrong_template_fails_the_attempt_by_name(value: str, message: str) -> None:
    ending = run(value=value).ending
    assert isinstance(ending, Failure)
    assert ending.error.startswith(message)


class Query:
    template_fields = ("sql", "parts")

    def __init__(self, sql: str, parts: list[Any], kept: list[Any]) -> None:
        self.sql, self.parts, self.kept = sql, parts, kept


def test_nested_objects_are_copied_where_they_are_rendered_and_nothing_else_is() -> None:
    kept: list[Any] = []
    inner = Query("{{ ti.try_number }}", [], kept)
    plain = Query("select", None, kept)  # type: ignore[arg-type]
    outer = Query("{{ ti.try_number }} of", [inner, plain], kept)
    with DAG("d") as dag:
        Call(task_id="call", value=outer, function=lambda self, context: found.append(self.value))
    found: list[Query] = []
    for number in (1, 2):
        assert attempt(dag, "call", try_number=number).ending == Success()
        rendered = found.pop()
        assert rendered is not outer
        assert rendered.sql == f"{number} of"
        assert rendered.parts[0].sql == str(number)
        assert rendered.parts[1] is plain
        assert rendered.kept is rendered.parts[0].kept is kept
    assert (outer.sql, outer.parts, inner.sql) == ("{{ ti.try_number }} of", [inner, plain], "{{ ti.try_number }}")


def test_templates_use_what_the_dag_defines() -> None:
    with DAG(
        "d", user_defined_macros={"twice": lambda x: 2 * x}, user_defined_filters={"up": str.upper},
        render_template_as_native_obj=True,
    ) as dag:  # fmt: skip
        Call(task_id="t", value="{{ twice([1]) }}")
        Call(task_id="u", value="{{ 'a' | up }}")
    assert value_of(attempt(dag, "t")) == [1, 1]
    assert value_of(attempt(dag, "u")) == "A"


def test_a_file_is_a_template(tmp_path: Any) -> None:
    (tmp_path / "script.sh").write_text("echo {{ ds }} $((1 + 1))")
    with DAG("d", template_searchpath=str(tmp_path)) as dag:
        BashOperator(task_id="t", bash_command="script.sh")
        BashOperator(task_id="u", bash_command="missing.sh")
    assert value_of(attempt(dag, "t")) == "2026-01-01 2"
    assert attempt(dag, "u").ending == Failure(
        "ValueError: template field 'bash_command': the file 'missing.sh' does not exist"
    )


def test_outputs_are_passed_to_tasks_that_wait_for_them() -> None:
    services = Services()
    with DAG("d", params={"n": 3}) as dag:

        @task
        def several() -> dict[str, int]:
            return {"a": 1, "b": 2}

        @task
        async def use(x: Any, y: Any, *, z: Any, ti: Any = None, **context: Any) -> Any:
            return [x, y, z, ti.task_id, context["run_id"]]

        found = several()
        used = use(found["a"], [found["b"], {"k": found}], z=dag.param("n"))
        BashOperator(task_id="bash", bash_command=f"echo got {found['b']}")
        used >> EmptyOperator(task_id="end")
    assert dag.get_task("use").upstream_task_ids == {"several"}
    attempt(dag, "several", services)
    result = attempt(dag, "use", services, params='{"n":4}')
    assert value_of(result) == [1, [2, {"k": {"a": 1, "b": 2}}], 4, "use", "run"]
    assert value_of(attempt(dag, "bash", services)) == "got 2"
    with pytest.raises(TypeError, match="is not known while the file is parsed"):
        list(found)
    with pytest.raises(TypeError, match="is not known while the file is parsed"):
        bool(found)
    with pytest.raises(TypeError, match="so it has no item 0"):
        found[0]


def test_what_a_run_gives_has_to_match_the_params_of_the_task() -> None:
    params = {"n": Param(5, type="integer"), "must": Param(type="string")}
    claim = {"params": '{"n":"x","must":"y"}', "conf": '{"n":"x","must":"y"}'}
    assert "param 'n': 'x' is not of type 'integer'" in str(
        run(value="{{ params.n }}", params=params, claim=claim).ending
    )
    claim = {"params": '{"n":1}', "conf": '{"n":1}'}
    assert "param 'must' has no default" in str(run(value="{{ params.n }}", params=params, claim=claim).ending)
    claim = {"params": '{"must":"from the DAG"}'}
    assert value_of(run(value="{{ params.must }}", params=params, claim=claim)) == "from the DAG"


def test_params_of_a_task_hold_unless_the_run_gives_them() -> None:
    params = {"n": Param(5), "m": 6}
    claim = {"params": '{"n":1,"m":2}', "conf": '{"m":2}'}
    assert value_of(run(value="{{ params.n }} {{ params.m }}", params=params, claim=claim)) == "5 2"


# -- branches ----------------------------------------------------------------------------------------------------------


def branching(returned: Any, kind: str = "branch", **arguments: Any) -> tuple[DAG, AttemptResult]:
    with DAG("d") as dag:
        decide = getattr(task, kind)(task_id="decide", **arguments)(lambda: returned)
        a, b, c, join = (EmptyOperator(task_id=name) for name in ("a", "b", "c", "join"))
        with TaskGroup("g") as group:
            EmptyOperator(task_id="x")
        decide() >> [a, b, group] >> join
        a >> c
        dag.get_task("decide") >> c
    return dag, attempt(dag, "decide")


@pytest.mark.parametrize(
    ("returned", "skipped"),
    [
        ("a", ("b", "g.x")),
        (["a", "b"], ("c", "g.x")),
        (None, ("a", "b", "c", "g.x")),
        ([], ("a", "b", "c", "g.x")),
        ("g", ("a", "b", "c")),
        ("g.x", ("a", "b", "c")),
        ("join", ("a", "b", "c", "g.x")),
    ],
)
def test_a_branch_skips_what_it_does_not_choose(returned: Any, skipped: tuple[str, ...]) -> None:
    _, result = branching(returned)
    # What comes after a chosen task is not skipped, although it comes after the branch directly.
    expected = tuple(name for name in skipped if not (name == "c" and "a" in (returned or ())))
    assert result.skip == expected


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("nowhere", "the branch returned 'nowhere', which is not a task or group of DAG 'd'"),
        (5, "must return the id of"),
    ],
)
def test_a_wrong_branch_fails_without_retries(returned: Any, message: str) -> None:
    ending = branching(returned)[1].ending
    assert isinstance(ending, Failure)
    assert message in ending.error
    assert not ending.may_retry


def test_a_short_circuit_skips_what_comes_after() -> None:
    assert branching(False, "short_circuit")[1].skip_all_downstream
    assert not branching([1], "short_circuit")[1].skip_all_downstream
    result = branching(0, "short_circuit", ignore_downstream_trigger_rules=False)[1]
    assert (result.skip, result.skip_all_downstream) == (("a", "b", "c", "g.x"), False)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_callbacks_get_the_context_and_the_error() -> None:
    seen: list[Any] = []

    def note(context: Any) -> None:
        found = context.get("exception")
        seen.append((context["task"].task_id, None if found is None else str(found), context["ti"].try_number))

    with DAG("d", on_failure_callback=lambda context: seen.append((context["reason"], context["run_id"]))) as dag:
        Call(task_id="t", on_failure_callback=[raising(ValueError("x")), note], on_execute_callback=note, value=1)
    assert value_of(attempt(dag, "t")) == 1
    assert seen.pop() == ("t", None, 1)
    result = attempt(dag, "t", callback=Callback("on_failure", "boom"))
    assert result.ending == Failure("the on_failure callback failed: ValueError: x", may_retry=False)
    assert seen.pop() == ("t", "boom", 1)
    assert attempt(dag, "", callback=Callback("on_failure", "boom")).ending == Success()
    assert seen.pop() == ("boom", "run")
    assert attempt(dag, "t", callback=Callback("on_success")).ending == Success()


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("on_success", "success"),
        ("on_failure", "failed"),
        ("on_retry", "up_for_retry"),
        ("on_skipped", "skipped"),
    ],
)
def test_callbacks_see_what_the_task_and_the_run_have_become(name: str, state: str) -> None:
    seen: list[Any] = []
    with DAG("d", on_failure_callback=seen.append) as dag:
        Call(task_id="t", **{f"{name}_callback": seen.append}, function=raising(KeyError("x")))
    failed = attempt(dag, "t").ending
    assert isinstance(failed, Failure)
    error = None if name in ("on_success", "on_skipped") else failed.error
    attempt(dag, "t", callback=Callback(name, error, origin=failed.origin))
    context = seen.pop()
    ti = context["ti"]
    assert (ti.state, ti.duration, context["dag_run"].state) == (state, 3.0, "running")
    assert (ti.end_date - context["logical_date"]).total_seconds() == 9
    if error is not None:
        assert isinstance(context["exception"], KeyError)
        assert "KeyError: 'x'" in "".join(traceback.format_exception(context["exception"]))
    ended_us = LOGICAL_US + 7_000_000
    attempt(dag, "", callback=Callback("on_failure", "tasks failed: t", run_state="failed", run_ended_us=ended_us))
    run = seen.pop()["dag_run"]
    assert (run.state, (run.end_date - run.logical_date).total_seconds()) == ("failed", 7)


def test_an_execute_callback_that_raises_stops_nothing_and_is_not_called_at_a_resume() -> None:
    seen: list[int] = []
    with DAG("d") as dag:
        Call(task_id="t", on_execute_callback=[raising(ValueError()), lambda _: seen.append(1)], function=defer())
    result = attempt(dag, "t")
    resume(dag, "t", result, None)
    assert seen == [1]


def test_a_function_that_returns_a_generator_or_exits_is_named() -> None:
    with DAG("d") as dag:

        @task
        def generate() -> Any:
            return (number for number in range(3))

        @task
        def leave() -> None:
            sys.exit("bye")

        generate()
        leave()
    assert "returned a generator" in str(attempt(dag, "generate").ending)
    assert attempt(dag, "leave").ending == Failure("the task called sys.exit('bye')")
