"""The pipeline as a process: its order of things, its signals, its exit codes, and nothing left behind."""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest
from tests.runtime.metrics.asking import ask, scrape
from tests.until import slack, wait_until

import tidemill
from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, HandlerError, RemoteError, SinkNotConfiguredError
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.files.lock import WorkerLock
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.table import find_marked
from tidemill.spark.live.ending import lag_fields
from tidemill.spark.pipeline import Pipeline
from tidemill.spark.progress import PipelineProgress

HERE = Path(__file__).parent
PYTHONPATH = f"{HERE.parent.parent / 'src'}:{HERE}"


class Nothing(Handler[bytes, bytes]):
    async def arrange(self, messages, pending):
        return []


class Driver:
    """A driver process, and whatever it started."""

    def __init__(self, settings: Settings, **environ: str) -> None:
        self.mark = f"TEST_RUN={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "driver.py"), settings.model_dump_json()],
            env={**os.environ, "PYTHONPATH": PYTHONPATH, name: value, **environ},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def engines(self, seconds: float = 90.0) -> list[int]:
        """Wait until all engines work and return their processes."""
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], seconds)[0], "the engines do not start"
        return json.loads(self.process.stdout.readline())

    def family(self) -> dict[int, str]:
        """Return all processes that descend from the driver, with their command lines."""
        return find_marked(self.mark)

    def until_alone(self, seconds: float) -> float:
        """Wait until nothing is left of the driver, and return how long that took."""
        started = time.monotonic()
        wait_until(lambda: not self.family(), seconds, what=lambda: f"nothing is left behind: {self.family()}")
        return time.monotonic() - started


