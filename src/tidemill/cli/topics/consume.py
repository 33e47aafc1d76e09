"""`tidemill consume`: shows the messages of a topic, unchanged or as JSON.

Invariants: it joins no consumer group and commits no offsets. It shows no messages of aborted transactions. Memory
stays bounded however large the topic is. A partition ends when its end is reached, so that offsets without a message
(compaction, transactions) never block the command.
"""

from __future__ import annotations

import base64
import contextlib
import os
import select
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tidemill.cli.reporting import reporting
from tidemill.cli.topic_access import ConfigOption, Topic, load_for_topic, open_client, require_topic
from tidemill.core.errors import ConfigError, RemoteError, escape_surrogates
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import stop_on_signals

if TYPE_CHECKING:
    from tidemill.config.sections.kafka_settings import KafkaSettings

_BATCH = 1_000
_READ_SECONDS = 0.2
_CALL_SECONDS = 10.0
#: With --follow, how often to look for new partitions; slow brokers may delay reading by a second.
_LOOK_SECONDS = 5.0
_LOOK_CALL_SECONDS = 1.0
#: Without --follow, the command fails if partitions yield nothing for this long, not even their end.
_SILENT_SECONDS = 30.0

Format = Callable[[Any], bytes]


def consume(
    topic: Topic,
    start: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="beginning|end|TIME",
            help="Where to start; TIME: 2026-05-01T12:00 (UTC), or 2h for two hours ago.",
        ),
    ] = "beginning",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for more messages, until Ctrl-C.")] = False,
    key: Annotated[str | None, typer.Option("--key", metavar="K", help="Show only messages with this key.")] = None,
    limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="End after N messages.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per message, with key and headers.")
    ] = False,
    config: ConfigOption = None,
) -> None:
    """Show the messages of a topic, with one value per line.

    Ends where the topic ended at the start of the command, unless --follow is given. Joins no consumer group and
    commits no offsets. Shows no messages of open or aborted transactions.
    """
    with reporting():
        if start == "end" and not follow:
            raise ConfigError("--from end shows nothing without --follow; add it to wait for new messages")
        since = parse_start(start)
        settings = load_for_topic(config, topic)
        stop_on_signals()
        wanted = None if key is None else os.fsencode(key)
        try:
            require_topic(settings, topic)
            viewer = TopicViewer(settings.kafka, topic, choose_format(as_json=as_json), wanted, limit)
            with contextlib.closing(viewer):
                viewer.show(since, follow=follow)
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.OK if follow else ExitCode.STOPPED) from None


def parse_start(text: str) -> int:
    """Return where to start: milliseconds since the epoch, or librdkafka's -2 (beginning) or -1 (end).

    Raises:
        ConfigError: The text is neither a time nor `beginning` or `end`.
    """
    if text in ("beginning", "end"):
        return -2 if text == "beginning" else -1
    from tidemill.cli.dlq.options import parse_time

    at = parse_time("--from", text)
    assert at is not None
    return max(0, int(at * 1000))


