"""`tidemill send`: writes the lines of a file to a topic, one message per line.

Invariants: lines are sent byte for byte, whatever they contain. Memory stays bounded however long the input or a line
is. Every line is either confirmed by the brokers or counted as failed.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from tidemill.cli.reporting import reporting
from tidemill.cli.topic_access import (
    ConfigOption,
    Topic,
    load_for_topic,
    open_client,
    require_topic,
)
from tidemill.cli.topics.send_progress import SendProgress, SentCounts
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.wording import format_count
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.stop_signals import stop_on_signals

if TYPE_CHECKING:
    from tidemill.config.sections.kafka_settings import KafkaSettings

#: librdkafka's own default; `message.max.bytes` in kafka.client_config changes it.
_MAX_BYTES = 1_000_000
#: The maximum size of unconfirmed messages; reading pauses beyond it.
_QUEUE_KIB = 65_536
#: Brokers may restart within this time; a message that is not confirmed by then has failed.
_CONFIRM_SECONDS = 300
#: How often a notice reports that the brokers do not answer.
_NOTICE_SECONDS = 30.0
#: Delivery reports are polled after this many lines.
_POLL_LINES = 500
#: The maximum length of a call into the client, so that signals are noticed.
_CALL_SECONDS = 0.2
#: How long to wait while the queue is full; without delivery reports, only time frees it.
_FULL_SECONDS = 0.01
#: How long unconfirmed messages get after Ctrl-C.
_LEAVE_SECONDS = 5.0
#: How many failed lines are reported individually.
_NAMED_LINES = 5
_AT_FAILURE = "when the client failed"


def send(
    topic: Topic,
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A file with one message per line; -: standard input.")
    ] = "-",
    key: Annotated[
        str | None,
        typer.Option("--key", metavar="FIELD", help="Parse each line as a JSON object, and use this field as the key."),
    ] = None,
    rate: Annotated[
        float | None, typer.Option("--rate", metavar="N", help="Send at most N messages per second.")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Send the lines of a file, or of standard input, to a topic.

    Each line is one message, byte for byte; an empty line is an empty message. The exit code is 4 if a line was not
    confirmed by the brokers.
    """
    with reporting():
        if rate is not None and not rate > 0:  # also true for NaN
            raise ConfigError(f"--rate {rate:g}: must be above 0")
        settings = load_for_topic(config, topic)
        with _open_lines(file) as lines:
            stop_on_signals()
            require_topic(settings, topic)
            sender = LineSender(settings.kafka, topic, key, rate)
            if file == "-" and lines.isatty():
                typer.echo("one message per line; Ctrl-D ends", err=True)
            progress = SendProgress(lines, sender.look)
            with progress.showing():
                stopped = sender.send_all(lines)
        typer.echo(sender.describe(progress.describe_time(sender.sent)), err=True)
        sender.raise_failure()
        if stopped:
            raise typer.Exit(ExitCode.STOPPED)
        if sender.failed:
            raise typer.Exit(ExitCode.REMOTE)


@contextlib.contextmanager
def _open_lines(file: str) -> Iterator[BinaryIO]:
    if file == "-":
        yield sys.stdin.buffer
        return
    try:
        lines = open(file, "rb")  # noqa: SIM115 - closed below; only errors of opening are reported here
    except OSError as error:
        raise ConfigError(f"{file or repr(file)} cannot be read: {error.strerror}") from None
    with lines:
        yield lines