@pytest.fixture
def settings(embedded_kafka: EmbeddedBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Return the settings of a pipeline with a topic, group and name of its own."""
    topic = f"app-{uuid.uuid4().hex[:8]}"
    embedded_kafka.create_topic(topic, 2)
    monkeypatch.setenv("WORKER_ID", topic)
    return Settings.model_validate(
        {
            "kafka": {
                "brokers": embedded_kafka.bootstrap,
                "source_topic": topic,
                "consumer_group": topic,
                "session_timeout_ms": 6000,
            },
            "executor": {"drain_timeout_seconds": 2},
            "sinks": {"filesystem": {"out": {"base_path": str(tmp_path)}}},
            "metrics": {"enabled": False},
            "debug": {"enabled": False},
            "spark": {"engines": 2},
        }
    )


@pytest.fixture
def start(settings: Settings) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def start(**environ: str) -> Driver:
        drivers.append(Driver(settings, **environ))
        return drivers[-1]

    yield start
    for driver in drivers:
        for pid in driver.family():
            os.kill(pid, signal.SIGKILL)
        driver.process.wait()
        assert driver.process.stdout is not None
        driver.process.stdout.close()


def test_a_revoke_that_may_take_longer_than_the_poll_interval_is_refused_before_anything_starts() -> None:
    settings = Settings.model_validate(
        {
            "kafka": {"max_poll_interval_ms": 30_000, "session_timeout_ms": 6000},
            "sinks": {"filesystem": {"out": {"base_path": "."}}},
        }
    )

    class Nothing(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return []

    pipeline = Pipeline(Nothing(), settings=settings)
    assert pipeline.run() == ExitCode.CONFIG
    assert "kafka.max_poll_interval_ms (30000)" in str(pipeline.error)


@pytest.mark.long  # test_start.py has it of a start
def test_a_second_sigterm_stops_at_once(start: Callable[..., Driver]) -> None:
    driver = start(DRAIN_SECONDS="60")
    driver.engines()
    driver.process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        driver.process.wait(0.5)
    driver.process.send_signal(signal.SIGTERM)
    signalled_at = time.monotonic()
    assert driver.process.wait(60) == ExitCode.STOPPED
    print(f"stopped in {time.monotonic() - signalled_at:.2f} s")
    driver.until_alone(60)


@pytest.mark.long
def test_engines_of_a_killed_driver_that_do_not_drain_end_at_their_deadline(
    start: Callable[..., Driver],
) -> None:
    driver = start(DRAIN_SECONDS="60")
    driver.engines()
    driver.process.kill()
    driver.process.wait()
    seconds = driver.until_alone(slack(2.0 + 15.0))
    assert seconds > 10.0
    print(f"alone {seconds:.2f} s after SIGKILL of the driver, with a drain timeout of 2 s")


@pytest.mark.spark
def test_it_runs_outside_the_main_thread_and_drains_when_asked(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    pipeline = Pipeline(Nothing, settings=settings, factory="fake_engine:build")
    codes: queue.SimpleQueue[ExitCode] = queue.SimpleQueue()
    threading.Thread(target=lambda: codes.put(pipeline.run()), daemon=True).start()
    wait_until(lambda: pipeline.progress().consumed >= 10, 90)
    pipeline.drain()
    assert codes.get(timeout=100) is ExitCode.OK
    assert pipeline.error is None
    assert pipeline.progress().consumed >= 10


@pytest.mark.spark
@pytest.mark.kafka
@pytest.mark.timeout(300)
@pytest.mark.long  # test_supervisor.py has it of engines without Kafka
def test_at_the_first_start_no_engine_consumes_before_all_have_their_share(
    settings: Settings, embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    # A busy host takes longer than the pipeline waits.
    monkeypatch.setattr("tidemill.core.supervision.slot_group.HOLD_SECONDS", 120.0)
    producer = ck.Producer({"bootstrap.servers": embedded_kafka.bootstrap})
    for number in range(200):
        producer.produce(settings.kafka.source_topic, b"x", partition=number % 2)
    assert producer.flush(30) == 0
    settings.metrics = MetricsSettings(port=0)
    pipeline = Pipeline(Nothing, settings=settings)
    codes: queue.SimpleQueue[ExitCode] = queue.SimpleQueue()
    threading.Thread(target=lambda: codes.put(pipeline.run()), daemon=True).start()
    address = wait_until(lambda: pipeline.metrics_address)
    assert ask(f"{address}/readyz")[0] == 503
    deadline = time.monotonic() + 240
    while (progress := pipeline.progress()).consumed == 0:
        assert time.monotonic() < deadline
        assert codes.empty(), pipeline.error
        time.sleep(0.005)
    assert [len(engine.progress.partitions) for engine in progress.engines if engine.progress] == [1, 1]
    while pipeline.progress().messages_done < 200:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    wait_until(lambda: ask(f"{address}/readyz") == (200, []), what=lambda: ask(f"{address}/readyz"))
    wait_until(lambda: scrape(address)["tidemill_offset_lag"].values() and not pipeline.progress().in_flight)
    found = scrape(address)
    assert sum(found["tidemill_messages_consumed_total"].values()) == pipeline.progress().consumed
    assert found["tidemill_assigned_partitions"] == {("0",): 1, ("1",): 1}
    pipeline.drain()
    assert codes.get(timeout=60) is ExitCode.OK


# -- refused before Spark starts -----------------------------------------------------------------------------


@pytest.fixture
def no_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("Spark was started")

    # The JVM may be launched by then; it is ended again.
    monkeypatch.setattr("tidemill.spark.session.launching.JvmLaunch.begin", lambda _: None)
    monkeypatch.setattr("tidemill.spark.session.session.Spark.start", refuse)


class Holding(Nothing):
    async def on_startup(self, config: Settings) -> None:
        self.connection = threading.Lock()


class Raising(Nothing):
    async def on_startup(self, config: Settings) -> None:
        raise LookupError("no such thing")


class Spoiling(Nothing):
    async def on_startup(self, config: Settings) -> Any:
        return {"kafka": {}}


class Demanding(Nothing):
    def __init__(self, needed: int) -> None:
        self.needed = needed


@pytest.mark.usefixtures("no_spark")
@pytest.mark.parametrize(
    ("handler", "text"),
    [
        (Holding, r"attribute 'connection' of Holding \(a lock\) cannot be pickled.*on_ready"),
        (Raising, "Raising.on_startup raised LookupError: no such thing"),
        (Spoiling, "Spoiling.on_startup returned a dict"),
        (Demanding, "cannot create Demanding without arguments"),
        (object(), "object is not a handler"),
    ],
)
def test_a_handler_that_cannot_run_is_refused_by_name(settings: Settings, handler: Any, text: str) -> None:
    pipeline = Pipeline(handler, settings=settings)
    assert pipeline.run() is ExitCode.HANDLER
    assert isinstance(pipeline.error, HandlerError)
    assert re.search(text, str(pipeline.error))


@pytest.mark.usefixtures("no_spark")
def test_a_port_that_was_set_and_is_in_use_is_refused(settings: Settings) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings.metrics = MetricsSettings(port=taken.getsockname()[1])
        pipeline = Pipeline(Nothing, settings=settings)
        assert pipeline.run() is ExitCode.CONFIG
    assert "is in use by another process; set another port" in str(pipeline.error)


@pytest.mark.usefixtures("no_spark")
def test_a_pipeline_whose_program_is_missing_is_refused_before_spark(settings: Settings) -> None:
    settings.executor.binary_path = "no-such-program"
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() == ExitCode.CONFIG
    assert str(pipeline.error) == (
        "no executable program 'no-such-program' was found; install it or change executor.binary_path"
    )


@pytest.mark.usefixtures("no_spark")
def test_a_pipeline_without_sinks_is_refused(settings: Settings) -> None:
    settings.sinks.filesystem.clear()
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.CONFIG
    assert isinstance(pipeline.error, SinkNotConfiguredError)


@pytest.mark.usefixtures("no_spark")
def test_a_live_pipeline_whose_dead_letters_would_go_to_files_is_refused(settings: Settings, tmp_path: Path) -> None:
    settings.dlq.path = str(tmp_path / "letters")
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.CONFIG
    assert "dlq.path works only in bounded runs" in str(pipeline.error)
    assert f"to the topic '{settings.dlq_topic}'" in str(pipeline.error)
    assert not (tmp_path / "letters").exists()


@pytest.mark.usefixtures("no_spark")
def test_a_missing_topic_is_named_with_its_brokers(settings: Settings) -> None:
    settings.kafka.source_topic = "nowhere"
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.REMOTE
    assert isinstance(pipeline.error, RemoteError)
    assert f"topic 'nowhere' does not exist at {settings.kafka.brokers}" in str(pipeline.error)


@pytest.mark.usefixtures("no_spark")
def test_a_broker_that_does_not_answer_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.runtime.kafka.client.CALL_SECONDS", 0.5)
    settings.kafka.brokers = "127.0.0.1:1"
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.REMOTE
    assert "127.0.0.1:1" in str(pipeline.error)


@pytest.mark.usefixtures("no_spark")
def test_a_worker_name_in_use_is_refused(settings: Settings) -> None:
    with WorkerLock(settings.kafka.consumer_group, find_worker_name(settings), brokers=settings.kafka.brokers):
        pipeline = Pipeline(Nothing, settings=settings)
        assert pipeline.run() is ExitCode.FENCED
    assert "WORKER_ID" in str(pipeline.error)


@pytest.mark.usefixtures("no_spark")
def test_more_engines_than_a_fixed_local_master_has_cores_are_refused(settings: Settings) -> None:
    settings.spark.master = "local[1]"
    pipeline = Pipeline(Nothing, settings=settings)
    assert pipeline.run() is ExitCode.CONFIG
    assert isinstance(pipeline.error, ConfigError)


def test_every_public_name_can_be_imported_and_the_package_itself_is_cheap() -> None:
    for name in tidemill.__all__:
        assert getattr(tidemill, name) is not None
    heavy = "{'pyspark', 'pydantic', 'confluent_kafka', 'structlog', 'msgspec'}"
    code = f"import sys, tidemill; assert not {heavy} & set(sys.modules); assert 'Handler' in dir(tidemill)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="Handlr"):
        _ = tidemill.Handlr  # type: ignore[attr-defined]


def test_a_lag_that_no_engine_knows_is_not_logged_as_0() -> None:
    assert lag_fields(PipelineProgress()) == {"lag": None}
    assert lag_fields(PipelineProgress(partitions=["t/0", "t/1"])) == {"lag": None, "partitions_without_lag": 2}
    some = PipelineProgress(partitions=["t/0", "t/1"], lag={"t/0": 3})
    assert lag_fields(some) == {"lag": 3, "partitions_without_lag": 1}
    assert lag_fields(PipelineProgress(partitions=["t/0"], lag={"t/0": 0})) == {"lag": 0}
