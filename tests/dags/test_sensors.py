from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from datetime import UTC, datetime, time, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from tests.dags.attempts import LOGICAL_US, Services, attempt, resume, value_of

from tidemill.core.tasks.endings import Deferral, Failure, Skip, Success
from tidemill.dags import (
    DAG,
    BaseSensorOperator,
    DagError,
    DateTimeSensor,
    DateTimeSensorAsync,
    FileSensor,
    HttpSensor,
    PokeReturnValue,
    ProcessExitSensor,
    TaskFailed,
    TaskSkipped,
    TimeDeltaSensor,
    TimeDeltaSensorAsync,
    TimeSensor,
    TimeSensorAsync,
    task,
)
from tidemill.dags.structure.building import build_structure
from tidemill.runtime.json.codec import decode
from tidemill.services.triggerer.hosting.loading import create_trigger
from tidemill.triggers.base import BaseTrigger


def sense(function: Any, **arguments: Any) -> DAG:
    with DAG("d") as dag:
        task.sensor(task_id="t", **arguments)(function)()
    return dag


def trigger_of(result: Any) -> BaseTrigger:
    assert isinstance(result.ending, Deferral), result
    return create_trigger("t", result.ending.classpath, result.ending.kwargs)


def test_a_sensor_defers_between_looks_until_it_is_done() -> None:
    answers = iter([False, False, PokeReturnValue(True, {"rows": 3})])
    dag = sense(lambda: next(answers), poke_interval=10, mode="reschedule")
    before = datetime.now(UTC)
    result = attempt(dag, "t")
    moment: Any = trigger_of(result).moment  # type: ignore[attr-defined]
    assert before + timedelta(seconds=10) <= moment <= datetime.now(UTC) + timedelta(seconds=10)
    result = resume(dag, "t", result, "later")
    assert trigger_of(result)
    assert value_of(resume(dag, "t", result, "later")) == {"rows": 3}


def test_the_timeout_counts_from_the_first_look() -> None:
    dag = sense(lambda: False, timeout=3600)
    result = attempt(dag, "t")
    kwargs = decode(result.ending.method_kwargs)  # type: ignore[union-attr]
    assert kwargs["looks"] == 1
    long_ago = datetime.now(UTC) - timedelta(hours=2)
    sensor: Any = dag.get_task("t")
    with pytest.raises(TaskFailed, match=r"the sensor waited for 2:00:00.*, longer than its timeout of 1:00:00"):
        sensor.look_again({}, started=long_ago, looks=5)
    ending = attempt(sense(lambda: False, timeout=0), "t").ending
    assert isinstance(ending, Failure)
    assert ending.error.startswith("SensorTimeout: ")
    assert not ending.may_retry


def test_the_last_wait_ends_with_the_timeout() -> None:
    result = attempt(sense(lambda: False, timeout=5, poke_interval=60), "t")
    assert trigger_of(result).moment <= datetime.now(UTC) + timedelta(seconds=5)  # type: ignore[attr-defined]


def test_waits_may_double() -> None:
    dag = sense(lambda: False, poke_interval=10, exponential_backoff=True, max_wait=60)
    sensor: Any = dag.get_task("t")
    assert [sensor._find_pause(looks) for looks in (1, 2, 3, 4, 1000)] == [10, 20, 40, 60, 60]


def raise_it(error: Exception) -> Any:
    def poke() -> bool:
        raise error

    return poke


@pytest.mark.parametrize(
    ("arguments", "error", "expected"),
    [
        ({}, ValueError("x"), Failure("ValueError: x")),
        ({"soft_fail": True}, ValueError("x"), Failure("ValueError: x")),
        ({"soft_fail": True}, TaskFailed("x"), Skip("the sensor raised TaskFailed: x")),
        ({"never_fail": True}, ValueError("x"), Skip("the sensor raised ValueError: x")),
        ({}, TaskSkipped("x"), Skip("x")),
    ],
)
def test_what_looking_raises_fails_or_skips(arguments: Any, error: Exception, expected: Any) -> None:
    assert attempt(sense(raise_it(error), **arguments), "t").ending == expected


@pytest.mark.parametrize("argument", ["soft_fail", "never_fail"])
def test_a_sensor_that_may_not_fail_is_skipped_after_its_timeout(argument: str) -> None:
    dag = sense(lambda: False, timeout=0, **{argument: True})
    assert isinstance(attempt(dag, "t").ending, Skip)
    # Its trigger may fail while nothing of it runs: so the machine has to know.
    assert build_structure(dag).tasks[0].soft_fail
    assert build_structure(dag).tasks[0].is_sensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "poll"}, "task 't': mode is 'poll'; use one of poke, reschedule|did you mean"),
        ({"poke_interval": 0}, "task 't': poke_interval must be positive"),
        ({"timeout": -1}, "task 't': timeout must not be negative"),
        ({"soft_fail": True, "never_fail": True}, "task 't': soft_fail and never_fail are both True"),
    ],
)
def test_wrong_arguments_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(DagError, match=message):
        sense(lambda: True, **arguments)