class TopicViewer:
    """Reads a topic and writes its messages to standard output.

    Args:
        kafka: The `kafka` section.
        topic: An existing topic.
        describe: Formats a message.
        key: Show only messages with this key; None: all.
        limit: Stop after this many messages; None: no limit.
    """

    def __init__(
        self, kafka: KafkaSettings, topic: str, describe: Format, key: bytes | None = None, limit: int | None = None
    ) -> None:
        import confluent_kafka as ck

        from tidemill.runtime.kafka.client import make_client_config

        overrides = {
            # The client looks up this group's coordinator but never joins the group, because partitions are assigned
            # manually.
            "group.id": "tidemill-consume",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "fetch.wait.max.ms": 50,
            "fetch.queue.backoff.ms": 20,
            "queued.max.messages.kbytes": 16_384,
            "error_cb": self._on_error,
        }
        self._consumer, self._scrub = open_client(ck.Consumer, make_client_config, kafka, overrides)
        self._ck = ck
        self._brokers = kafka.brokers
        self._topic = topic
        self._describe = describe
        self._key = key
        self._left = limit
        #: The partitions that are read, and the time of the next search for new ones with --follow.
        self._numbers: set[int] = set()
        self._look_at = 0.0
        #: The ends of partitions that are still being read; empty with --follow.
        self._ends: dict[int, int] = {}
        #: Counts time spent reading only: writing may take long, and the process may be suspended.
        self._silent_seconds = 0.0
        self._told = False
        self._heard = ""
        self._stdout = select.poll()
        self._stdout.register(1, 0)  # poll always reports when a pipe's reader closes it

    def close(self) -> None:
        self._consumer.close()

    def show(self, start: int, *, follow: bool) -> None:
        """Write messages until the end of the topic, the limit, or (with `follow`) a signal.

        Args:
            start: See `parse_start`.
            follow: Continue at the end of the topic.

        Raises:
            RemoteError: The brokers do not answer, or the topic cannot be read.
            BrokenPipeError: The reader of standard output has closed it.
        """
        try:
            self._assign(start, follow=follow)
        except self._ck.KafkaException as error:
            raise self._unreadable(error.args[0]) from None
        while (follow or self._ends) and self._left != 0:
            records = self._consumer.consume(_BATCH, _READ_SECONDS)
            written = [text for record in records if (text := self._take(record, follow=follow)) is not None]
            if written:
                sys.stdout.buffer.write(b"".join(written))
                sys.stdout.buffer.flush()
            if any(map(has_partition, records)):
                self._silent_seconds, self._told, self._heard = 0.0, False, ""
            else:
                self._silent_seconds += _READ_SECONDS
                self._check(follow=follow)
            if follow and time.monotonic() >= self._look_at:
                self._assign_new()

    def _assign(self, start: int, *, follow: bool) -> None:
        position = self._ck.TopicPartition
        self._numbers = self._list_partitions(_CALL_SECONDS)
        self._look_at = time.monotonic() + _LOOK_SECONDS
        partitions = [position(self._topic, number, start) for number in sorted(self._numbers)]
        if start >= 0:
            partitions = self._consumer.offsets_for_times(partitions, timeout=_CALL_SECONDS)
        if not follow:
            for at in partitions:
                low, end = self._consumer.get_watermark_offsets(at, timeout=_CALL_SECONDS)
                if at.offset != -1 and max(at.offset, low) < end:
                    self._ends[at.partition] = end
            partitions = [at for at in partitions if at.partition in self._ends]
        self._consumer.assign(partitions)

    def _list_partitions(self, seconds: float) -> set[int]:
        metadata = self._consumer.list_topics(self._topic, timeout=seconds).topics[self._topic]
        if metadata.error is not None:
            raise self._unreadable(metadata.error)
        return set(metadata.partitions)

    def _assign_new(self) -> None:
        """Start reading new partitions from their beginning.

        Raises:
            RemoteError: The topic was deleted.
        """
        try:
            new = self._list_partitions(_LOOK_CALL_SECONDS) - self._numbers
            if new:
                # All their messages were written after the start.
                at = [self._ck.TopicPartition(self._topic, number, -2) for number in sorted(new)]
                self._consumer.incremental_assign(at)
                self._numbers |= new
        except self._ck.KafkaException:
            pass  # the brokers do not answer, which is reported while nothing can be read
        self._look_at = time.monotonic() + _LOOK_SECONDS

    def _take(self, record: Any, *, follow: bool) -> bytes | None:
        if (error := record.error()) is not None:
            if error.code() == self._ck.KafkaError._PARTITION_EOF:
                # All readable messages were read; an open transaction may hide further ones.
                self._finish(record.partition())
            elif error.fatal() or not (error.retriable() or self._is_of_group(record)):
                raise self._unreadable(error)
            return None
        if not follow:
            end = self._ends.get(record.partition())
            if end is not None and record.offset() + 1 >= end:
                self._finish(record.partition())
            if end is None or record.offset() >= end:
                return None
        if self._left == 0 or (self._key is not None and record.key() != self._key):
            return None
        if self._left is not None:
            self._left -= 1
        return self._describe(record)

    def _is_of_group(self, record: Any) -> bool:
        """Return whether an error concerns the group, whose permission this command does not need."""
        return not has_partition(record) or record.error().code() == self._ck.KafkaError.GROUP_AUTHORIZATION_FAILED

    def _finish(self, partition: int) -> None:
        if self._ends.pop(partition, None) is not None:
            self._consumer.pause([self._ck.TopicPartition(self._topic, partition)])

    def _check(self, *, follow: bool) -> None:
        if any(flags & (select.POLLERR | select.POLLHUP | select.POLLNVAL) for _, flags in self._stdout.poll(0)):
            raise BrokenPipeError
        if not follow and self._silent_seconds > _SILENT_SECONDS:
            numbers = ", ".join(map(str, sorted(self._ends)))
            reason = f": {self._heard}" if self._heard else ""
            raise RemoteError(
                f"Kafka at {self._brokers} has sent nothing about topic {self._topic!r}, partition {numbers}, for "
                f"{_SILENT_SECONDS:g} s{reason}; check that Kafka is running and that each partition has a leader"
            )

    def _on_error(self, error: Any) -> None:
        self._heard = self._scrub(error.str())
        if error.code() == self._ck.KafkaError._ALL_BROKERS_DOWN and not self._told:
            self._told = True
            typer.echo(f"Kafka at {self._brokers} does not answer ({self._heard}); waiting", err=True)

    def _unreadable(self, error: Any) -> RemoteError:
        said = self._scrub(error.str())
        return RemoteError(f"topic {self._topic!r} at {self._brokers} cannot be read: {said}", retryable=False)


