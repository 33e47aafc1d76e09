"""The interface of every sink: encode a payload, send a batch, and return one answer per payload.

A sink never retries and never batches; `pipeline/delivery` does both in the same way for all sinks. A sink knows its
protocol and which errors are worth a retry. It knows nothing about messages or offsets.
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
from tidemill.core.wording import shorten
from tidemill.sinks.non_finite import NonFinite, describe_non_finite, has_non_finite, is_model, spell_non_finite

#: The advice for a target that does not answer; the name of the setting follows.
CHECK = "check that it is running and reachable, or correct"


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A payload in the form that `send` expects.

    Attributes:
        key: Orders deliveries: while one payload is retried, later ones with the same key wait.
        body: The content in the sink's own form (bytes, or a tuple that the sink unpacks).
        size_bytes: How much the payload adds to the size of a batch.
    """

    key: Any
    body: Any
    size_bytes: int


class Refusal(msgspec.Struct, frozen=True):
    """Why one payload was not delivered.

    Attributes:
        error: The reason, for people to read.
        retryable: Whether the target may accept the same payload later.
        oversize: Whether the payload is larger than the target ever accepts.
        waits: Whether the payload was held back because an earlier payload of the batch was refused; such a payload
            does not count as refused (`WAITS`).
    """

    error: str
    retryable: bool
    oversize: bool = False
    waits: bool = False


#: The answer for a payload that was held back because it must not overtake an earlier one.
WAITS = Refusal("waits for an earlier payload, which was refused", retryable=True, waits=True)


class Sink(ABC):
    """One configured instance of a sink.

    Args:
        name: The instance's name in the configuration.
    """

    type: ClassVar[str]
    #: For sinks of other packages: the pydantic model that validates the options. None passes the options as a dict.
    options_model: ClassVar[Any] = None

    #: A batch is sent once it has this many payloads or bytes.
    max_batch_count: int = 500
    max_batch_bytes: int = 1024 * 1024
    #: How long a batch may wait for more payloads while nothing else is in flight.
    linger_seconds: float = 0.0
    #: How long `send` may take before it is cancelled and counts as failed; None means `delivery.timeout_seconds`.
    send_timeout_seconds: float | None = None

    #: Whether payloads have an `idempotency_key`. A payload without one gets one before it is encoded; it is the same
    #: key when the messages are reprocessed.
    takes_idempotency_key: ClassVar[bool] = False
    #: How JSON represents NaN and infinities: `delivery.non_finite`.
    non_finite: NonFinite = "refuse"

    def __init__(self, name: str) -> None:
        self.name = name

    @property
    def section(self) -> str:
        """The section that configures this sink, for messages."""
        return f"{name_sink_section(self.type)}.{self.name}"

    def to_json(self, data: Any) -> bytes:
        """Encode a payload's `data` as JSON with the configured `non_finite`; see the function `to_json`."""
        return to_json(data, self.non_finite)

    @abstractmethod
    async def connect(self) -> None:
        """Open connections and check that the target is usable.

        Raises:
            ConfigError: The configuration is invalid; retrying does not help.
            RemoteError: The target is unreachable or refuses the connection.
        """

    @abstractmethod
    def encode(self, payload: Any) -> Encoded:
        """Return the payload as `send` expects it; an exception concerns this payload alone."""

    @abstractmethod
    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Deliver a batch; return one answer per payload, in order. None confirms the payload.

        Raises:
            RemoteError: The sink failed, and no payload of the batch is known to be delivered; `retryable` says whether
                to send the batch again.
            Exception: One of the payloads may be at fault; the caller sends smaller batches to find it.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release all resources; confirmed payloads stay confirmed."""


class SinksByName(dict[str, Sink]):
    """The sinks of an engine by type and name, as in the configuration: `postgres.main` for `sinks.postgres.main`.

    Raises:
        SinkNotConfiguredError: `sinks[name]` names a sink that is not configured; `sinks.get(name)` returns None.
    """

    def __missing__(self, name: str) -> Sink:
        known = ", ".join(sorted(self)) or "none"
        raise SinkNotConfiguredError(f"sinks.{name} is not configured; add it, or use one of: {known}")


def encode_checked(sink: Sink, payload: Any) -> Encoded:
    """Encode a payload and check the result, because a sink of another package may return anything.

    Raises:
        Exception: The error concerns this payload alone.
    """
    result: Any = sink.encode(payload)
    check_encoded(sink, result)
    return cast(Encoded, result)


def check_encoded(sink: Sink, result: Any) -> None:
    """Check the result of a sink's `encode`.

    Raises:
        TypeError: The result cannot be queued.
    """
    if not isinstance(result, Encoded) or not isinstance(result.size_bytes, int):
        raise TypeError(
            f"{sink.section}: encode must return an Encoded with a size in bytes, not {shorten(repr(result))}"
        )
    try:
        hash(result.key)
    except TypeError:
        raise TypeError(
            f"{sink.section}: the key {shorten(repr(result.key))} is not hashable; use text or a tuple"
        ) from None


class Answers:
    """The answers to one batch that is sent in parts. Each payload is confirmed, refused, or not known yet.

    Once a payload is refused, later payloads with its key are held back: if a hook decides to retry the refused one, it
    must come first.

    Args:
        batch: The payloads to send.
    """

    def __init__(self, batch: Sequence[Encoded]) -> None:
        self._batch = batch
        self._known: set[int] = set()
        self._refused: dict[int, Refusal] = {}
        # By key, the index of the first refused payload.
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
        """Return the indexes that may be sent; the other payloads wait for an earlier one with their key."""
        if not self._held:
            return indexes
        for index in indexes:
            if index > self._held.get(self._batch[index].key, index):
                self.refuse(index, WAITS)
        return [index for index in indexes if index not in self._known]

    def collect(self, error: RemoteError | None = None) -> list[Refusal | None]:
        """Return an answer for each payload.

        Args:
            error: The reason why the remaining payloads have no answer; it decides whether they are sent again.

        Raises:
            RemoteError: `error`, if no payload has an answer.
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
    with contextlib.suppress(Exception):  # confirmed payloads stay confirmed, so an error loses nothing
        async with asyncio.timeout(seconds):
            await closing
            return True
    return False