def test_a_sensor_without_poke_says_so() -> None:
    with DAG("d") as dag:
        BaseSensorOperator(task_id="t")
    assert "does not define poke" in str(attempt(dag, "t").ending)


@pytest.mark.parametrize("kind", [DateTimeSensor, DateTimeSensorAsync])
@pytest.mark.parametrize(
    ("target", "moment"),
    [
        ("{{ macros.ds_add(ds, 36500) }}T12:00", datetime(2125, 12, 8, 12, tzinfo=UTC)),
        (datetime(2100, 1, 1, tzinfo=ZoneInfo("Europe/Vienna")), datetime(2099, 12, 31, 23, tzinfo=UTC)),
    ],
)
def test_date_time_sensors_defer_until_their_moment(kind: Any, target: Any, moment: datetime) -> None:
    with DAG("d") as dag:
        kind(task_id="t", target_time=target, timeout=timedelta(days=36_500))
        kind(task_id="past", target_time="2020-01-01")
    result = attempt(dag, "t")
    assert trigger_of(result).moment == moment  # type: ignore[attr-defined]
    assert result.ending.timeout_us == 36_500 * 86_400_000_000  # type: ignore[union-attr]
    assert resume(dag, "t", result, "x").ending == Success()
    assert attempt(dag, "past").ending == Success()


@pytest.mark.parametrize("kind", [TimeDeltaSensor, TimeDeltaSensorAsync])
def test_delta_sensors_count_from_the_logical_date(kind: Any) -> None:
    with DAG("d") as dag:
        kind(task_id="t", delta=timedelta(days=36_500), timeout=timedelta(days=36_500))
        kind(task_id="past", delta=60)
    expected = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(days=36_500)
    assert trigger_of(attempt(dag, "t")).moment == expected  # type: ignore[attr-defined]
    assert attempt(dag, "past").ending == Success()
    claim = {"logical_us": None, "interval_end_us": None, "run_started_us": LOGICAL_US}
    assert trigger_of(attempt(dag, "t", **claim)).moment == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [TimeSensor, TimeSensorAsync])
def test_time_sensors_wait_for_a_time_of_the_day_in_the_zone_of_the_dag(kind: Any) -> None:
    zone = ZoneInfo("Pacific/Auckland")
    with DAG("d", schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=zone)) as dag:
        kind(task_id="t", target_time=time(23, 59, 59, 999_999))
        kind(task_id="past", target_time=time(0))
    moment = trigger_of(attempt(dag, "t")).moment.astimezone(zone)  # type: ignore[attr-defined]
    assert (moment.time(), moment.date()) == (time(23, 59, 59, 999_999), datetime.now(zone).date())
    assert attempt(dag, "past").ending == Success()
    with DAG("e"), pytest.raises(DagError, match=r"task 't': target_time must be a datetime\.time, got '12:00'"):
        kind(task_id="t", target_time="12:00")


def test_a_moment_beyond_the_timeout_is_not_waited_for() -> None:
    far = datetime.now(UTC) + timedelta(days=8)
    with DAG("d") as dag:
        DateTimeSensor(task_id="t", target_time=far)
        DateTimeSensor(task_id="soft", target_time=far, soft_fail=True)
    ending = attempt(dag, "t").ending
    assert isinstance(ending, Failure)
    assert "its timeout is 7 days" in ending.error
    assert not ending.may_retry
    assert isinstance(attempt(dag, "soft").ending, Skip)


