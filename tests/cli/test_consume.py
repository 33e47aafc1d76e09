"""`tidemill consume`: shows what a topic has, and leaves no trace in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import confluent_kafka as ck
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from tests import prepared
from tests.cli.notices import drop_notices
from tests.foreign_client import send_with_headers
from tests.until import wait_until

from tidemill.cli.topics.consume import TopicViewer, format_for_terminal, format_raw, format_timestamp, parse_start
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.testing.kafka import produce, unique_name

if TYPE_CHECKING:
    from tidemill.runtime.embedded.broker import EmbeddedBroker

MAIN = "from tidemill.cli.main import main; main()"
pytestmark = pytest.mark.kafka


@pytest.fixture
def show(tmp_path: Path, embedded_kafka: EmbeddedBroker) -> Callable[..., subprocess.CompletedProcess[bytes]]:
    """Run the command to its end; the output is bytes."""

    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        return prepared.run(["consume", *arguments], cwd=tmp_path, env=environment(embedded_kafka))

    return run


def environment(broker: EmbeddedBroker) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    return {**clean, "TIDEMILL_KAFKA__BROKERS": broker.bootstrap}


@contextmanager
def following(broker: EmbeddedBroker, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "consume", "--follow", *arguments],
        env=environment(broker), stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def test_values_are_shown_byte_for_byte_up_to_the_end(show: Callable[..., Any], embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name(), partitions=3)
    produce(embedded_kafka.bootstrap, topic, [b"tide", b"\xff\x00", b"", None], partition=1)

    done = show(topic)

    assert (done.returncode, drop_notices(done.stderr)) == (0, "")
    assert done.stdout == b"tide\n\xff\x00\n\n\n"


def test_a_message_with_a_header_name_that_is_not_utf8_is_shown(
    show: Callable[..., Any], embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    send_with_headers(embedded_kafka.bootstrap, topic, b"bad", [(b"caf\xe9", b"1")])
    produce(embedded_kafka.bootstrap, topic, [b"tide"])

    assert show(topic).stdout == b"bad\ntide\n"
    shown = [json.loads(line) for line in show("--json", topic).stdout.splitlines()]

    assert [(each["value"], each["headers"]) for each in shown] == [
        ("bad", {"unreadable": "the name of a header is not UTF-8: b'caf\\xe9'"}),
        ("tide", []),
    ]


def test_an_empty_topic_shows_nothing(show: Callable[..., Any], embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())

    done = show(topic)

    assert (done.returncode, done.stdout, drop_notices(done.stderr)) == (0, b"", "")


def test_json_has_everything_and_bytes_that_are_not_text_as_base64(
    show: Callable[..., Any], embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    producer = Producer({"bootstrap.servers": embedded_kafka.bootstrap})
    producer.produce(
        topic, b"caf\xc3\xa9", b"\xff", timestamp=1_000, headers=[("h", b"1"), ("h", None), ("b", b"\xfe")]
    )
    producer.produce(topic, None, None, timestamp=2_000)
    producer.flush(30)

    first, second = [json.loads(line) for line in show(topic, "--json").stdout.splitlines()]

    assert first == {
        "topic": topic,
        "partition": 0,
        "offset": 0,
        "timestamp": "1970-01-01T00:00:01.000Z",
        "key": {"base64": "/w=="},
        "value": "caf\u00e9",
        "headers": [["h", "1"], ["h", None], ["b", {"base64": "/g=="}]],
    }
    assert (second["key"], second["value"], second["headers"]) == (None, None, [])


def test_a_key_a_time_and_a_limit_choose_messages(show: Callable[..., Any], embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name(), partitions=2)
    producer = Producer({"bootstrap.servers": embedded_kafka.bootstrap})
    for n in range(6):
        producer.produce(topic, str(n), "even" if n % 2 == 0 else "odd", partition=0, timestamp=1_000 * (n + 1))
    producer.flush(30)

    assert show(topic, "--key", "odd").stdout == b"1\n3\n5\n"
    assert show(topic, "--from", "1970-01-01T00:00:05").stdout == b"4\n5\n"
    assert show(topic, "--from", "1s").stdout == b""  # a second ago: nothing is that new
    assert show(topic, "--limit", "2").stdout == b"0\n1\n"


def test_messages_of_open_and_aborted_transactions_are_not_shown_and_not_waited_for(
    show: Callable[..., Any], embedded_kafka: EmbeddedBroker
) -> None:
    topic = embedded_kafka.create_topic(unique_name(), partitions=3)

    def transaction(partition: int, value: str) -> Producer:
        name = f"{topic}-{partition}-{value}"
        producer = Producer({"bootstrap.servers": embedded_kafka.bootstrap, "transactional.id": name})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce(topic, value, partition=partition)
        producer.flush(30)
        return producer

    transaction(0, "committed").commit_transaction(30)
    transaction(1, "aborted").abort_transaction(30)
    still_open = transaction(2, "open")

    done = show(topic)

    still_open.abort_transaction(30)
    assert (done.returncode, done.stdout) == (0, b"committed\n")


def test_it_joins_no_group_and_commits_nothing(show: Callable[..., Any], embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    produce(embedded_kafka.bootstrap, topic, [b"tide"])

    assert show(topic).stdout == show(topic).stdout == b"tide\n"

    groups = AdminClient({"bootstrap.servers": embedded_kafka.bootstrap}).list_consumer_groups().result(30).valid
    assert not [group for group in groups if "consume" in group.group_id]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_following_shows_new_messages_until_a_signal(embedded_kafka: EmbeddedBroker, number: signal.Signals) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    produce(embedded_kafka.bootstrap, topic, [b"old"])

    with following(embedded_kafka, topic) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"old\n"
        produce(embedded_kafka.bootstrap, topic, [b"new"])
        assert process.stdout.readline() == b"new\n"
        process.send_signal(number)
        assert process.wait(60) == ExitCode.OK
        assert process.stderr is not None
        assert drop_notices(process.stderr.read()) == ""


def test_a_reader_that_has_had_enough_ends_it_quietly_even_while_nothing_comes(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    produce(embedded_kafka.bootstrap, topic, [b"one", b"two"])

    with following(embedded_kafka, topic) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"one\n"
        process.stdout.close()  # as `head -1` does
        wait_until(lambda: process.poll() is not None, what="the command ends")
        assert process.stderr is not None
        assert (process.returncode, drop_notices(process.stderr.read())) == (0, "")


def test_a_topic_that_does_not_exist_and_a_start_that_shows_nothing_are_refused(
    show: Callable[..., Any], embedded_kafka: EmbeddedBroker
) -> None:
    done = show("no-such-topic-anywhere")
    assert done.returncode == ExitCode.REMOTE
    assert b"topic 'no-such-topic-anywhere' does not exist" in done.stderr

    done = show("t", "--from", "end")
    assert done.returncode == ExitCode.CONFIG
    assert b"--follow" in done.stderr


class ScriptedConsumer:
    """A client of a topic of one partition that has two messages, and gives what a test wants."""

    batches: list[list[Any]]
    added: list[tuple[int, int]]

    def __init__(self, config: dict[str, Any], logger: object) -> None:
        self.on_error = config["error_cb"]

    #: What list_topics() gives, one after the other, the last one for ever: partitions, or an error to raise or report.
    topics: list[Any]

    def list_topics(self, topic: str, timeout: float) -> Any:
        found = self.topics.pop(0) if len(self.topics) > 1 else self.topics[0]
        if isinstance(found, Exception):
            raise found
        error, partitions = (found, ()) if isinstance(found, ck.KafkaError) else (None, found)
        return SimpleNamespace(topics={topic: SimpleNamespace(error=error, partitions=dict.fromkeys(partitions))})

    def get_watermark_offsets(self, at: ck.TopicPartition, timeout: float) -> tuple[int, int]:
        return 0, 2

    def assign(self, partitions: list[ck.TopicPartition]) -> None: ...

    def pause(self, partitions: list[ck.TopicPartition]) -> None: ...

    def incremental_assign(self, partitions: list[ck.TopicPartition]) -> None:
        self.added += [(at.partition, at.offset) for at in partitions]

    def consume(self, count: int, seconds: float) -> list[Any]:
        assert self.batches, "it reads on after all that the test has for it"
        return self.batches.pop(0)


def make_record(offset: int, *, partition: int | None = 0, error: ck.KafkaError | None = None) -> Any:
    return SimpleNamespace(
        partition=lambda: partition, offset=lambda: offset, error=lambda: error, value=lambda: str(offset).encode()
    )


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedConsumer]:
    made = type("Client", (ScriptedConsumer,), {"batches": [], "added": [], "topics": [{0}]})
    monkeypatch.setattr(ck, "Consumer", made)
    return made


@pytest.mark.parametrize("partition", [None, -1, 0])
def test_a_missing_right_to_the_group_does_not_matter(
    client: type[ScriptedConsumer], partition: int | None, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    refused = ck.KafkaError(ck.KafkaError.GROUP_AUTHORIZATION_FAILED)
    client.batches = [[make_record(-1, partition=partition, error=refused)], [make_record(0), make_record(1)]]

    TopicViewer(KafkaSettings(), "t", format_raw).show(-2, follow=False)

    assert capfdbinary.readouterr().out == b"0\n1\n"


@pytest.mark.parametrize(
    "record",
    [
        make_record(-1, error=ck.KafkaError(ck.KafkaError.TOPIC_AUTHORIZATION_FAILED, "no right")),
        make_record(-1, partition=None, error=ck.KafkaError(ck.KafkaError._FENCED, "no right", fatal=True)),
    ],
)
def test_errors_of_a_partition_and_of_the_whole_client_end_it(client: type[ScriptedConsumer], record: Any) -> None:
    client.batches = [[record]]

    with pytest.raises(RemoteError, match=r"topic 't' at .* cannot be read: no right"):
        TopicViewer(KafkaSettings(), "t", format_raw).show(-2, follow=True)


@pytest.mark.parametrize("group_error", [False, True])
def test_a_partition_of_which_nothing_comes_ends_it(
    client: type[ScriptedConsumer], monkeypatch: pytest.MonkeyPatch, group_error: bool
) -> None:
    monkeypatch.setattr("tidemill.cli.topics.consume._SILENT_SECONDS", 10.0)
    refused = make_record(-1, partition=None, error=ck.KafkaError(ck.KafkaError.GROUP_AUTHORIZATION_FAILED))
    client.batches = [[], [make_record(0)], *([refused] if group_error else [] for _ in range(60))]

    with pytest.raises(RemoteError, match=r"about topic 't', partition 0, for 10 s; check that Kafka is running"):
        TopicViewer(KafkaSettings(), "t", format_raw).show(-2, follow=False)

    assert 0 < len(client.batches) < 15


def test_following_waits_for_a_partition_of_which_nothing_comes(
    client: type[ScriptedConsumer], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("tidemill.cli.topics.consume._SILENT_SECONDS", 10.0)
    client.batches = [*([] for _ in range(60)), [make_record(0)]]

    TopicViewer(KafkaSettings(), "t", format_raw, limit=1).show(-2, follow=True)

    assert capfdbinary.readouterr().out == b"0\n"


def test_following_reads_partitions_that_are_added_from_their_beginning(
    client: type[ScriptedConsumer], monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    monkeypatch.setattr("tidemill.cli.topics.consume._LOOK_SECONDS", 0.0)
    away = ck.KafkaException(ck.KafkaError(ck.KafkaError._TRANSPORT))
    client.topics = [{0}, {0}, away, {0, 2, 1}]
    client.batches = [[], [make_record(0)], [], [], [make_record(0, partition=2)]]

    TopicViewer(KafkaSettings(), "t", format_raw, limit=2).show(-1, follow=True)

    assert client.added == [(1, -2), (2, -2)]
    assert capfdbinary.readouterr().out == b"0\n0\n"


def test_following_ends_when_the_topic_is_deleted(
    client: type[ScriptedConsumer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.cli.topics.consume._LOOK_SECONDS", 0.0)
    client.topics = [{0}, ck.KafkaError(ck.KafkaError.UNKNOWN_TOPIC_OR_PART, "Unknown topic")]
    client.batches = [[]]

    with pytest.raises(RemoteError, match=r"topic 't' at .* cannot be read: Unknown topic"):
        TopicViewer(KafkaSettings(), "t", format_raw).show(-2, follow=True)


def test_an_output_that_is_full_is_not_a_bug(embedded_kafka: EmbeddedBroker) -> None:
    topic = embedded_kafka.create_topic(unique_name())
    produce(embedded_kafka.bootstrap, topic, [b"tide"])

    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "consume", topic],
            env=environment(embedded_kafka), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60,
        )  # fmt: skip

    assert done.returncode == ExitCode.REMOTE
    assert drop_notices(done.stderr) == "error: cannot write to a file or standard output: No space left on device\n"


def test_times_are_read_as_everywhere() -> None:
    assert parse_start("beginning") == -2
    assert parse_start("end") == -1
    assert parse_start("1970-01-01T00:00:01") == 1_000
    with pytest.raises(ConfigError, match="--from noon"):
        parse_start("noon")


@pytest.mark.parametrize("text", ["99999999999w", "999999w", "9" * 5_000 + "s"])
def test_a_time_before_the_calendar_begins_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="too far in the past"):
        parse_start(text)


def test_the_help_names_relative_times_as_they_are_written(tidemill: Callable[..., Any]) -> None:
    text = " ".join(tidemill("consume", "--help").stdout.split())

    assert "or 2h for two hours ago" in text
    assert parse_start("2h") > 0


def test_a_terminal_gets_nothing_that_it_would_obey() -> None:
    record = SimpleNamespace(value=lambda: b"a\x1b[31m\xff\tcaf\xc3\xa9\r")

    assert format_for_terminal(record).decode() == "a\\x1b[31m\\xff\tcaf\u00e9\\r\n"


def test_timestamps_beyond_any_calendar_are_numbers() -> None:
    assert format_timestamp(-1) is None
    assert format_timestamp(10**17) == 10**17
