"""What every sink does: encode a payload, send a batch, and answer for each payload on its own.

A sink never retries and never batches: `pipeline/delivery` does both, in the same way for all sinks. A sink knows its
protocol and which of its errors are worth a retry, and nothing about messages or offsets.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, cast

import msgspec

from tidemill.config.sink_types import name_sink_section
from tidemill.core.errors import RemoteError, SinkNotConfiguredError
from tidemill.sinks.non_finite import NonFinite, describe_non_finite, has_non_finite, is_model, spell_non_finite

#: What to do when the other side does not answer; the name of the setting follows.
CHECK = "check that it is running and reachable, or correct"


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A payload in the form in which it is sent.

    Attributes:
        key: Orders deliveries: while one is retried, later ones with the same key wait.
        body: What is sent, in the sink's own form (bytes, or a tuple that the sink unpacks).
        size_bytes: What it adds to the size of a batch.
    """

    key: Any
    body: Any
    size_bytes: int


class Refusal(msgspec.Struct, frozen=True):
    """Why one payload was not delivered.

    Attributes:
        error: What happened, for people to read.
        retryable: Whether the same payload may be accepted later.
        oversize: Whether it is larger than the target ever accepts.
        waits: Whether it was not sent because an earlier payload of the batch was refused; it is then not counted as
            refused (`WAITS`).
    """

    error: str
    retryable: bool
    oversize: bool = False
    waits: bool = False


#: The answer for a payload that was not sent because it may not overtake an earlier one.
WAITS = Refusal("waits for an earlier payload, which was refused", retryable=True, waits=True)