def choose_format(*, as_json: bool) -> Format:
    """Return the output format: JSON, escaped for a terminal, or byte for byte."""
    if as_json:
        return format_json
    return format_for_terminal if sys.stdout.isatty() else format_raw


def has_partition(record: Any) -> bool:
    """Return whether a record, or an error in place of one, belongs to a partition."""
    return record.partition() is not None and record.partition() >= 0


def format_raw(record: Any) -> bytes:
    """Return a message's value byte for byte, and a line break."""
    return (record.value() or b"") + b"\n"


def format_for_terminal(record: Any) -> bytes:
    """Return a message's value and a line break, with control characters escaped."""
    text = (record.value() or b"").decode("utf-8", "backslashreplace")
    return ("".join(c if c.isprintable() or c == "\t" else ascii(c)[1:-1] for c in text) + "\n").encode()


def format_json(record: Any) -> bytes:
    """Return a message as one line of JSON; bytes that are not UTF-8 become base64."""
    import msgspec

    _, milliseconds = record.timestamp()
    described = {
        "topic": record.topic(),
        "partition": record.partition(),
        "offset": record.offset(),
        "timestamp": format_timestamp(milliseconds),
        "key": to_json(record.key()),
        "value": to_json(record.value()),
        "headers": describe_headers(record),
    }
    return msgspec.json.encode(described) + b"\n"


def describe_headers(record: Any) -> list[list[Any]] | dict[str, str]:
    """Return the headers of a record, or the reason why they cannot be read."""
    from tidemill.runtime.kafka.record_headers import read_headers

    headers, error = read_headers(record)
    if error is not None:
        return {"unreadable": error}
    return [[escape_surrogates(name), to_json(value)] for name, value in headers]


def format_timestamp(milliseconds: int) -> str | int | None:
    """Return a record's timestamp in UTC; None without one, and a number if it exceeds the calendar.

    Example:
        >>> format_timestamp(1)
        '1970-01-01T00:00:00.001Z'
    """
    if milliseconds < 0:
        return None
    try:
        at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return milliseconds
    return at.isoformat(timespec="milliseconds").removesuffix("+00:00") + "Z"


def to_json(data: bytes | str | None) -> str | dict[str, str] | None:
    r"""Return bytes as text if they are UTF-8, otherwise as base64.

    Example:
        >>> to_json(b"tide"), to_json(b"\xff")
        ('tide', {'base64': '/w=='})
    """
    if data is None or isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