def to_json(data: Any, non_finite: NonFinite = "refuse") -> bytes:
    """Encode a payload's `data`: a pydantic model by its own JSON dump, bytes unchanged, everything else as JSON.

    Args:
        data: The data.
        non_finite: What to do with NaN and infinities outside models: refuse them, or write null or text.

    Raises:
        TypeError: A value in it has no JSON form.
        ValueError: A value in it has no JSON form, or a number is refused.
    """
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    dump = getattr(data, "model_dump_json", None)
    if dump is not None:
        return dump().encode()  # type: ignore[no-any-return]
    text = _encode_json(data)
    # The encoder writes NaN and infinities as null, so a text without null needs no walk through the data.
    if non_finite == "null" or _find_null(text) is None or not has_non_finite(data):
        return text
    if non_finite == "refuse":
        raise ValueError(describe_non_finite(data))
    return _encode_json(spell_non_finite(data))


def to_mapping(data: Any) -> Mapping[str, Any]:
    """Return a payload's `data` as names and values: a model by its plain dump, a mapping unchanged, bytes as JSON.

    Raises:
        TypeError: The data is of another type, or a name is not text.
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


def _dump_model(value: Any) -> Any:
    """Encode pydantic models inside containers, for msgspec."""
    if not is_model(value):
        raise TypeError(f"data contains a value of type {type(value).__name__}, which JSON cannot represent")
    return msgspec.Raw(value.model_dump_json().encode())


# Twice as fast as `in`.
_find_null = re.compile(b"null").search
_encode_json = msgspec.json.Encoder(enc_hook=_dump_model).encode
