"""`tidemill doctor` against a real broker, real folders, and things that are not there."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tidemill.cli.checks import check_letter_folder, check_program, run_check
from tidemill.config.executor_settings import ExecutorSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.exitcode import ExitCode
from tidemill.testing.kafka import unique_name

if TYPE_CHECKING:
    from tidemill.runtime.broker import EmbeddedBroker

Run = Callable[..., "subprocess.CompletedProcess[str]"]

HANDLER = """
import threading
from tidemill.pipeline.handler.base import Handler
class Good(Handler):
    async def arrange(self, messages, pending): return []
class Unpicklable(Good):
    def __init__(self): self.lock = threading.Lock()
"""


@pytest.mark.kafka
def test_everything_well_is_said_part_by_part(tidemill: Run, tmp_path: Path, embedded_kafka: EmbeddedBroker) -> None:
    source = embedded_kafka.create_topic(unique_name("source"), partitions=3)
    results = embedded_kafka.create_topic(unique_name("results"))
    (tmp_path / "handlers_for_doctor.py").write_text(HANDLER)
    (tmp_path / "c.yaml").write_text(
        f"kafka: {{brokers: '{embedded_kafka.bootstrap}', source_topic: {source}}}\n"
        f"sinks: {{kafka: {{out: {{topic: {results}}}}}, filesystem: {{files: {{base_path: out}}}}}}\n"
    )

    done = tidemill("doctor", "c.yaml", "--handler", "handlers_for_doctor:Good", env={"WORKER_ID": "w1"})

    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(line.startswith("ok ") for line in lines)
    text = done.stdout
    assert "Java: version " in text
    assert "Spark: pyspark 4." in text
    assert "worker name: w1 (from WORKER_ID)" in text
    assert f"Kafka: {embedded_kafka.bootstrap} answers" in text
    assert f"source topic: topic {source}, 3 partitions" in text
    assert f"dead letters: topic {source}_dlq, will be created at the start" in text
    assert f"sinks.kafka.out: topic {results}, 1 partition" in text
    assert f"sinks.filesystem.files: {tmp_path / 'out'}, will be created at the start" in text
    assert "handler handlers_for_doctor:Good" in text
    assert not (tmp_path / "out").exists()


@pytest.mark.kafka
def test_what_is_missing_says_what_to_do(tidemill: Run, tmp_path: Path, embedded_kafka: EmbeddedBroker) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "handlers_for_doctor.py").write_text(HANDLER)
    (tmp_path / "c.yaml").write_text(
        f"kafka: {{brokers: '{embedded_kafka.bootstrap}', source_topic: not-there}}\n"
        "sinks: {kafka: {out: {topic: neither}}, filesystem: {files: {base_path: file/below}}}\n"
    )

    done = tidemill("doctor", "c.yaml", "--handler", "handlers_for_doctor:Unpicklable", env={"WORKER_ID": "a b"})

    assert done.returncode == ExitCode.REMOTE
    text = done.stdout
    assert "TO DO  worker name: " in text
    assert "TO DO  source topic: there is no topic not-there" in text
    assert "create it or change kafka.source_topic" in text
    assert "TO DO  sinks.kafka.out: there is no topic neither" in text
    assert "change sinks.kafka.out.topic" in text
    assert "TO DO  sinks.filesystem.files: " in text
    assert "TO DO  handler handlers_for_doctor:Unpicklable" in text
    assert "on_ready" in text
    assert "5 things to do" in done.stderr


def test_a_broker_that_does_not_answer_is_given_up_on_in_time(tidemill: Run, tmp_path: Path) -> None:
    # It accepts connections and never says a word: the slowest way of being away.
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        (tmp_path / "c.yaml").write_text(
            f"kafka: {{brokers: '{address}', client_config: {{sasl.password: hunter2}}}}\n"
            "sinks: {kafka: {a: {topic: t}, b: {topic: u}}}\n"
        )
        started = time.monotonic()
        done = tidemill("doctor", "c.yaml")
        seconds = time.monotonic() - started

    assert done.returncode == ExitCode.REMOTE
    assert f"TO DO  Kafka: no answer from {address}" in done.stdout
    assert "change kafka.brokers" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    # Five checks need this broker; it is asked once.
    assert seconds < 20


def test_sinks_that_are_down_are_named_once_with_what_to_do(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(
        "kafka: {brokers: '127.0.0.1:1'}\n"
        "sinks:\n"
        "  postgres: {a: {dsn: 'postgresql://app:hunter2@127.0.0.1:1/db'}}\n"
        "  mongo: {b: {uri: 'mongodb://app:hunter2@127.0.0.1:1/?serverSelectionTimeoutMS=200', database: d}}\n"
        "  http: {c: {url: 'http://127.0.0.1:1/'}}\n"
        "  redis: {d: {url: 'redis://app:hunter2@127.0.0.1:1/0'}}\n"
    )

    done = tidemill("doctor", "c.yaml")

    assert "hunter2" not in done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "sinks." in line]
    for line, (place, setting) in zip(
        sorted(told),
        (("http.c", "url"), ("mongo.b", "uri"), ("postgres.a", "dsn"), ("redis.d", "url")),
        strict=True,
    ):
        assert line.startswith(f"TO DO  sinks.{place}: ")
        assert line.count("sinks.") == 1
        assert line.endswith(f"; check that it runs and can be reached, or correct {setting}")


def test_a_wrong_configuration_is_one_finding_among_others(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafak: {}\n")

    done = tidemill("doctor", "c.yaml")

    assert done.returncode == ExitCode.REMOTE
    assert "TO DO  configuration: the configuration is wrong" in done.stdout
    assert "ok     Java" in done.stdout


def test_a_pipeline_without_sinks_is_told_so(tidemill: Run) -> None:
    done = tidemill("doctor", env={"TIDEMILL_KAFKA__BROKERS": "127.0.0.1:1"})

    assert "TO DO  sinks: none is configured" in done.stdout
    assert "TO DO  Kafka: no answer from 127.0.0.1:1" in done.stdout
    assert "TO DO  source topic: not known, because 127.0.0.1:1 did not answer" in done.stdout
    assert "defaults and environment" in done.stdout


def test_a_file_that_the_environment_names_is_said(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {brokers: '127.0.0.1:1'}\n")

    done = tidemill("doctor", env={"TIDEMILL_CONFIG": "c.yaml"})

    assert "ok     configuration: c.yaml (named by TIDEMILL_CONFIG)" in done.stdout


def test_a_wrong_client_property_is_said_in_words(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {client_config: {sasl.mechanismm: PLAIN}}\n")

    done = tidemill("doctor", "c.yaml")

    assert 'TO DO  Kafka: bad client configuration: No such configuration property: "sasl.mechanismm"' in done.stdout


def test_the_program_is_looked_for_where_tasks_find_it(tmp_path: Path) -> None:
    program = tmp_path / "my-program"
    program.write_text("#!/bin/sh\n")
    settings = ExecutorSettings(binary_path="my-program", env={"PATH": str(tmp_path)})

    with pytest.raises(ConfigError, match="no program 'my-program' that can be run; install it or change executor"):
        check_program(settings)
    program.chmod(0o755)
    assert check_program(settings) == str(program)


def test_a_check_that_hangs_is_left_behind() -> None:
    def hang() -> str:
        time.sleep(60)
        return "never"

    started = time.monotonic()
    finding = run_check("slow", hang, seconds=0.1)

    assert time.monotonic() - started < 5
    assert isinstance(finding.problem, RemoteError)
    assert "no answer within 0.1 s" in finding.text


def test_a_check_that_fails_itself_is_a_finding_without_secrets() -> None:
    def fail() -> str:
        raise ValueError("password=hunter2")

    finding = run_check("odd", fail)

    assert finding.problem is not None
    assert "ValueError" in finding.text
    assert "hunter2" not in finding.text


def test_the_folder_for_dead_letters_is_looked_at(tmp_path: Path) -> None:
    assert (
        check_letter_folder(str(tmp_path / "new"))
        == f"{tmp_path / 'new'}, will be created at the start (bounded runs only)"
    )
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"is not a folder; remove it or change dlq\.path"):
        check_letter_folder(str(tmp_path / "file"))


def test_a_cache_folder_that_cannot_be_written_is_told_with_the_one_that_is_used(tidemill: Run, tmp_path: Path) -> None:
    done = tidemill("doctor", env={"XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(tmp_path)})
    line = next(line for line in done.stdout.splitlines() if " cache folder: " in line)
    assert line.startswith("ok ")
    assert f"{tmp_path}/tidemill-cache-" in line
    assert "because /dev/null/tidemill cannot be written" in line
