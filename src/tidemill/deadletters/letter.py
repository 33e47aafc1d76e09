"""The dead letter: its content, how a failure becomes one, and how it becomes JSON of a limited size.

Invariants: `Letter.about` creates every letter, of pipelines and of triggers, so all letters show and hide the same.
Output of programs, hooks, sinks and brokers is masked where it looks like a secret, as in logs, and so are the
arguments of the task. Messages and payloads are stored unmasked, because they may be sent again. Any letter can be
encoded, whatever a user put into it. A letter that is too large loses bodies first, and the positions of its messages
last. This module does not decide which messages are dead-lettered.
"""

from __future__ import annotations

import base64
import enum
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Self

import msgspec

from tidemill.config.redaction import redact_arguments, redact_text
from tidemill.deadletters.payloads import Blob, drop_body, encode_json, make_digest
from tidemill.runtime.kafka.source_message import Header, SourceMessage

SCHEMA_VERSION = 1
#: The header that counts, as a decimal number, how often a message was dead-lettered and sent again.
REDRIVES_HEADER = "tidemill-redrives"
#: The header with the history of those failures and redrives, as JSON, oldest first.
HISTORY_HEADER = "tidemill-history"
#: The number of bytes of a task's stderr that a letter contains, counted from the end.
_STDERR_BYTES = 4096
#: How much of the end of stderr is masked.
_MASKED_CHARS = 4 * _STDERR_BYTES
#: How much of stderr a log entry or the error of a letter quotes.
_SUMMARY_CHARS = 500

_decode_history = msgspec.json.Decoder(list[dict[str, Any]]).decode


class LetterKind(enum.StrEnum):
    """The step at which the message failed."""

    PARSE = "parse"
    TOMBSTONE = "tombstone"
    ARRANGE = "arrange"
    TRANSFORM = "transform"
    TASK = "task"
    HOOK = "hook"
    DELIVERY = "delivery"
    OVERSIZE = "oversize"
    REJECTED = "rejected"
    FAILED = "failed"


class LetterSource(msgspec.Struct):
    """One source message; key, value and headers are text if they are UTF-8, otherwise a `Blob`.

    An empty `Blob` as value means that only the position is left. If the headers cannot be read, `headers` is empty and
    `headers_error` gives the reason.
    """

    topic: str
    partition: int
    offset: int
    key: str | Blob | None = None
    headers: list[tuple[str, str | Blob | None]] = []
    timestamp: int = -1
    value: str | Blob | None = None
    headers_error: str | None = None


class Letter(msgspec.Struct, kw_only=True):
    """One dead letter.

    Attributes:
        kind: The step at which the message failed.
        error: The error, for people to read.
        original_payloads: JSON strings, each a whole payload as a hook returned it.
        sink_name: The sink that refused the payloads, '' if there is none.
        sink_type: The type of that sink.
        partition: The source partition, None if there is none.
        attempt_count: How often the task or the delivery was tried.
        redrives: How often the message was dead-lettered and sent again before.
        task_id: The task that failed.
        args: The task's arguments.
        exit_code: The task's exit code.
        stderr: The end of the task's standard error.
        sources: The messages that the task or the delivery worked for.
        timestamp: When the letter was written, ISO 8601, UTC.
        sources_dropped: How many more messages there were whose positions did not fit.
    """

    kind: LetterKind
    error: str
    schema_version: int = SCHEMA_VERSION
    letter_id: str = msgspec.field(default_factory=lambda: uuid.uuid4().hex)
    original_payloads: list[str] = []
    sink_name: str = ""
    sink_type: str = ""
    timestamp: str = msgspec.field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    partition: int | None = None
    attempt_count: int = 0
    redrives: int = 0
    task_id: str | None = None
    args: list[str] = []
    exit_code: int | None = None
    stderr: str = ""
    sources: list[LetterSource] = []
    sources_dropped: int = 0

    @classmethod
    def about(
        cls,
        messages: Sequence[SourceMessage],
        kind: LetterKind,
        error: str,
        *,
        attempts: int = 1,
        payloads: Sequence[str] = (),
        sink: tuple[str, str] = ("", ""),
        task_id: str | None = None,
        args: Iterable[str] = (),
        exit_code: int | None = None,
        stderr: str = "",
    ) -> Self:
        """Return a letter about messages whose processing ends here.

        Args:
            messages: The messages; the letter carries all of them.
            kind: The step at which they failed.
            error: The error, for people to read.
            attempts: How often the task, the delivery or the event was tried.
            payloads: The payloads that were not delivered, each encoded by `encode_payload`.
            sink: Type and name of the sink that refused them.
            task_id: The task that failed, if there is one.
            args: The task's arguments.
            exit_code: The task's exit code.
            stderr: The task's standard error; the letter contains the end.
        """
        return cls(
            kind=kind,
            error=redact_text(error),
            original_payloads=list(payloads),
            sink_type=sink[0],
            sink_name=sink[1],
            partition=messages[0].partition if messages else None,
            attempt_count=attempts,
            redrives=max((count_redrives(message.headers) for message in messages if message.headers), default=0),
            task_id=task_id,
            args=redact_arguments(args),
            exit_code=exit_code,
            # Masked before it is cut, because half of a secret would not be recognised.
            stderr=truncate_stderr(redact_text(stderr[-_MASKED_CHARS:])),
            sources=describe_sources(messages),
        )

    @property
    def written_at(self) -> float:
        """The time the letter was written, in seconds since the epoch; a time without a zone is local.

        Raises:
            ValueError: `timestamp` is not a time.
        """
        at = datetime.fromisoformat(self.timestamp)
        return (at.astimezone() if at.tzinfo is None else at).timestamp()


