"""`tidemill send`: lines become messages, byte for byte, and each is confirmed or counted."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.cli.notices import drop_notices
from tests.until import wait_until

from tidemill.cli.send import LineSender, read_key
from tidemill.config.kafka_settings import KafkaSettings
from tidemill.runtime.exitcode import ExitCode
from tidemill.runtime.topics import TopicReader
from tidemill.testing.kafka import consume, unique_name

if TYPE_CHECKING:
    from tidemill.runtime.broker import EmbeddedBroker

MAIN = "from tidemill.cli.main import main; main()"
Run = Callable[..., "subprocess.CompletedProcess[str]"]


def send_lines(broker: EmbeddedBroker, topic: str, text: bytes, **options: object) -> LineSender:
    kafka = KafkaSettings(brokers=broker.bootstrap, client_config=options.pop("client_config", {}))
    sender = LineSender(kafka, topic, options.get("key"), options.get("rate"))
    assert sender.send_all(io.BytesIO(text)) is False
    return sender


def values(broker: EmbeddedBroker, topic: str, count: int) -> list[bytes]:
    return sorted(message.value() for message in consume(broker.bootstrap, topic, count))


@pytest.mark.kafka
def test_each_line_of_a_file_is_a_message_byte_for_byte(
    tidemill: Run, tmp_path: Path, embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name(), partitions=2)
    (tmp_path / "lines").write_bytes(b"tide\n\n\xff\x00broken\r\nno line break")

    done = tidemill("send", topic, "lines", env={"TIDEMILL_KAFKA__BROKERS": embedded_kafka.bootstrap})

    assert (done.returncode, drop_notices(done.stderr)) == (0, f"sent 4 messages to {topic}\n")
    assert values(embedded_kafka, topic, 4) == [b"", b"no line break", b"tide", b"\xff\x00broken\r"]


@pytest.mark.kafka
def test_the_brokers_of_a_configuration_and_standard_input_are_used(
    tmp_path: Path, embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    (tmp_path / "c.yaml").write_text(f"kafka: {{brokers: '{embedded_kafka.bootstrap}'}}")

    done = subprocess.run(
        [sys.executable, "-c", MAIN, "send", topic, "--config", "c.yaml"],
        cwd=tmp_path, input=b"tide\nmill\n", capture_output=True, timeout=60,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert values(embedded_kafka, topic, 2) == [b"mill", b"tide"]


@pytest.mark.kafka
def test_a_field_of_each_line_is_its_key_and_lines_without_it_are_counted(
    embedded_kafka: EmbeddedBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    topic = embedded_kafka.create_topic(unique_name())

    sender = send_lines(embedded_kafka, topic, b'{"id": "a"}\n{"id": 1.50}\n{"id": null}\n{}\nno json\n', key="id")

    assert (sender.sent, sender.failed) == (3, 2)
    assert [message.key() for message in consume(embedded_kafka.bootstrap, topic, 3)] == [b"a", b"1.50", None]
    said = capsys.readouterr().err
    assert "line 4 was not sent: it has no field 'id' for its key" in said
    assert "line 5 was not sent: it is not a JSON object" in said
    assert sender.describe().startswith(f"sent 3 messages to {topic}; 2 failed (1: ")


@pytest.mark.parametrize(
    ("line", "key"),
    [
        (b'{"k": "caf\xc3\xa9"}', "caf\u00e9".encode()),
        (b'{"k": "\\u00e9"}', "\u00e9".encode()),
        (b'{"k": 12345678901234567890123}', b"12345678901234567890123"),
        (b'{"k": true}', b"true"),
        (b'{"k": [1, 2]}', b"[1, 2]"),
        (b'{"k": ""}', b""),
        (b'{"k": null}', None),
    ],
)
def test_keys_are_as_they_are_written(line: bytes, key: bytes | None) -> None:
    assert read_key(line, "k") == key


@pytest.mark.parametrize("line", [b"", b"[]", b'{"k": "\xff"}', b'{"k": "\\ud800"}', b'{"other": 1}', b'{"k"'])
def test_a_line_without_a_usable_key_says_so(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"it |its "):
        read_key(line, "k")


@pytest.mark.kafka
def test_a_line_that_is_too_long_is_counted_and_the_next_one_is_sent(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    too_long = b"x" * 5_000

    sender = send_lines(
        embedded_kafka, topic, b"a\n" + too_long + b"\nb\n" + too_long, client_config={"message.max.bytes": 1_000}
    )

    assert (sender.sent, sender.failed) == (2, 2)
    assert "longer than 1,000 bytes" in sender.describe()
    assert values(embedded_kafka, topic, 2) == [b"a", b"b"]


@pytest.mark.kafka
def test_what_the_brokers_refuse_is_counted_and_the_exit_code_says_so(
    tidemill: Run, tmp_path: Path, embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name(), config={"max.message.bytes": "1000"})
    (tmp_path / "lines").write_bytes(b"a\n" + b"x" * 5_000 + b"\n")

    done = tidemill("send", topic, "lines", env={"TIDEMILL_KAFKA__BROKERS": embedded_kafka.bootstrap})

    assert done.returncode == ExitCode.REMOTE
    assert "failed (" in done.stderr
    assert "too large" in done.stderr.lower()


@pytest.mark.kafka
def test_a_rate_is_kept(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    started = time.monotonic()

    sender = send_lines(embedded_kafka, topic, b"x\n" * 11, rate=20)

    assert sender.sent == 11
    assert time.monotonic() - started >= 0.5


@pytest.mark.kafka
def test_a_topic_that_does_not_exist_is_named_with_the_nearest_one(
    tidemill: Run, embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name("orders"))

    done = tidemill("send", topic[:-1], env={"TIDEMILL_KAFKA__BROKERS": embedded_kafka.bootstrap})

    assert done.returncode == ExitCode.REMOTE
    assert f"topic '{topic[:-1]}' does not exist" in done.stderr
    assert f"did you mean '{topic}'?" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("a b",), "TOPIC is not a valid topic name"),
        (("t", "missing.txt"), "missing.txt cannot be read: No such file"),
        (("t", "--rate", "0"), "--rate 0: must be above 0"),
    ],
)
def test_a_wrong_command_line_is_refused_before_anything_is_sent(
    tidemill: Run, arguments: tuple[str, ...], said: str
) -> None:
    done = tidemill("send", *arguments)

    assert done.returncode == ExitCode.CONFIG
    assert said in done.stderr


@pytest.mark.kafka
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_once_what_was_read_is_sent(
    tmp_path: Path, embedded_kafka: EmbeddedBroker, number: signal.Signals
) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "send", topic],
        env={**os.environ, "TIDEMILL_KAFKA__BROKERS": embedded_kafka.bootstrap},
        cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert process.stdin is not None
        process.stdin.write("tide\n")
        process.stdin.flush()
        with TopicReader(embedded_kafka.bootstrap) as reader:
            wait_until(lambda: reader.end_offsets(topic) == {0: 1}, what="the line is sent before the input ends")
        process.send_signal(number)
        assert process.wait(30) == ExitCode.STOPPED
        assert process.stderr is not None
        assert drop_notices(process.stderr.read()) == f"sent 1 message to {topic}\n"
    finally:
        process.kill()
        process.communicate()
