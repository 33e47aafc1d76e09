"""The frames between the process that has a store open and its clients, over a Unix socket.

A frame (`runtime.framing`) holds MessagePack. The server starts with a `CallHello`. The client then sends
numbered calls; the server answers them in any order and relays bells.
"""

from __future__ import annotations

import asyncio
import functools
import operator
from functools import cache
from typing import Any

import msgspec

from tidemill.core.errors import ConfigError, InvariantError, RemoteError
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.framing import FrameTooLargeError, add_length, read_body
from tidemill.store.calls.call import Call, CallRefusedError, RefusalKind, find_answer_type
from tidemill.store.calls.dispatch import list_kinds
from tidemill.store.calls.worker_calls import decode_ending
from tidemill.store.database import StoreAwayError

#: The maximum frame size; a worker turn with XComs and logs stays far below it.
MAX_FRAME_BYTES = 256 * 1024 * 1024


class CallHello(msgspec.Struct, frozen=True, tag=True):
    """The server's first frame; its protocol must equal the client's `find_protocol`."""

    protocol: str


class CallAnswered(msgspec.Struct, frozen=True, tag=True):
    """The encoded answer to a call."""

    id: int
    answer: msgspec.Raw


class CallRefused(msgspec.Struct, frozen=True, tag=True):
    """A call that was refused or failed; see `CallRefusedError`, `RemoteError`, `ConfigError` and `InvariantError`."""

    id: int
    error: str
    text: str
    kind: str = ""


class Rung(msgspec.Struct, frozen=True, tag=True):
    """Bells have rung."""

    channels: tuple[Channel, ...]


ServerFrame = CallHello | CallAnswered | CallRefused | Rung


class Asked(msgspec.Struct, frozen=True):
    """A call with its number."""

    id: int
    call: Any


@cache
def find_protocol() -> str:
    """Return a digest of the names and fields of all calls; processes with equal digests understand each other."""
    import hashlib

    shapes = [f"{kind.__name__}({', '.join(kind.__struct_fields__)})" for kind in list_kinds()]
    return hashlib.sha256("\n".join(shapes).encode()).hexdigest()[:16]


@cache
def _build_asked_decoder() -> msgspec.msgpack.Decoder[Any]:
    union = functools.reduce(operator.or_, list_kinds())
    frame = msgspec.defstruct("AskedCall", [("id", int), ("call", union)], frozen=True)
    return msgspec.msgpack.Decoder(frame, dec_hook=decode_ending)


_encode = msgspec.msgpack.Encoder().encode
_decode_server: msgspec.msgpack.Decoder[ServerFrame] = msgspec.msgpack.Decoder(ServerFrame)


def encode_call(number: int, call: Call[Any]) -> bytes:
    return _frame(_encode(Asked(number, call)))


def decode_call(body: bytes) -> tuple[int, Call[Any]]:
    asked = _build_asked_decoder().decode(body)
    return asked.id, asked.call


def encode_server_frame(frame: ServerFrame) -> bytes:
    return _frame(_encode(frame))


def decode_server_frame(body: bytes) -> ServerFrame:
    return _decode_server.decode(body)


def encode_answer(number: int, answer: Any) -> bytes:
    return encode_server_frame(CallAnswered(number, msgspec.Raw(_encode(answer))))


@cache
def _build_answer_decoder(kind: type[Call[Any]]) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(find_answer_type(kind))


def decode_answer(kind: type[Call[Any]], answer: msgspec.Raw) -> Any:
    return _build_answer_decoder(kind).decode(answer)


def build_refused(number: int, error: Exception) -> CallRefused:
    """Return the frame that carries an error."""
    match error:
        case CallRefusedError():
            return CallRefused(number, "refused", str(error), error.kind.value)
        case StoreAwayError():
            return CallRefused(number, "away", str(error))
        case RemoteError():
            return CallRefused(number, "remote" if error.retryable else "content", str(error))
        case ConfigError():
            return CallRefused(number, "config", str(error))
    return CallRefused(number, "bug", str(error))


def build_error(frame: CallRefused) -> Exception:
    """Return the error that a frame carries."""
    match frame.error:
        case "refused":
            return CallRefusedError(RefusalKind(frame.kind), frame.text)
        case "remote" | "content":
            return RemoteError(frame.text, retryable=frame.error == "remote")
        case "away":
            return StoreAwayError(frame.text)
        case "config":
            return ConfigError(frame.text)
    return InvariantError(frame.text)


def _frame(body: bytes) -> bytes:
    if len(body) > MAX_FRAME_BYTES:
        raise RemoteError(f"a call of {len(body)} bytes is too large for the store's socket", retryable=False)
    return add_length(body)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Read the next frame.

    Raises:
        asyncio.IncompleteReadError: The peer closed the connection.
        ConnectionError: The connection was lost, or the peer does not speak this protocol.
    """
    try:
        return await read_body(reader, MAX_FRAME_BYTES)
    except FrameTooLargeError as error:
        raise ConnectionError(f"received an invalid frame from the store's socket: {error}") from None