class Sink(ABC):
    """One configured instance of a sink.

    Args:
        name: The instance's name in the configuration.
    """

    type: ClassVar[str]
    #: For sinks of other packages: the model of the options, which validates them; None: the sink gets a dict.
    options_model: ClassVar[Any] = None

    #: A batch is sent as soon as it has this many payloads or bytes.
    max_batch_count: int = 500
    max_batch_bytes: int = 1024 * 1024
    #: How long a batch may wait for more payloads while nothing else is in flight.
    linger_seconds: float = 0.0
    #: How long `send` may take before it is cancelled and counts as failed; None: `delivery.timeout_seconds`.
    send_timeout_seconds: float | None = None

    #: Whether payloads have an `idempotency_key`. Those without one get one before they are encoded, the same one if
    #: their messages are reprocessed.
    takes_idempotency_key: ClassVar[bool] = False
    #: What NaN and infinities become in JSON: `delivery.non_finite`.
    non_finite: NonFinite = "refuse"

    def __init__(self, name: str) -> None:
        """Keep the instance's name."""
        self.name = name

    @property
    def place(self) -> str:
        """Where it is configured, for messages."""
        return f"{name_sink_section(self.type)}.{self.name}"

    def to_json(self, data: Any) -> bytes:
        """Encode a payload's `data` as JSON, as the configuration says; see `to_json`."""
        return to_json(data, self.non_finite)

    @abstractmethod
    async def connect(self) -> None:
        """Open connections and check that the target is usable.

        Raises:
            ConfigError: The configuration is wrong (no retry helps).
            RemoteError: The target is not reachable, or refuses.
        """

    @abstractmethod
    def encode(self, payload: Any) -> Encoded:
        """Return the payload as it is sent; what it raises concerns this payload alone."""

    @abstractmethod
    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Deliver a batch; return one answer per payload in the same order, None where it is confirmed.

        Raises:
            RemoteError: The sink failed, and no payload of the batch is known to be delivered; `retryable` says whether
                to send them again.
            Exception: One of the payloads may be at fault: they are sent in smaller batches to find it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything; what was confirmed stays confirmed."""


class SinksByName(dict[str, Sink]):
    """The sinks of an engine by type and name, as they are configured: `postgres.main` for `sinks.postgres.main`.

    Raises:
        SinkNotConfiguredError: By `sinks[name]`, if there is no such sink; `sinks.get(name)` returns None instead.
    """

    def __missing__(self, name: str) -> Sink:
        known = ", ".join(sorted(self)) or "none"
        raise SinkNotConfiguredError(f"sinks.{name} is not configured; add it, or use one of those that are: {known}")


def encode_checked(sink: Sink, payload: Any) -> Encoded:
    """Encode a payload, and check the result: a sink of another package may return anything.

    Raises:
        Exception: What concerns this payload alone.
    """
    result: Any = sink.encode(payload)
    check_encoded(sink, result)
    return cast(Encoded, result)


def check_encoded(sink: Sink, result: Any) -> None:
    """Check what a sink encoded.

    Raises:
        TypeError: It cannot be queued.
    """
    if not isinstance(result, Encoded) or not isinstance(result.size_bytes, int):
        raise TypeError(
            f"{sink.place}: encode must return an Encoded with a size in bytes, not {shorten(repr(result))}"
        )
    try:
        hash(result.key)
    except TypeError:
        raise TypeError(
            f"{sink.place}: the key {shorten(repr(result.key))} is not hashable; use text or a tuple"
        ) from None


class Answers:
    """The answers to one batch that is sent in parts: what is confirmed, refused, and not known yet.

    Once a payload is refused, later ones with its key are not sent: a hook may decide to retry it, and then it must
    come first.

    Args:
        batch: What is sent.
    """

    def __init__(self, batch: Sequence[Encoded]) -> None:
        """Start with nothing known."""
        self._batch = batch
        self._known: set[int] = set()
        self._refused: dict[int, Refusal] = {}
        # By key, the first payload that is refused.
        self._held: dict[Hashable, int] = {}

    def confirm(self, indexes: Iterable[int]) -> None:
        """Record that payloads are delivered."""
        self._known.update(indexes)

    def refuse(self, index: int, refusal: Refusal) -> None:
        """Record that a payload is refused."""
        self._known.add(index)
        self._refused[index] = refusal
        key = self._batch[index].key
        if key is not None:
            self._held[key] = min(index, self._held.get(key, index))

    def filter_sendable(self, indexes: Sequence[int]) -> Sequence[int]:
        """Return the indexes of payloads that may be sent; the others wait for an earlier one with their key."""
        if not self._held:
            return indexes
        for index in indexes:
            if index > self._held.get(self._batch[index].key, index):
                self.refuse(index, WAITS)
        return [index for index in indexes if index not in self._known]

    def collect(self, error: RemoteError | None = None) -> list[Refusal | None]:
        """Return an answer for each payload.

        Args:
            error: Why the others are not known; they may be sent again.

        Raises:
            RemoteError: `error`, if nothing is known.
        """
        if error is not None:
            if not self._known:
                raise error
            for index in self.filter_sendable([index for index in range(len(self._batch)) if index not in self._known]):
                self.refuse(index, Refusal(str(error), error.retryable))
        if not self._refused:
            return [None] * len(self._batch)
        return [self._refused.get(index) for index in range(len(self._batch))]


async def close_within(seconds: float, closing: Awaitable[object]) -> bool:
    """Await the closing of a client for up to `seconds`; return whether it ended in time and without an error."""
    with contextlib.suppress(Exception):  # nothing is lost: what was confirmed stays confirmed
        async with asyncio.timeout(seconds):
            await closing
            return True
    return False


def to_json(data: Any, non_finite: NonFinite = "refuse") -> bytes:
    """Encode a payload's `data`: a pydantic model by its own JSON dump, bytes as they are, the rest as JSON.

    Args:
        data: The data.
        non_finite: What to do with NaN and infinities outside of models: refuse them, or write null or text.

    Raises:
        TypeError: Something in it has no JSON form.
        ValueError: The same, or a number is refused.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    dump = getattr(data, "model_dump_json", None)
    if dump is not None:
        return dump().encode()  # type: ignore[no-any-return]
    text = _encode_json(data)
    # The encoder writes them as null: without one, nothing has to be walked through.
    if non_finite == "null" or _find_null(text) is None or not has_non_finite(data):
        return text
    if non_finite == "refuse":
        raise ValueError(describe_non_finite(data))
    return _encode_json(spell_non_finite(data))


def to_mapping(data: Any) -> Mapping[str, Any]:
    """Return a payload's `data` as names and values: a model by its plain dump, a mapping as it is, bytes as JSON.

    Raises:
        TypeError: It is something else, or a name is not text.
        ValueError: The bytes are not a JSON object.
    """
    dump = getattr(data, "model_dump", None)
    if dump is not None:
        return dump()  # type: ignore[no-any-return]
    if isinstance(data, bytes):
        try:
            data = msgspec.json.decode(data)
        except msgspec.DecodeError as error:
            raise ValueError(f"data given as bytes is not JSON: {error}") from None
    if not isinstance(data, Mapping):
        raise TypeError(f"data must be a model, a dict, or bytes with a JSON object, not {type(data).__name__}")
    for name in data:
        if not isinstance(name, str):
            raise TypeError(f"data has the name {name!r}, which is not text")
    return data


def shorten(text: str, length: int = 200) -> str:
    """Return a text, or its beginning and '...' if it is longer than `length`."""
    return text if len(text) <= length else text[:length] + "..."


def _dump_model(value: Any) -> Any:
    """Let msgspec encode pydantic models inside containers."""
    if not is_model(value):
        raise TypeError(f"data contains a value of type {type(value).__name__}, which JSON cannot represent")
    return msgspec.Raw(value.model_dump_json().encode())


# Twice as fast as `in`.
_find_null = re.compile(b"null").search
_encode_json = msgspec.json.Encoder(enc_hook=_dump_model).encode
