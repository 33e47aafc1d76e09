"""The embedded broker: a real Apache Kafka that starts, survives outages and never outlives its parent."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka import Producer
from tests.until import wait_until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import EmbeddedBroker, PortInUseError
from tidemill.runtime.process.table import is_running
from tidemill.testing.kafka import consume, produce, unique_name

pytestmark = pytest.mark.kafka

#: Looks for segments to remove all the time.
LOOKING = {"log.retention.check.interval.ms": "200", "log.initial.task.delay.ms": "100"}


def test_a_topic_can_be_written_and_read_as_soon_as_it_was_created(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name(), partitions=3)
    assert produce(embedded_kafka.bootstrap, topic, [b"one", b"two", None]) == 3
    assert sorted(m.value() or b"" for m in consume(embedded_kafka.bootstrap, topic, 3)) == [
        b"",
        b"one",
        b"two",
    ]


def test_a_topic_gets_its_properties(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name(), config={"max.message.bytes": "1000"})
    with pytest.raises(Exception, match="MSG_SIZE_TOO_LARGE"):
        produce(embedded_kafka.bootstrap, topic, [b"x" * 2000])


def test_a_topic_that_exists_already_is_refused_by_name(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    with pytest.raises(RemoteError, match=f"{topic}.*already exists"):
        embedded_kafka.create_topic(topic)


def test_a_topic_is_created_as_soon_as_a_broker_that_was_too_busy_for_its_heartbeats_may_have_it(
    tmp_path: Path,
) -> None:
    often_fenced = {"broker.session.timeout.ms": "300", "broker.heartbeat.interval.ms": "1500"}
    with EmbeddedBroker(tmp_path / "kafka", properties=often_fenced) as broker:
        assert [broker.create_topic(f"topic-{n}") for n in range(4)] == [f"topic-{n}" for n in range(4)]


@pytest.mark.long
def test_a_broker_keeps_its_port_its_oldest_records_and_its_folder_until_another_one_takes_that_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LC_ALL", "C")
    folder = tmp_path / "höme \\ 潮 🌊"  # whatever its name and the locale
    with EmbeddedBroker(folder, properties=LOOKING) as first:
        topic, address = first.create_topic("kept"), first.bootstrap
        producer = Producer({"bootstrap.servers": address})
        producer.produce(topic, b"before", timestamp=1_000)  # of 1970
        assert producer.flush(30) == 0
        assert (folder / "data" / "kept-0").is_dir()
        properties = (folder / "server.properties").read_bytes()
        with pytest.raises(
            ConfigError, match=rf"is used by another broker \(process {os.getpid()}\); stop that broker"
        ):
            EmbeddedBroker(folder).start()
        assert (folder / "server.properties").read_bytes() == properties
        first.kill()
        assert not first.running
        first.start()  # its own lock does not stop it
        assert first.bootstrap == address
        produce(address, topic, [b"between"])
        assert [m.value() for m in consume(address, topic, 2)] == [b"before", b"between"]
    with EmbeddedBroker(folder) as second:
        assert [m.value() for m in consume(second.bootstrap, topic, 2)] == [b"before", b"between"]


def test_a_taken_port_is_refused_although_somebody_answers_there(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        broker = EmbeddedBroker(tmp_path, port=taken.getsockname()[1])
        with pytest.raises(RemoteError, match=r"port \d+ of 127\.0\.0\.1 is in use"):
            broker.start()
        assert not broker.running


def test_of_two_brokers_that_start_at_once_on_one_port_one_is_refused(
    tmp_path: Path, embedded_kafka: EmbeddedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other Kafka took the port after the look at it; its answers are not those of the broker that starts.
    port = int(embedded_kafka.bootstrap.rpartition(":")[2])
    looks = iter([False])
    monkeypatch.setattr("tidemill.runtime.embedded.broker._answers", lambda port: next(looks, True))
    broker = EmbeddedBroker(tmp_path, port=port)
    with pytest.raises(PortInUseError, match=rf"port {port} of 127\.0\.0\.1 is in use, perhaps by another Kafka"):
        broker.start()
    assert not broker.running
    embedded_kafka.create_topic(unique_name())


def test_a_file_in_the_place_of_the_data_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is a file, not a folder"):
        EmbeddedBroker(tmp_path / "file").start()


def test_a_folder_that_is_not_formatted_in_time_is_named(tmp_path: Path) -> None:
    broker = EmbeddedBroker(tmp_path / "kafka", start_timeout_seconds=0.01)
    with pytest.raises(RemoteError, match=f"{tmp_path}/kafka was not formatted"):
        broker.start()
    assert not broker.running


def test_a_broker_that_does_not_start_leaves_no_folder() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = EmbeddedBroker(port=taken.getsockname()[1])
        assert broker.data_dir.exists()
        with pytest.raises(RemoteError), broker:
            pass
    assert not broker.data_dir.exists()


def test_closing_removes_a_temporary_folder_and_ends_the_process() -> None:
    with EmbeddedBroker() as broker:
        folder, pid = broker.data_dir, broker.pid
        assert pid is not None
        assert (folder / "server.properties").exists()
    assert not folder.exists()
    assert not is_running(pid)


CHILD = """
import sys, time
from pathlib import Path
from tests.archives import use_broker_archive
from tidemill.runtime.embedded.broker import EmbeddedBroker
use_broker_archive()
broker = EmbeddedBroker(Path(sys.argv[1])).start()
print(broker.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_the_broker_ends_when_its_parent_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert is_running(pid)
        finally:
            parent.send_signal(number)
    wait_until(lambda: not is_running(pid), 60, what="the broker has ended with its parent")


def test_nothing_is_started_without_a_word_when_the_parent_dies_in_between() -> None:
    """The gate: a shell that is not told to go on ends instead of becoming a broker that nobody guards."""
    from tidemill.runtime.process.guarded import _GATE

    read_end, write_end = os.pipe()
    with subprocess.Popen(["/bin/sh", "-c", _GATE, "sh", "echo", "started"], stdin=read_end, stdout=-1) as shell:
        os.close(read_end)
        os.close(write_end)
        assert shell.communicate(timeout=60)[0] == b""
