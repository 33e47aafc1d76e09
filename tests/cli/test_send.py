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
from typing import TYPE_CHECKING, Any

import confluent_kafka as ck
import pytest
import typer
from tests import prepared
from tests.cli.notices import drop_notices
from tests.until import wait_until

from tidemill.cli.topics.send import LineSender, read_key, send
from tidemill.cli.topics.send_progress import SentCounts
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.kafka.topic_reader import TopicReader
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import consume, unique_name

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

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

    arguments = ["send", topic, "--config", "c.yaml"]
    done = prepared.run(arguments, cwd=tmp_path, env=os.environ, stdin=b"tide\nmill\n")

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
    assert "line 4 was not sent: the line has no field 'id' to use as the key" in said
    assert "line 5 was not sent: the line is not a JSON object" in said
    assert sender.describe().startswith(f"sent 3 messages to {topic}; 2 failed (1: ")


class ScriptedProducer:
    """A client that keeps what it is given until its queue is full, and raises what a test wants.

    Attributes:
        room: How many messages fit into the queue.
        on_poll: Raised by poll().
        on_flush: Raised by flush(), one at each call; then the messages that wait are confirmed.
        on_produce: Raised by produce() once the queue is full; None: BufferError.
        gives_back: Codes of the errors with which flush() reports messages.
    """

    config: dict[str, Any]
    room = 1
    on_poll: type[BaseException] | BaseException | None = None
    on_flush: list[BaseException | None]
    on_produce: BaseException | None = None
    confirms = False
    gives_back: list[int]

    def __init__(self, config: dict[str, Any], logger: object) -> None:
        self._waiting = 0
        self._report = config["on_delivery"]
        type(self).config = config

    def __len__(self) -> int:
        return self._waiting

    def produce(self, topic: str, value: bytes, key: bytes | None) -> None:
        if self._waiting >= self.room:
            raise self.on_produce or BufferError("queue full")
        self._waiting += 1

    def poll(self, seconds: float) -> int:
        if self.on_poll is not None:
            raise self.on_poll
        return 0

    def flush(self, seconds: float) -> int:
        while self.gives_back:
            self._waiting -= 1
            self._report(ck.KafkaError(self.gives_back.pop()), None)
        if self.on_flush and (error := self.on_flush.pop(0)) is not None:
            raise error
        if self.confirms:
            self._waiting = 0
        return self._waiting


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedProducer]:
    made = type("Client", (ScriptedProducer,), {"on_flush": [], "gives_back": []})
    monkeypatch.setattr(ck, "Producer", made)
    monkeypatch.setattr("tidemill.cli.topics.send._LEAVE_SECONDS", 0.1)
    return made


def test_brokers_that_go_away_are_named_while_messages_wait_and_may_take_minutes_to_come_back(
    client: type[ScriptedProducer], capsys: pytest.CaptureFixture[str]
) -> None:
    client.room, client.confirms = 9, True
    sender = LineSender(KafkaSettings(), "t", None, None)
    down = ck.KafkaError(ck.KafkaError._ALL_BROKERS_DOWN, "1/1 brokers are down")

    client.config["error_cb"](down)  # nothing waits for them
    assert capsys.readouterr().err == ""
    sender._producer.produce("t", b"x", None)
    client.config["error_cb"](ck.KafkaError(ck.KafkaError._TRANSPORT, "refused"))
    client.config["error_cb"](down)
    client.config["error_cb"](down)

    assert capsys.readouterr().err == (
        "Kafka at localhost:9092 does not answer (refused); 1 message waiting to be confirmed, each for up to 300 s\n"
    )
    assert client.config["delivery.timeout.ms"] == 300_000


