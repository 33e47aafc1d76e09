"""The live status line: what it says, and that it shows on a terminal only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time

import pytest

from tidemill.cli.status import Rate, format_status, live_status
from tidemill.runtime.progress import EngineProgress
from tidemill.spark.progress import EngineStatus, PipelineProgress, sum_progress


def pipeline(*engines: EngineProgress) -> PipelineProgress:
    statuses = [EngineStatus(slot, "running", progress=engine) for slot, engine in enumerate(engines)]
    return sum_progress((), engines, statuses)


def test_before_the_first_engine_it_says_what_is_waited_for() -> None:
    assert format_status(sum_progress((), (), [EngineStatus(0, "starting")]), 0.0) == "starting Spark and the engines"


def test_engines_are_summed_up() -> None:
    progress = pipeline(
        EngineProgress(
            messages_done=1000,
            tasks_running=4,
            tasks_queued=7,
            partitions=["t/0", "t/1"],
            lag={"t/0": 5},
            in_flight=1012,
        ),
        EngineProgress(
            messages_done=234, tasks_running=3, tasks_failed=2, dead_lettered=2, letters_dropped=1, partitions=["t/2"]
        ),
    )

    assert format_status(progress, 99.6) == (
        "2 of 2 engines, 3 partitions | 1,234 messages done, 100/s | tasks: 7 running, 7 queued, 2 failed | "
        "lag 5 (2 of 3 partitions not known yet), 1,012 in flight | 2 dead letters | 1 dead letter DROPPED"
    )


def test_a_lag_that_is_not_known_yet_is_said_to_be_that() -> None:
    assert "| lag not known yet, 3 in flight" in format_status(
        pipeline(EngineProgress(partitions=["t/0"], in_flight=3)), 0.0
    )
    assert "| lag 7, 0 in flight" in format_status(pipeline(EngineProgress(partitions=["t/0"], lag={"t/0": 7})), 0.0)


def test_what_is_waited_for_is_said() -> None:
    stalled = {"kafka": "no broker answers"}

    text = format_status(pipeline(EngineProgress(stalled=stalled), EngineProgress(stalled=stalled)), 0.0)

    assert text.count("waiting for kafka: no broker answers") == 1


def test_the_rate_is_that_of_the_last_seconds() -> None:
    rate = Rate()

    for second in range(11):
        steady = rate.add(float(second), second * 100)
    for second in range(11, 16):
        idle = rate.add(float(second), 1000)

    assert steady == pytest.approx(100)
    assert idle == 0.0


def test_without_a_terminal_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with live_status(list):
        pass

    assert capsys.readouterr() == ("", "")


CHILD = """
import sys, time
from tidemill.cli.status import live_status
from tidemill.config.settings import LoggingSettings
from tidemill.runtime.log import configure
from tidemill.runtime.progress import EngineProgress
from tidemill.spark.progress import EngineStatus, sum_progress
import structlog
configure(LoggingSettings())
calls = []
def progress():
    calls.append(1)
    if len(calls) == 1:
        raise RuntimeError("not yet")
    engine = EngineProgress(messages_done=4242)
    return sum_progress((), [engine], [EngineStatus(0, 'running', progress=engine)])
with live_status(progress, plain="--plain" in sys.argv):
    structlog.get_logger().info("a log line")
    deadline = time.monotonic() + 20
    while len(calls) < 4 and time.monotonic() < deadline and "--plain" not in sys.argv:
        time.sleep(0.01)
"""


def on_terminal(*arguments: str) -> str:
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "160"},
    )
    os.close(follower)
    text = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux says so when the other side is closed
            break
        if not chunk:
            break
        text += chunk
    os.close(leader)
    assert process.wait(10) == 0, text.decode()
    return text.decode()


def test_on_a_terminal_a_line_shows_and_logs_appear_beside_it() -> None:
    text = on_terminal()

    assert "4,242 messages done" in text
    assert "a log line" in text


def test_on_a_terminal_it_can_be_left_out() -> None:
    text = on_terminal("--plain")

    assert "messages done" not in text
    assert "a log line" in text