class LineSender:
    """Sends lines and counts the outcomes.

    Args:
        kafka: The `kafka` section.
        topic: An existing topic.
        key_field: The field of each line, a JSON object, to use as the key; None: no keys.
        rate: The maximum number of messages per second; None: no limit.
    """

    def __init__(self, kafka: KafkaSettings, topic: str, key_field: str | None, rate: float | None) -> None:
        """Create the client; it connects with the first message."""
        import confluent_kafka as ck

        from tidemill.runtime.kafka.producer import make_producer_config

        self._max_bytes = int(kafka.client_config.get("message.max.bytes", _MAX_BYTES))
        overrides = {
            "linger.ms": 5,
            "delivery.timeout.ms": _CONFIRM_SECONDS * 1_000,
            "message.max.bytes": self._max_bytes,
            "queue.buffering.max.kbytes": _QUEUE_KIB,
            "delivery.report.only.error": True,
            "on_delivery": self._on_failure,
            "error_cb": self._on_error,
        }
        self._producer, self._scrub = open_client(ck.Producer, make_producer_config, kafka, overrides)
        self._error = ck.KafkaException
        self._all_down = ck.KafkaError._ALL_BROKERS_DOWN
        self._without_reason = ck.KafkaError._FATAL
        #: Errors with which messages are returned after a fatal error, and what they mean.
        self._given_back = {ck.KafkaError._PURGE_QUEUE: "not sent", ck.KafkaError._PURGE_INFLIGHT: "not confirmed"}
        self._topic = topic
        self._brokers = kafka.brokers
        self._key_field = key_field
        self._rate = rate
        #: Each line that was read is either passed to the client or rejected; at Ctrl-C one line may be neither.
        self._lines = 0
        self._read_bytes = 0
        self._handed_over = 0
        self._refused = 0
        self._failures: Counter[str] = Counter()
        self._heard = ""
        self._told_at = -math.inf
        self._failure: Any = None
        self._all_read = False

    @property
    def failed(self) -> int:
        """The number of lines that were not sent or not confirmed."""
        return self._failures.total()

    @property
    def sent(self) -> int:
        """The number of messages that the brokers confirmed, once `send_all` has returned."""
        return self._lines - self.failed

    def look(self) -> SentCounts:
        """Return the current progress; callable from any thread."""
        failed = self.failed
        return SentCounts(
            max(0, self._handed_over + self._refused - failed - len(self._producer)), failed, self._read_bytes
        )

    def send_all(self, lines: BinaryIO) -> bool:
        """Send all lines, and wait until each is confirmed or has failed; see also `raise_failure`.

        Returns:
            Whether a signal stopped it; unconfirmed messages then get a few more seconds.
        """
        stopped = False
        try:
            self._send_lines(lines)
            self._all_read = True
        except KeyboardInterrupt:
            stopped = True
        except self._error as error:
            self._fail(error.args[0])
        try:
            self._flush(None if not stopped and not self._failure else _LEAVE_SECONDS)
        except KeyboardInterrupt:
            stopped = True
        when = _AT_FAILURE if self._failure else "when it was stopped"
        if unsent := self._lines - self._handed_over - self._refused:
            self._failures[f"not sent {when}"] += unsent
        if waiting := len(self._producer):
            self._failures[f"not confirmed {when}"] += waiting
        return stopped

    def raise_failure(self) -> None:
        """Report a fatal error of the client.

        Raises:
            RemoteError: The client failed; lines after the counted ones were not read.
        """
        if self._failure:
            text = f"the Kafka client failed: {self._scrub(self._failure.str())}"
            rest = "" if self._all_read else f"; nothing after line {self._lines:,} was read"
            raise RemoteError(text + rest, retryable=False)

    def describe(self, took: str = "") -> str:
        """Return a line with the number of sent messages, the time if given, and the reasons of failures."""
        text = f"sent {format_count(self.sent, 'message')} to {self._topic}{took}"
        if self.failed:
            reasons = "; ".join(f"{count:,}: {why}" for why, count in self._failures.most_common())
            text += f"; {self.failed:,} failed ({reasons})"
        return text

    def _send_lines(self, lines: BinaryIO) -> None:
        started = time.monotonic()
        poll, key_field, rate, limit = self._producer.poll, self._key_field, self._rate, self._max_bytes + 2
        while line := lines.readline(limit):
            self._lines += 1
            self._read_bytes += len(line)
            if line[-1] == 10:
                line = line[:-1]
            elif len(line) == limit:
                self._skip_rest(lines)
                self._refuse(f"longer than {self._max_bytes:,} bytes (kafka.client_config message.max.bytes)")
                continue
            key = None
            if key_field is not None:
                try:
                    key = read_key(line, key_field)
                except ValueError as error:
                    self._refuse(str(error))
                    continue
            if rate is not None:
                self._wait_until(started + self._handed_over / rate)
            self._hand_over(line, key)
            if not self._handed_over % _POLL_LINES:
                poll(0)

    def _hand_over(self, line: bytes, key: bytes | None) -> None:
        while True:
            try:
                self._producer.produce(self._topic, line, key)
            except BufferError:
                self._producer.poll(_FULL_SECONDS)
            except self._error as error:
                from tidemill.runtime.kafka.producer import is_too_large

                if error.args[0].fatal() or not is_too_large(error.args[0]):
                    raise
                self._refuse(f"longer than {self._max_bytes:,} bytes (kafka.client_config message.max.bytes)")
                return
            else:
                self._handed_over += 1
                return

    def _wait_until(self, due: float) -> None:
        while (left := due - time.monotonic()) > 0:
            self._producer.poll(min(left, _CALL_SECONDS))

    def _flush(self, seconds: float | None) -> None:
        deadline = None if seconds is None else time.monotonic() + seconds
        # Without a deadline, each message has its own limit, delivery.timeout.ms.
        left = 1
        while left and (deadline is None or time.monotonic() < deadline):
            try:
                left = self._producer.flush(_CALL_SECONDS)
            except self._error as error:
                # The outcomes of the other messages can still arrive.
                self._fail(error.args[0])
                deadline = deadline or time.monotonic() + _LEAVE_SECONDS

    def _fail(self, error: Any) -> None:
        # The error of a message after a fatal error lacks the cause; the fatal error itself follows.
        if self._failure is None or self._failure.code() == self._without_reason:
            self._failure = error

    def _skip_rest(self, lines: BinaryIO) -> None:
        while (part := lines.readline(self._max_bytes)) and part[-1] != 10:
            pass

    def _refuse(self, why: str) -> None:
        if self.failed < _NAMED_LINES:
            typer.echo(f"line {self._lines} was not sent: {why}", err=True)
        self._refused += 1
        self._failures[why] += 1

    def _on_failure(self, error: Any, message: Any) -> None:
        if error is not None and (what := self._given_back.get(error.code())) is not None:
            self._failures[f"{what} {_AT_FAILURE}"] += 1
        elif error is not None:
            heard = f" ({self._heard})" if self._heard else ""
            self._failures[f"{self._scrub(error.str())}{heard}"] += 1

    def _on_error(self, error: Any) -> None:
        if error.code() != self._all_down or not self._heard:
            self._heard = self._scrub(error.str())
        waiting, now = len(self._producer), time.monotonic()
        if error.code() == self._all_down and waiting and now - self._told_at >= _NOTICE_SECONDS:
            self._told_at = now
            what = f"{format_count(waiting, 'message')} waiting to be confirmed, each for up to {_CONFIRM_SECONDS:,} s"
            typer.echo(f"Kafka at {self._brokers} does not answer ({self._heard}); {what}", err=True)


def read_key(line: bytes, field: str) -> bytes | None:
    """Return the key from a line, a JSON object: strings as UTF-8, other values as written; None for null.

    Raises:
        ValueError: The line is not a JSON object, or lacks the field.

    Example:
        >>> read_key(b'{"user": "ann", "n": 1.50}', "user"), read_key(b'{"user": "ann", "n": 1.50}', "n")
        (b'ann', b'1.50')
    """
    import msgspec

    try:
        fields = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise ValueError("the line is not a JSON object, so it has no key") from None
    except RecursionError:
        raise ValueError("the JSON is nested too deeply to find the key") from None
    raw = fields.get(field)
    if raw is None:
        raise ValueError(f"the line has no field {field!r} to use as the key")
    written = bytes(raw).strip()
    if written == b"null":
        return None
    if written.startswith(b'"'):
        try:
            return msgspec.json.decode(written, type=str).encode()
        except (msgspec.DecodeError, UnicodeError):
            raise ValueError(f"the field {field!r} is not valid UTF-8") from None
    return written
