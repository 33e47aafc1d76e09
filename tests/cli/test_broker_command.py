"""`tidemill broker`: a real Kafka in the foreground."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tidemill.cli.broker import parse_topic
from tidemill.core.errors import ConfigError
from tidemill.runtime.process.exitcode import ExitCode

MAIN = "from tidemill.cli.main import main; main()"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_topics_are_written_with_their_partitions() -> None:
    assert parse_topic("orders:4") == ("orders", 4)
    assert parse_topic("orders") == ("orders", 1)


@pytest.mark.parametrize("text", ["orders:x", "orders:0", ":4", "a b:1", "orders:-1"])
def test_other_topics_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--topic"):
        parse_topic(text)


def test_a_wrong_number_of_partitions_is_said_in_words() -> None:
    with pytest.raises(ConfigError, match=r"--topic orders:x: 'x' is not a number; write NAME:PARTITIONS"):
        parse_topic("orders:x")


def test_a_wrong_topic_is_refused_before_anything_starts(tidemill: Run) -> None:
    done = tidemill("broker", "--topic", "a b")

    assert done.returncode == ExitCode.CONFIG
    assert "error: --topic a b" in done.stderr


@pytest.mark.kafka
@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_it_runs_with_its_topics_until_it_is_stopped(tmp_path: Path, number: signal.Signals) -> None:
    from confluent_kafka.admin import AdminClient

    options = ["--port", "0", "--topic", "lines:3", "--data-dir", str(tmp_path / "data")]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "broker", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
        start_new_session=True,
    )
    # Ends the reading below if it never gets ready.
    guard = threading.Timer(60, process.kill)
    guard.start()
    try:
        assert process.stderr is not None
        address = ""
        seen = []
        for line in process.stderr:
            seen.append(line)
            if line.startswith("Kafka is ready at "):
                address = line.split()[4].rstrip(";")
                break
        assert address, "".join(seen)
        topics = AdminClient({"bootstrap.servers": address, "log_level": 0}).list_topics(timeout=60).topics
        assert len(topics["lines"].partitions) == 3

        # As from a terminal: the whole process group gets it.
        os.killpg(process.pid, number)
        assert process.wait(60) == ExitCode.OK
    finally:
        guard.cancel()
        process.kill()
        process.communicate()