class Remembering(BaseSensorOperator):
    """Counts its looks, and remembers what it saw."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.looks = 0
        self.seen: list[int] = []
        self.unchanged = [object()]
        self.client: object = None

    def execute(self, context: Any) -> Any:
        self.begun = {"looked"}
        return super().execute(context)

    def poke(self, context: Any) -> bool:
        self.looks += 1
        self.seen.append(self.looks)
        self.last = (datetime(2026, 1, self.looks, tzinfo=UTC), {self.looks})
        self.client = self.client or threading.Lock()
        return self.looks == 3 and self.seen == [1, 2, 3] and self.begun == {"looked"}


def remembering() -> DAG:
    with DAG("d") as dag:
        Remembering(task_id="t", poke_interval=1)
    return dag


def test_attributes_that_are_plain_data_are_kept_between_looks_of_instances_that_are_built_again() -> None:
    result = attempt(remembering(), "t")
    kept = decode(result.ending.method_kwargs)["attributes"]  # type: ignore[union-attr]
    last = (datetime(2026, 1, 1, tzinfo=UTC), {1})
    assert kept == {"begun": {"looked"}, "last": last, "looks": 1, "seen": [1]}
    for _ in range(2):
        assert isinstance(result.ending, Deferral)
        result = resume(remembering(), "t", result, "later")
    assert result.ending == Success()


def test_data_that_cannot_be_kept_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    class Losing(BaseSensorOperator):
        def poke(self, context: Any) -> bool:
            self.found = [object()]
            return False

    with DAG("d") as dag:
        Losing(task_id="t")
    assert isinstance(attempt(dag, "t").ending, Deferral)
    assert "will be lost before the next poke: self.found[0] is of type builtins.object" in caplog.text


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_sensor_whose_look_is_a_coroutine_fails() -> None:
    class Asynchronous(BaseSensorOperator):
        async def poke(self, context: Any) -> bool:  # type: ignore[override]
            return False

    with DAG("d") as dag:
        Asynchronous(task_id="t")
    ending = attempt(dag, "t").ending
    assert "poke returned a coroutine, which is never awaited" in str(ending)


async def fire(trigger: BaseTrigger) -> Any:
    """Return the payload of the first event of a trigger."""
    events: Any = trigger.run()
    event = await anext(events)
    await events.aclose()
    return event.payload


def test_a_file_sensor_returns_the_file(tmp_path: Path) -> None:
    with DAG("d") as dag:
        FileSensor(task_id="t", filepath=f"{tmp_path}/{{{{ ds }}}}", poke_interval=0.01)
        FileSensor(task_id="empty", filepath="")
    (tmp_path / "2026-01-01").write_text("abc")
    result = attempt(dag, "t")
    event = asyncio.run(fire(trigger_of(result)))
    assert value_of(resume(dag, "t", result, event))["size_bytes"] == 3
    assert "filepath: path is empty" in str(attempt(dag, "empty").ending)


def test_a_file_sensor_finds_patterns_and_folders(tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "a.csv").write_text("abc")
    with DAG("d") as dag:
        FileSensor(task_id="pattern", filepath=f"{tmp_path}/in/*/*.csv")
        FileSensor(task_id="deep", filepath=f"{tmp_path}/**/a.csv", recursive=True)
        FileSensor(task_id="folder", filepath=f"{tmp_path}/in")
    for task_id in ("pattern", "deep", "folder"):
        event = asyncio.run(fire(trigger_of(attempt(dag, task_id))))
        assert event["path"] == f"{tmp_path}/in/deep/a.csv"


@pytest.mark.parametrize(("filepath", "said"), [("s3://bucket/key", "is a URL"), ("~/in.csv", "starts with ~")])
def test_a_file_sensor_refuses_what_can_never_be_found(filepath: str, said: str) -> None:
    with DAG("d") as dag:
        FileSensor(task_id="t", filepath=filepath)
    ending = attempt(dag, "t").ending
    assert isinstance(ending, Failure)
    assert said in ending.error
    assert not ending.may_retry


def test_a_process_sensor_waits_for_its_end() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with DAG("d") as dag:
        ProcessExitSensor(task_id="t", pid=str(process.pid))
    result = attempt(dag, "t")
    process.communicate(b"\n")
    event = asyncio.run(fire(trigger_of(result)))
    assert value_of(resume(dag, "t", result, event)) == {"pid": process.pid, "found": False}


def test_an_http_sensor_polls_its_url() -> None:
    with DAG("d") as dag:
        HttpSensor(
            task_id="t",
            url="http://127.0.0.1/{{ ds }}",
            query={"a": "{{ run_id }}", "key": {"env": "KEY"}},
            status=[200, 204],
            poke_interval=5,
        )
        HttpSensor(task_id="wrong", url="ftp://x")
    _, kwargs = trigger_of(attempt(dag, "t")).serialize()
    assert kwargs["url"] == "http://127.0.0.1/2026-01-01"
    assert kwargs["params"] == {"a": "run", "key": {"env": "KEY"}}
    assert (kwargs["poll_seconds"], kwargs["status"]) == (5.0, [200, 204])
    assert "url must start with http" in str(attempt(dag, "wrong").ending)


def test_a_sensor_function_gets_outputs_and_context() -> None:
    services = Services(xcoms={("a", "return_value"): "5"})
    with DAG("d") as dag:

        @task
        def a() -> int:
            return 5

        @task.sensor(poke_interval=1)
        def enough(n: int, run_id: str = "") -> bool:
            return n == 5 and run_id == "run"

        enough(a())
    assert dag.get_task("enough").upstream_task_ids == {"a"}
    assert attempt(dag, "enough", services).ending == Success()
