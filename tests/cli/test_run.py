"""`tidemill run`, for real: the project that `tidemill init` makes, on Spark, with a broker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import prepared
from tests.spark.terminal import running as on_terminal
from tests.until import wait_until as wait_for

from tidemill.cli.init import create_project
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import committed_offsets, unique_name

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

MAIN = "from tidemill.cli.main import main; main()"


@contextmanager
def running(
    folder: Path, env: dict[str, str], *, from_nothing: bool = False
) -> Iterator[prepared.Forked | subprocess.Popen[bytes]]:
    """Run the project's pipeline in a process group of its own, as a shell on a terminal would."""
    arguments = ["run", "tidemill.yaml", "--handler", "handler:Capitals"]
    with (folder / "log.txt").open("wb") as log:
        process: prepared.Forked | subprocess.Popen[bytes]
        if from_nothing:
            process = subprocess.Popen(
                [sys.executable, "-c", MAIN, *arguments], cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        else:
            code = f"import os; os.setsid(); {MAIN}"
            process = prepared.start(arguments, cwd=folder, env=env, code=code, stdout=log, stderr=log)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until(reached: Callable[[], bool], process: prepared.Forked | subprocess.Popen[bytes], folder: Path) -> None:
    def log() -> str:
        return (folder / "log.txt").read_text()

    def reached_by_now() -> bool:
        assert process.poll() is None, log()
        return reached()

    wait_for(reached_by_now, 90, what=log, pause_seconds=0.05)


def without_settings() -> dict[str, str]:
    """Return this process's environment without settings."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    return {**clean, "TIDEMILL_METRICS__ENABLED": "false", "TIDEMILL_DEBUG__ENABLED": "false"}


@pytest.fixture
def project(tmp_path: Path) -> Path:
    create_project(tmp_path / "capitals")
    return tmp_path / "capitals"


@pytest.fixture
def env(project: Path, embedded_kafka: EmbeddedBroker) -> dict[str, str]:
    """Point the project to the shared broker by variables alone; its files stay as they were made."""
    topic = embedded_kafka.create_topic(unique_name("lines"), partitions=2)
    clean = without_settings()
    return {
        **clean,
        "TIDEMILL_KAFKA__BROKERS": embedded_kafka.bootstrap,
        "TIDEMILL_KAFKA__SOURCE_TOPIC": topic,
        "TIDEMILL_KAFKA__CONSUMER_GROUP": topic,
        # A broker of plain text takes no notice of it; nothing may show it.
        "TIDEMILL_KAFKA__CLIENT_CONFIG__SASL_PASSWORD": "hunter2",
        "WORKER_ID": topic,
    }


def send(project: Path, env: dict[str, str], lines: list[str]) -> None:
    text = "".join(f"{line}\n" for line in lines)
    done = prepared.run(["send", env["TIDEMILL_KAFKA__SOURCE_TOPIC"]], cwd=project, env=env, stdin=text.encode())
    assert done.returncode == 0, done.stderr


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_a_new_project_does_its_work_and_ends_cleanly(
    project: Path, env: dict[str, str], embedded_kafka: EmbeddedBroker, number: signal.Signals
) -> None:
    send(project, env, ["hello", "tide mill"])
    results = project / "output" / "results.jsonl"

    with running(project, env, from_nothing=True) as process:
        wait_until(lambda: results.exists() and len(results.read_text().splitlines()) == 2, process, project)
        # As Ctrl-C in a terminal does: the whole process group gets it.
        os.killpg(process.pid, number)
        assert process.wait(60) == ExitCode.OK

    written = {row["line"]: row["capitals"] for row in map(json.loads, results.read_text().splitlines())}
    assert written == {"hello": "HELLO", "tide mill": "TIDE MILL"}
    log = (project / "log.txt").read_text()
    assert "hunter2" not in log
    assert "Traceback" not in log
    assert "the pipeline is drained" in log
    entries = [json.loads(line) for line in log.splitlines()]
    summary = entries[-1]
    assert (summary["event"], summary["messages_done"], summary["sinks"]["sinks.filesystem.results"]["delivered"]) == (
        "summary",
        2,
        2,
    )
    states = [entry["state"] for entry in entries if entry["event"] == "status"]
    assert states[0] == "starting"
    assert "running" in states
    assert "incubator" not in log
    topic = env["TIDEMILL_KAFKA__SOURCE_TOPIC"]
    assert sum(max(0, offset) for offset in committed_offsets(embedded_kafka.bootstrap, topic, topic).values()) == 2


@pytest.mark.kafka
@pytest.mark.spark
@pytest.mark.long
def test_a_terminal_that_is_closed_drains_with_exit_code_0(
    project: Path, env: dict[str, str], embedded_kafka: EmbeddedBroker
) -> None:
    send(project, env, ["hello", "tide mill"])
    results = project / "output" / "results.jsonl"
    arguments = ["run", "tidemill.yaml", "--handler", "handler:Capitals"]
    with on_terminal(arguments, env, project, terminal=True) as command:
        wait_for(lambda: results.exists() and len(results.read_text().splitlines()) == 2, what=lambda: command.said)
        command.hang_up()
        assert command.process.wait(60) == ExitCode.OK
        command.until_alone()
    topic = env["TIDEMILL_KAFKA__SOURCE_TOPIC"]
    assert sum(max(0, offset) for offset in committed_offsets(embedded_kafka.bootstrap, topic, topic).values()) == 2


@pytest.mark.kafka
@pytest.mark.spark
def test_a_second_run_of_the_same_name_is_refused_at_once(project: Path, env: dict[str, str]) -> None:
    from tidemill.runtime.files.lock import WorkerLock

    lock = WorkerLock(env["TIDEMILL_KAFKA__CONSUMER_GROUP"], env["WORKER_ID"], brokers=env["TIDEMILL_KAFKA__BROKERS"])
    with lock, running(project, env) as process:
        assert process.wait(60) == ExitCode.FENCED

    log = (project / "log.txt").read_text()
    assert f"by process {os.getpid()}" in log
    assert "WORKER_ID=..." in log
    assert "Traceback" not in log


@pytest.mark.kafka
def test_a_broker_that_is_not_there_is_named_after_a_second_and_its_error_is_told_once(
    project: Path, env: dict[str, str]
) -> None:
    with running(project, {**env, "TIDEMILL_KAFKA__BROKERS": "127.0.0.1:1"}) as process:
        assert process.wait(90) == ExitCode.REMOTE

    log = (project / "log.txt").read_text()
    assert "hunter2" not in log
    assert "Traceback" not in log
    entries = [json.loads(line) for line in log.splitlines()]
    waiting = [(entry["event"], entry["brokers"]) for entry in entries if entry["level"] == "warning"]
    assert waiting == [("no response from the brokers yet; retrying", "127.0.0.1:1")]
    assert any(entry.get("waits_for", "").startswith("no broker at 127.0.0.1:1 yet (") for entry in entries)
    failed = [entry for entry in entries if "no answer from Kafka at 127.0.0.1:1" in json.dumps(entry)]
    assert [(entry["event"], entry["kind"]) for entry in failed] == [("the pipeline failed", "RemoteError")]


def test_a_pipeline_without_sinks_is_refused_before_spark(project: Path) -> None:
    (project / "tidemill.yaml").write_text("kafka: {source_topic: lines}\n")
    clean = without_settings()

    with running(project, clean) as process:
        assert process.wait(60) == ExitCode.CONFIG

    log = (project / "log.txt").read_text()
    assert log.count("no sink is configured") == 1
    assert json.loads(log.splitlines()[-1])["kind"] == "SinkNotConfiguredError"
