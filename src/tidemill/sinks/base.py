"""The shape of every sink: encode a payload, send a batch, answer for each payload on its own.

A sink never retries and never batches: `pipeline/delivery.py` does both, the same way for all of them. A sink
knows its protocol, which of its errors are worth another try, and nothing about messages or offsets.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec


class Encoded(msgspec.Struct, frozen=True, gc=False):
    """A payload made ready for the wire.

    Attributes:
        key: Orders deliveries: while one is tried again, later ones of the same key wait.
        body: What is sent, in the sink's own form (bytes, or a tuple that the sink unpacks).
        size_bytes: What it counts for in a batch.
    """

    key: Any
    body: Any
    size_bytes: int


class Refusal(msgspec.Struct, frozen=True):
    """Why one payload was not delivered.

    Attributes:
        error: What happened, in words.
        retryable: Whether the same payload may be taken later.
        oversize: Whether it is larger than the other side takes at all.
    """

    error: str
    retryable: bool
    oversize: bool = False


class Sink(ABC):
    """One configured instance of a sink.

    Args:
        name: The instance's name in the configuration.
    """

    type: ClassVar[str]

    #: A batch is sent as soon as it has this many payloads or bytes.
    max_batch_count: int = 500
    max_batch_bytes: int = 1024 * 1024
    #: How long a batch may wait for more payloads while nothing else is in flight.
    linger_seconds: float = 0.0
    #: How long `send` may take before it is cancelled and taken for failed; None: `delivery.timeout_seconds`.
    send_timeout_seconds: float | None = None

    def __init__(self, name: str) -> None:
        """Remember the instance's name."""
        self.name = name

    @abstractmethod
    async def connect(self) -> None:
        """Open connections and check that the other side is usable.

        Raises:
            ConfigError: The configuration is wrong (no retry helps).
            RemoteError: The other side is not reachable or refuses.
        """

    @abstractmethod
    def encode(self, payload: Any) -> Encoded:
        """Make a payload ready for the wire; raises what concerns this payload alone."""

    @abstractmethod
    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Deliver a batch; answer one item per payload in the same order, None where it is confirmed.

        Raises:
            Exception: Nothing of the batch is known to be delivered. `RemoteError.retryable` says whether to
                send it again; any other exception is taken as retryable.
        """

    @abstractmethod
    async def close(self) -> None:
        """Release everything; what was confirmed stays so."""


def to_json(data: Any) -> bytes:
    """Encode a payload's `data`: a pydantic model by its own JSON dump, bytes as they are, the rest as JSON."""
    if isinstance(data, bytes):
        return data
    dump = getattr(data, "model_dump_json", None)
    if dump is not None:
        return dump().encode()  # type: ignore[no-any-return]
    return _encode_json(data)


def _dumped(value: Any) -> Any:
    """Let msgspec encode pydantic models inside containers."""
    dump = getattr(value, "model_dump", None)
    if dump is None:
        raise TypeError(f"data has a {type(value).__name__}, which has no JSON form")
    return dump(mode="json")


_encode_json = msgspec.json.Encoder(enc_hook=_dumped).encode
