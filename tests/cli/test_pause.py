"""`tidemill pause`, `resume` and `restart`, for real: a pipeline on Spark, and the commands beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests import prepared
from tests.cli.test_run import env, project, running, send, wait_until  # noqa: F401  # two are fixtures

from tidemill.cli.pipelines.pause import describe_answer, parse_span
from tidemill.core.errors import ConfigError
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import committed_offsets

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.spark
def test_a_paused_pipeline_reads_nothing_until_it_is_resumed_also_after_a_restart_of_its_engine(
    project: Path,  # noqa: F811
    env: dict[str, str],  # noqa: F811
    embedded_kafka: EmbeddedBroker,
) -> None:
    environ = {**env, "TIDEMILL_SPARK__ENGINES": "1"}
    topic = env["TIDEMILL_KAFKA__SOURCE_TOPIC"]

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        return prepared.run_text([*words], cwd=project, env=environ)

    def committed() -> int:
        return sum(max(0, offset) for offset in committed_offsets(embedded_kafka.bootstrap, topic, topic).values())

    def status() -> dict[str, Any]:
        (report,) = json.loads(command("status", "tidemill.yaml", "--json").stdout)["processes"]
        return dict(report)

    nobody = command("pause", "tidemill.yaml")
    assert (nobody.returncode, "no pipeline of consumer group" in nobody.stderr) == (ExitCode.REMOTE, True)
    send(project, env, [f"line {n}" for n in range(10)])
    with running(project, environ) as process:
        wait_until(lambda: committed() == 10, process, project)
        paused = command("pause", "tidemill.yaml", "--for", "2h")
        assert paused.returncode == ExitCode.OK
        assert paused.stdout.endswith(": paused all partitions for 2 h 0 min\n")
        wrong = command("resume", "tidemill.yaml", "--partition", "0")
        assert (wrong.returncode, "all partitions are paused" in wrong.stdout) == (ExitCode.REMOTE, True)
        send(project, env, [f"line {n}" for n in range(10, 20)])
        restarted = command("restart", "0", "tidemill.yaml")
        assert (restarted.returncode, "engine 0 drains" in restarted.stdout) == (ExitCode.OK, True)

        def is_back() -> bool:
            report = status()
            engine = report["engines"][0]
            return engine["starts"] == 2 and engine["state"] == "running" and report["lag"] == 10

        wait_until(is_back, process, project)
        assert committed() == 10
        shown = command("status", "tidemill.yaml").stdout
        assert "PAUSED" in shown
        assert "all partitions by the command line, for another 1 h 59 min" in shown
        assert command("resume", "tidemill.yaml").stdout.endswith(": ended 1 pause\n")
        wait_until(lambda: committed() == 20, process, project)
        assert status()["paused"] == []
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == ExitCode.OK


@pytest.mark.parametrize("text", ["", "soon", "-5m", "1.5h", "5 min", "1e9", "\u0661m"])
def test_a_wrong_time_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_span(text)


def test_answers_are_told_in_a_line() -> None:
    about = {"worker": "w", "pid": 7}
    assert describe_answer({**about, "resumed": 2}) == "worker w (process 7): ended 2 pauses"
    assert describe_answer({**about, "resumed": 0}) == "worker w (process 7): nothing is paused"
    assert describe_answer({**about, "restarted": 3}) == "worker w (process 7): engine 3 drains and then restarts"
    assert describe_answer({**about, "error": "there is no engine 9"}) == "worker w (process 7): there is no engine 9"
    assert describe_answer({"error": "it failed"}) == "a pipeline: it failed"