def _encode_value(data: bytes | str | None) -> str | Blob | None:
    """Return bytes as text if they are UTF-8, otherwise as base64."""
    if data is None or isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Blob(base64=base64.b64encode(data).decode())


def describe_sources(messages: Iterable[SourceMessage]) -> list[LetterSource]:
    """Return a letter's view of its source messages."""
    return [
        LetterSource(
            message.topic,
            message.partition,
            message.offset,
            _encode_value(message.key),
            [(name, _encode_value(value)) for name, value in message.headers],
            message.timestamp,
            _encode_value(message.value),
            message.headers_error,
        )
        for message in messages
    ]


def count_redrives(headers: Iterable[tuple[str, bytes | str | Blob | None]]) -> int:
    """Return how often a message was sent again, according to its headers; 0 without a valid header.

    Example:
        >>> count_redrives([("trace", b"1"), ("tidemill-redrives", b"2")])
        2
    """
    found = [value for name, value in headers if name == REDRIVES_HEADER]
    text = found[-1] if found else None
    if isinstance(text, str):
        text = text.encode()
    # Anyone can write headers, so everything but a small number is ignored.
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) < 10 else 0


def read_history_header(headers: Iterable[Header]) -> list[dict[str, Any]]:
    """Return the history of earlier letters from a message's headers; empty without a valid header."""
    for name, value in headers:
        if name == HISTORY_HEADER and value is not None:
            try:
                return _decode_history(value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return []
    return []


def summarize_stderr(stderr: str) -> str:
    r"""Return the masked end of a program's stderr, for one line of a log.

    Example:
        >>> summarize_stderr("login with password=hunter2 failed\n")
        'login with password=*** failed'
    """
    return redact_text(stderr[-_MASKED_CHARS:].strip())[-_SUMMARY_CHARS:]


def truncate_stderr(stderr: str | bytes) -> str:
    """Return the last 4 KiB."""
    data = stderr.encode("utf-8", "replace") if isinstance(stderr, str) else stderr
    return data[-_STDERR_BYTES:].decode("utf-8", "replace")


def encode_letter(letter: Letter, limit_bytes: int | None = None) -> bytes:
    """Return a letter as JSON, shrunk if it is larger than `limit_bytes`.

    Bodies are dropped first (length and SHA-256 stay), then everything of a source but its position, then arguments,
    payloads and most of stderr, and finally the sources that still do not fit.
    """
    encoded = encode_json(letter)
    if limit_bytes is None or len(encoded) <= limit_bytes:
        return encoded
    for smaller in (_drop_bodies, _keep_positions, _drop_details):
        letter = smaller(letter)
        encoded = encode_json(letter)
        if len(encoded) <= limit_bytes:
            return encoded
    while letter.sources and len(encoded) > limit_bytes:
        kept = letter.sources[: len(letter.sources) // 2]
        dropped = letter.sources_dropped + len(letter.sources) - len(kept)
        letter = msgspec.structs.replace(letter, sources=kept, sources_dropped=dropped)
        encoded = encode_json(letter)
    return encoded


def decode_letter(data: bytes) -> Letter:
    """Return a letter from its JSON.

    Raises:
        msgspec.ValidationError: The bytes are not a letter.
    """
    return msgspec.json.decode(data, type=Letter)


def _shrink_value(value: str | Blob | None) -> str | Blob | None:
    """Replace a body by its length and SHA-256, unless these are longer than the body."""
    if value is None or (isinstance(value, str) and len(value) <= 100):
        return value
    if isinstance(value, Blob):
        if value.base64 is None or len(value.base64) <= 100:
            return value
        return make_digest(value.to_bytes())
    return make_digest(value.encode("utf-8", "replace"))


def _drop_bodies(letter: Letter) -> Letter:
    sources = [
        msgspec.structs.replace(
            source,
            key=_shrink_value(source.key),
            value=_shrink_value(source.value),
            headers=[(name, _shrink_value(value)) for name, value in source.headers],
        )
        for source in letter.sources
    ]
    payloads = [drop_body(payload) for payload in letter.original_payloads]
    return msgspec.structs.replace(letter, sources=sources, original_payloads=payloads)


def _keep_positions(letter: Letter) -> Letter:
    sources = [
        LetterSource(s.topic, s.partition, s.offset, timestamp=s.timestamp, value=Blob()) for s in letter.sources
    ]
    return msgspec.structs.replace(letter, sources=sources)


def _drop_details(letter: Letter) -> Letter:
    return msgspec.structs.replace(
        letter, args=[], stderr=letter.stderr[-200:], error=letter.error[:500], original_payloads=[]
    )
