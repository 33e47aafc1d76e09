"""`tidemill doctor` against a real broker, real folders, and things that are not there."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.until import slack

from tidemill.cli.doctor.checks import Cluster, check_group, check_program, run_check
from tidemill.cli.doctor.folder_checks import CheckedFolder, check_folder, list_folders
from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import unique_name

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

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
    assert all(line.startswith("ok  ") for line in lines)
    text = done.stdout
    assert "Java: version " in text
    assert "Spark: pyspark 4." in text
    assert "worker name: w1 (from WORKER_ID)" in text
    assert f"Kafka: {embedded_kafka.bootstrap} answers" in text
    assert f"source topic: topic {source}, 3 partitions" in text
    assert "consumer group: group tidemill-workers, 0 members" in text
    assert f"dead letters: topic {source}_dlq, will be created at startup" in text
    assert f"sinks.kafka.out: topic {results}, 1 partition" in text
    assert f"sinks.filesystem.files.base_path: {tmp_path / 'out'}, will be created at startup" in text
    assert "handler: handlers_for_doctor:Good\n" in text
    assert not (tmp_path / "out").exists()


def test_a_session_timeout_that_the_brokers_do_not_allow_is_found(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name("in"))
    kafka = {"brokers": embedded_kafka.bootstrap, "source_topic": topic, "consumer_group": topic}
    settings = Settings.model_validate({"kafka": {**kafka, "session_timeout_ms": 1500}})
    with pytest.raises(RemoteError, match="session_timeout_ms is 1500, but the brokers allow 2000 to"):
        check_group(settings)
    settings = Settings.model_validate({"kafka": kafka})
    assert check_group(settings) == f"group {topic}, 0 members"


@pytest.mark.timeout(60)
def test_brokers_that_refuse_connections_are_reported_with_the_reason_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.cli.doctor.checks._ASK_SECONDS", 600.0)
    reason = r"no answer from 127.0.0.1:1: 127.0.0.1:1: Connect to 127.0.0.1:1 failed: Connection refused; start Kafka"
    with pytest.raises(RemoteError, match=reason):
        Cluster(KafkaSettings(brokers="127.0.0.1:1"), "", {}, "kafka.brokers").check()


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
    assert "FAIL  worker name: " in text
    assert "FAIL  source topic: topic not-there does not exist" in text
    assert (
        "--create --topic not-there --partitions 4; or start `tidemill broker` again with --topic not-there:4" in text
    )
    assert "), or change kafka.source_topic" in text
    assert "FAIL  sinks.kafka.out: topic neither does not exist" in text
    assert "change sinks.kafka.out.topic" in text
    assert "FAIL  sinks.filesystem.files.base_path: " in text
    assert "FAIL  handler: the attribute" in text
    assert "on_ready" in text
    assert "5 problems found" in done.stderr


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
    assert f"FAIL  Kafka: no answer from {address}" in done.stdout
    assert "correct kafka.brokers" in done.stdout
    assert "hunter2" not in done.stdout + done.stderr
    # Five checks need this broker; it is asked once.
    assert seconds < slack(20)


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
        assert line.startswith(f"FAIL  sinks.{place}: ")
        assert line.count("sinks.") == 1
        assert line.endswith(f"; check that it is running and reachable, or correct {setting}")


def test_a_wrong_configuration_is_one_finding_among_others(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafak: {}\n")

    done = tidemill("doctor", "c.yaml")

    assert done.returncode == ExitCode.REMOTE
    assert "FAIL  configuration: the configuration is invalid" in done.stdout
    assert "ok    Java" in done.stdout


def test_a_pipeline_without_sinks_is_told_so(tidemill: Run) -> None:
    done = tidemill("doctor", env={"TIDEMILL_KAFKA__BROKERS": "127.0.0.1:1"})

    assert "FAIL  sinks: no sink is configured" in done.stdout
    assert "FAIL  Kafka: no answer from 127.0.0.1:1" in done.stdout
    assert "FAIL  source topic: unknown, because 127.0.0.1:1 did not answer" in done.stdout
    assert "defaults and environment" in done.stdout


def test_a_file_that_the_environment_names_is_said(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {brokers: '127.0.0.1:1'}\n")

    done = tidemill("doctor", env={"TIDEMILL_CONFIG": "c.yaml"})

    assert "ok    configuration: c.yaml (named by TIDEMILL_CONFIG)" in done.stdout


def test_a_wrong_client_property_is_said_in_words(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {client_config: {sasl.mechanismm: PLAIN}}\n")

    done = tidemill("doctor", "c.yaml")

    assert 'client configuration: No such configuration property: "sasl.mechanismm"' in done.stdout


def test_the_program_is_looked_for_where_tasks_find_it(tmp_path: Path) -> None:
    program = tmp_path / "my-program"
    program.write_text("#!/bin/sh\n")
    settings = ExecutorSettings(binary_path="my-program", env={"PATH": str(tmp_path)})

    with pytest.raises(ConfigError, match="no executable program 'my-program' was found; install it or change"):
        check_program(settings)
    program.chmod(0o755)
    assert check_program(settings) == str(program)


def test_the_limit_of_a_check_does_not_count_what_this_process_does_before_it_asks() -> None:
    finding = run_check("slow", lambda: "connected", seconds=0.5, prepare=lambda: time.sleep(1.0))

    assert (finding.text, finding.problem) == ("connected", None)


@pytest.mark.timeout(60)
def test_a_check_whose_preparation_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.cli.doctor.checks._PREPARE_SECONDS", 0.1)
    finding = run_check("stuck", lambda: "connected", seconds=0.1, prepare=threading.Event().wait)
    assert isinstance(finding.problem, RemoteError)


def test_an_error_before_a_check_asks_is_its_finding() -> None:
    error = ConfigError("wrong")

    def prepare() -> None:
        raise error

    assert run_check("broken", lambda: "connected", prepare=prepare).problem is error


def test_a_check_that_hangs_is_left_behind() -> None:
    def hang() -> str:
        time.sleep(60)
        return "never"

    started = time.monotonic()
    finding = run_check("slow", hang, seconds=0.1)

    assert time.monotonic() - started < slack(5)
    assert isinstance(finding.problem, RemoteError)
    assert "no result within 0.1 s" in finding.text


def test_a_check_that_fails_itself_is_a_finding_without_secrets() -> None:
    def fail() -> str:
        raise ValueError("password=hunter2")

    finding = run_check("odd", fail)

    assert finding.problem is not None
    assert "ValueError" in finding.text
    assert "hunter2" not in finding.text


def test_folders_that_cannot_be_written_are_named_with_their_setting(tmp_path: Path) -> None:
    said = check_folder(CheckedFolder("history.path", str(tmp_path / "new"), " (bounded runs only)"))
    assert said == f"{tmp_path / 'new'}, will be created at startup (bounded runs only)"
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file, not a folder; remove it or change cache\.path"):
        check_folder(CheckedFolder("cache.path", str(tmp_path / "file")))
    with pytest.raises(ConfigError, match=r"is a file, not a folder"):
        check_folder(CheckedFolder("cache.path", str(tmp_path / "file" / "below")))
    with pytest.raises(RemoteError, match=r"/proc cannot be written to: .*; change its permissions or cache\.path"):
        check_folder(CheckedFolder("cache.path", "/proc"))
    with pytest.raises(ConfigError, match="File name too long; change cache"):
        check_folder(CheckedFolder("cache.path", str(tmp_path / ("x" * 300))))


def test_only_folders_that_are_used_here_are_looked_at() -> None:
    values = {
        "sinks": {"filesystem": {"out": {"base_path": "a"}}},
        "dlq": {"path": "b"},
        "history": {"path": "c"},
        "cache": {"enabled": True, "path": "d"},
    }
    here = [folder.setting for folder in list_folders(Settings.model_validate(values))]
    assert here == ["dlq.path", "sinks.filesystem.out.base_path", "history.path", "cache.path"]
    elsewhere = Settings.model_validate({**values, "spark": {"master": "spark://there:7077"}})
    assert [folder.setting for folder in list_folders(elsewhere)] == ["dlq.path"]
    assert list(list_folders(Settings())) == []


def test_programs_get_one_document(tidemill: Run, tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("kafka: {brokers: localhost}\n")
    (tmp_path / "loud.py").write_text("print('imported')\n")

    done = tidemill("doctor", "c.yaml", "--json", "--handler", "loud:Loud")

    assert done.returncode == ExitCode.REMOTE
    assert "imported" in done.stderr
    said = json.loads(done.stdout)
    assert said["ok"] is False
    checks = {check["name"]: check for check in said["checks"]}
    assert checks["Java"]["ok"] is True
    assert checks["configuration"]["ok"] is False
    assert "'localhost' has no port; write host:port, for example localhost:9092" in checks["configuration"]["text"]


def test_a_cache_folder_that_cannot_be_written_is_told_with_the_one_that_is_used(tidemill: Run, tmp_path: Path) -> None:
    done = tidemill("doctor", env={"XDG_CACHE_HOME": "/dev/null", "TMPDIR": str(tmp_path)})
    line = next(line for line in done.stdout.splitlines() if " cache folder: " in line)
    assert line.startswith("ok ")
    assert f"{tmp_path}/tidemill-cache-" in line
    assert "because /dev/null/tidemill cannot be written" in line
