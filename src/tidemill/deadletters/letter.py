"""The dead letter: what it contains, how it is created from a failure, and how it becomes JSON of a limited size.

Invariants: `Letter.about` creates every letter, of pipelines and of triggers, so that all of them show and hide the
same: what a program, a hook, a sink or a broker said is masked where it looks like a secret, as in logs, and so are the
arguments of the task, while messages and payloads are kept as they are, since they may have to be sent again. Any
letter can be encoded, whatever a user put into it. A letter that is too large loses bodies before anything else, and
its positions last. This module does not decide what is dead-lettered.
"""

from __future__ import annotations

import base64
import enum
import uuid
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Self, cast

import msgspec

from tidemill.config.redaction import redact_arguments, redact_text
from tidemill.core.errors import describe_error, escape_surrogates
from tidemill.deadletters.payloads import Blob, drop_body, encode_json, make_digest
from tidemill.runtime.messages import Header, SourceMessage

SCHEMA_VERSION = 1
#: The header of a message that was dead-lettered and sent again: how often, as a decimal number.
REDRIVES_HEADER = "tidemill-redrives"
#: Its companion: what happened each time, as JSON, oldest first.
HISTORY_HEADER = "tidemill-history"
#: A letter keeps this much of the end of a task's stderr.
_STDERR_BYTES = 4096
#: Only this much of the end is masked.
_MASKED_CHARS = 4 * _STDERR_BYTES
#: Logs, and the error of a letter, quote this much of it.
_SUMMARY_CHARS = 500

_decode_history = msgspec.json.Decoder(list[dict[str, Any]]).decode


class LetterKind(enum.StrEnum):
    """What went wrong with the message."""

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
    """One source message; key, value and headers are text where they are UTF-8, else a `Blob`.

    An empty `Blob` as value means that nothing but the position is left. Where headers cannot be read, `headers_error`
    says why, and there are none.
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
        kind: What went wrong.
        error: In words.
        original_payloads: JSON strings, each a whole payload as a hook returned it.
        sink_name: The sink that refused them, '' where none did.
        sink_type: Its type.
        partition: The source partition, None where there is none.
        attempt_count: How often the task or the delivery was tried.
        redrives: How often the message was dead-lettered and sent again before.
        task_id: The task concerned.
        args: Its arguments.
        exit_code: What it returned.
        stderr: The end of its standard error.
        sources: The messages it worked for.
        timestamp: When the letter was written, ISO 8601, UTC.
        sources_dropped: How many more messages it worked for, whose positions did not fit.
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
        task_id: object = None,
        args: object = (),
        exit_code: int | None = None,
        stderr: str = "",
    ) -> Self:
        """Return a letter about messages whose processing ends here.

        Args:
            messages: The messages concerned; the letter carries all of them.
            kind: What went wrong.
            error: In words.
            attempts: How often the task, the delivery or the event was tried.
            payloads: What was not delivered, each encoded by `encode_payload`.
            sink: Type and name of the sink that refused it.
            task_id: The task concerned, if there is one; a hook can have changed this, and `args`, to anything.
            args: Its arguments.
            exit_code: Its exit code.
            stderr: Its standard error; the end is kept.
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
            task_id=None if task_id is None else _describe_id(task_id),
            args=_describe_args(args),
            exit_code=exit_code,
            # Masked before it is cut: half of a secret would not be recognised.
            stderr=truncate_stderr(redact_text(stderr[-_MASKED_CHARS:])),
            sources=describe_sources(messages),
        )

    @property
    def written_at(self) -> float:
        """When it was written, in seconds since the epoch; a time without a zone is local.

        Raises:
            ValueError: `timestamp` is not a time.
        """
        at = datetime.fromisoformat(self.timestamp)
        return (at.astimezone() if at.tzinfo is None else at).timestamp()


def _encode_value(data: bytes | str | None) -> str | Blob | None:
    """Return bytes as text where they are UTF-8, else as base64."""
    if data is None or isinstance(data, str):
        return data
    try:
        return data.decode()
    except UnicodeDecodeError:
        return Blob(base64=base64.b64encode(data).decode())


def _describe_id(task_id: object) -> str:
    try:
        return escape_surrogates(str(task_id))
    except Exception as error:  # whatever its `str` raises
        return describe_error(error)


def _describe_args(args: object) -> list[str]:
    try:
        return redact_arguments(cast("Iterable[object]", args))
    except Exception as error:  # no list, or whatever the `str` of something in it raises
        return [describe_error(error)]


def describe_sources(messages: Iterable[SourceMessage]) -> list[LetterSource]:
    """Return what a letter says about its source messages."""
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
    """Return how often a message was sent again before, by its headers; 0 if they do not say.

    Example:
        >>> count_redrives([("trace", b"1"), ("tidemill-redrives", b"2")])
        2
    """
    found = [value for name, value in headers if name == REDRIVES_HEADER]
    text = found[-1] if found else None
    if isinstance(text, str):
        text = text.encode()
    # Anyone can write headers: what is not a small number is ignored.
    return int(text) if isinstance(text, bytes) and text.isdigit() and len(text) < 10 else 0


def read_history_header(headers: Iterable[Header]) -> list[dict[str, Any]]:
    """Return what a message's header says about its earlier letters; nothing if the header is not ours."""
    for name, value in headers:
        if name == HISTORY_HEADER and value is not None:
            try:
                return _decode_history(value)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                return []
    return []


def summarize_stderr(stderr: str) -> str:
    """Return the end of what a program wrote to stderr, masked, for one line of a log.

    Example:
        >>> summarize_stderr("login with password=hunter2 failed\\n")
        'login with password=*** failed'
    """
    return redact_text(stderr[-_MASKED_CHARS:].strip())[-_SUMMARY_CHARS:]


def truncate_stderr(stderr: str | bytes) -> str:
    """Return the last 4 KiB."""
    data = stderr.encode("utf-8", "replace") if isinstance(stderr, str) else stderr
    return data[-_STDERR_BYTES:].decode("utf-8", "replace")


def encode_letter(letter: Letter, limit_bytes: int | None = None) -> bytes:
    """Return a letter as JSON, shrunk where it is larger than `limit_bytes`.

    Bodies go first (length and SHA-256 stay), then everything of a source but its position, then arguments,
    payloads and most of stderr, and at the very last the sources that still do not fit.
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
    """Return a letter as it was written.

    Raises:
        msgspec.ValidationError: The bytes are not a letter.
    """
    return msgspec.json.decode(data, type=Letter)


def _shrink_value(value: str | Blob | None) -> str | Blob | None:
    """Replace a body by its length and SHA-256, unless that is longer than the body."""
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