FATAL = ck.KafkaException(ck.KafkaError(ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no right", fatal=True))


def test_how_far_it_is_counts_what_the_brokers_confirmed(client: type[ScriptedProducer]) -> None:
    client.room = 9
    sender = LineSender(KafkaSettings(), "t", "id", None)
    sender._send_lines(io.BytesIO(b'{"id": 1}\n{"id": 2}\n{}\n'))
    assert sender.look() == SentCounts(messages=0, failed=1, read_bytes=23)
    sender._producer._waiting = 1  # type: ignore[attr-defined]
    assert sender.look().messages == 1


@pytest.mark.parametrize(("room", "rate"), [(1, None), (9, 0.001)])
@pytest.mark.parametrize("confirms", [True, False])
def test_a_line_that_was_read_but_not_handed_over_at_ctrl_c_is_not_counted_as_sent(
    client: type[ScriptedProducer], room: int, rate: float | None, confirms: bool
) -> None:
    client.room, client.on_poll, client.confirms = room, KeyboardInterrupt, confirms
    sender = LineSender(KafkaSettings(), "t", None, rate)

    assert sender.send_all(io.BytesIO(b"a\nb\nc\n")) is True

    assert (sender.sent, sender.failed) == ((1, 1) if confirms else (0, 2))
    assert "1: not sent when it was stopped" in sender.describe()
    assert ("1: not confirmed when it was stopped" in sender.describe()) is not confirms


@pytest.mark.parametrize("confirms", [True, False])
def test_a_client_that_fails_while_lines_are_sent_ends_it_with_a_count(
    client: type[ScriptedProducer], confirms: bool
) -> None:
    client.on_poll, client.confirms = FATAL, confirms
    sender = LineSender(KafkaSettings(), "t", None, None)

    assert sender.send_all(io.BytesIO(b"a\nb\nc\n")) is False

    assert (sender.sent, sender.failed) == ((1, 1) if confirms else (0, 2))
    assert "1: not sent when the client failed" in sender.describe()
    with pytest.raises(RemoteError, match=r"the Kafka client failed: no right; nothing after line 2 was read"):
        sender.raise_failure()


def test_a_client_that_fails_at_the_end_ends_it_with_a_count(client: type[ScriptedProducer]) -> None:
    client.room, client.on_flush, client.confirms = 9, [FATAL], False
    client.gives_back = [ck.KafkaError._PURGE_QUEUE, ck.KafkaError._PURGE_INFLIGHT]
    sender = LineSender(KafkaSettings(), "t", None, None)

    assert sender.send_all(io.BytesIO(b"a\nb\nc\n")) is False

    assert (sender.sent, sender.failed) == (0, 3)
    assert sender.describe() == (
        "sent 0 messages to t; 3 failed (2: not confirmed when the client failed; 1: not sent when the client failed)"
    )
    with pytest.raises(RemoteError, match=r"the Kafka client failed: no right$"):
        sender.raise_failure()


def test_the_reason_of_a_failure_is_named_even_if_a_message_was_refused_before_it_was_known(
    client: type[ScriptedProducer],
) -> None:
    client.on_produce = ck.KafkaException(ck.KafkaError(ck.KafkaError._FATAL, "Fatal error"))
    client.on_flush, client.confirms = [FATAL], True
    sender = LineSender(KafkaSettings(), "t", None, None)

    assert sender.send_all(io.BytesIO(b"a\nb\n")) is False

    with pytest.raises(RemoteError, match="no right"):
        sender.raise_failure()


def test_the_command_says_what_was_sent_before_the_client_failed(
    client: type[ScriptedProducer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    client.on_poll, client.confirms = FATAL, True
    (tmp_path / "lines").write_bytes(b"a\nb\n")
    for name in ("require_topic", "stop_on_signals"):
        monkeypatch.setattr(f"tidemill.cli.topics.send.{name}", lambda *arguments: None)

    with pytest.raises(typer.Exit) as caught:
        send("t", str(tmp_path / "lines"))

    assert caught.value.exit_code == ExitCode.REMOTE
    assert capsys.readouterr().err == (
        "sent 1 message to t; 1 failed (1: not sent when the client failed)\n"
        "error: the Kafka client failed: no right; nothing after line 2 was read\n"
    )


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


@pytest.mark.parametrize(
    "line", [b"", b"[]", b'{"k": "\xff"}', b'{"k": "\\ud800"}', b'{"other": 1}', b'{"k"', b'{"k": ' + b"[" * 9_999]
)
def test_a_line_without_a_usable_key_says_so(line: bytes) -> None:
    with pytest.raises(ValueError, match=r"JSON|field"):
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
        (("t", "--rate", "nan"), "--rate nan: must be above 0"),
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
        assert process.wait(60) == ExitCode.STOPPED
        assert process.stderr is not None
        assert drop_notices(process.stderr.read()) == f"sent 1 message to {topic}\n"
    finally:
        process.kill()
        process.communicate()
