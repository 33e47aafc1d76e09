"""`tidemill release`, for real: a pipeline on Spark whose handler is broken, its brake, and the command beside it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests import prepared
from tests.cli.test_run import MAIN, env, project, running, send, wait_until  # noqa: F401  # two are fixtures

from tidemill.cli.pipelines.release import describe_release
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import committed_offsets, consume

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

BROKEN = """
from tidemill import ExecutorTask, Handler, PrecomputedResult


class Capitals(Handler[bytes, bytes]):
    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t-{m.partition}-{m.offset}", source_offsets=[m.offset], precomputed=PrecomputedResult())
            for m in messages
        ]

    async def on_task_complete(self, result):
        raise LookupError("no table of letters")
"""
LINES = 90


@pytest.mark.long
@pytest.mark.kafka
@pytest.mark.spark
def test_what_a_brake_holds_is_dead_lettered_by_a_user_and_not_before(
    project: Path,  # noqa: F811
    env: dict[str, str],  # noqa: F811
    embedded_kafka: EmbeddedBroker,
) -> None:
    (project / "handler.py").write_text(BROKEN)
    more = {"TIDEMILL_EXECUTOR__MAX_FAILURE_RATIO": "0.5", "TIDEMILL_SPARK__ENGINES": "1"}
    environ = {**env, **more}
    topic = env["TIDEMILL_KAFKA__SOURCE_TOPIC"]

    def release() -> subprocess.CompletedProcess[str]:
        return prepared.run_text(["release", "tidemill.yaml"], cwd=project, env=environ)

    def committed() -> int:
        return sum(max(0, offset) for offset in committed_offsets(embedded_kafka.bootstrap, topic, topic).values())

    nobody = release()
    assert nobody.returncode == ExitCode.REMOTE
    assert f"no pipeline of consumer group '{topic}'" in nobody.stderr
    send(project, env, [f"line {n}" for n in range(LINES)])
    with running(project, environ) as process:
        wait_until(lambda: "the brake is on" in (project / "log.txt").read_text(), process, project)
        answers: list[str] = []

        def released() -> bool:
            done = release()
            assert done.returncode == ExitCode.OK, done.stderr
            answers.append(done.stdout)
            return "dead-lettered" in done.stdout

        # The driver tells what its engines said last, which may have been just before.
        wait_until(released, process, project)
        wait_until(lambda: committed() == LINES, process, project)
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == ExitCode.OK

    log = (project / "log.txt").read_text()
    assert "messages failed with on_task_complete: LookupError (last: LookupError: no table of letters (" in log
    assert "a user released the brake" in log
    letters = consume(embedded_kafka.bootstrap, f"{topic}_dlq", LINES)
    assert len({letter.value for letter in letters}) == LINES
    held = int(answers[-1].split("engine 0: ")[1].split()[0])
    # What the engine had said when it was asked: more may have been held by the time that it was released.
    assert 0 <= held < LINES
    assert f"process {process.pid}" in answers[-1]


def test_an_answer_is_told_in_a_line() -> None:
    about = {"worker": "w", "pid": 7}
    engines = [{"slot": 0, "held": 1}, {"slot": 3, "held": 1200}]
    both = "engine 0: 1 held message is dead-lettered; engine 3: 1,200 held messages are dead-lettered"
    assert describe_release({**about, "engines": engines}) == f"worker w (process 7): {both}"
    assert (
        describe_release({**about, "engines": []})
        == "worker w (process 7): no failure brake is on, and no message is held"
    )
    assert describe_release({**about, "error": "this version does not know 'release'"}).endswith(
        "does not know 'release'"
    )


def test_a_driver_that_fails_to_answer_is_told_without_its_name() -> None:
    assert describe_release({"error": "it failed: LookupError: x"}) == "a pipeline: it failed: LookupError: x"
