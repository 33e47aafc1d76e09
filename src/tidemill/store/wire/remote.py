"""A client of a store that another process has open: sends calls over its Unix socket.

Invariants: any number of calls may be outstanding. If the connection is lost, all of them fail with a retryable error,
and the next call reconnects. All bells ring once after each new connection.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import structlog

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.setup import throttle
from tidemill.store.calls.call import Call
from tidemill.store.database import StoreAwayError, StoreCalls
from tidemill.store.doorbell import Doorbell
from tidemill.store.wire.frames import (
    CallAnswered,
    CallHello,
    CallRefused,
    Rung,
    build_error,
    decode_answer,
    decode_server_frame,
    encode_call,
    find_protocol,
    read_frame,
)

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: How long a call tries to connect.
CONNECT_SECONDS = 5.0
_AGAIN_SECONDS = 0.05
#: The maximum delay between attempts of a repeated call.
MAX_PAUSE_SECONDS = 2.0


class ConnectionLostError(RemoteError):
    """The connection was lost before a call was answered; the call may or may not have been executed."""


class RemoteStore:
    """Sends calls to a store over a socket; connects with the first call.

    Args:
        path: The socket's path.
        label: The name of the store in messages.
        connect_seconds: How long a call tries to connect.

    Example:
        >>> async def list_sessions(path):
        ...     store = RemoteStore(path)
        ...     return await store.call(ListSessions())
    """

    def __init__(self, path: Path, label: str = "", connect_seconds: float = CONNECT_SECONDS) -> None:
        self._path = path
        self._label = label or str(path)
        self._connect_seconds = connect_seconds
        self._doorbell = Doorbell()
        self._waiting: dict[int, tuple[type[Call[Any]], asyncio.Future[Any]]] = {}
        self._number = 0
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._connecting: asyncio.Lock = asyncio.Lock()
        self._closed = False

    @property
    def label(self) -> str:
        """The store's name in messages."""
        return self._label

    @property
    def doorbell(self) -> Doorbell:
        """The bells relayed by the other process."""
        return self._doorbell

    async def call(self, request: Call[T]) -> T:
        """Answer a named call; see `Database.call`."""
        writer = await self._connect()
        self._number += 1
        number = self._number
        frame = encode_call(number, request)
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (type(request), future)
        try:
            writer.write(frame)
            await writer.drain()
        except OSError as error:
            if not future.done():
                future.set_exception(self._build_lost(error))
        try:
            return await future
        finally:
            self._waiting.pop(number, None)

    async def connect(self) -> None:
        """Connect now, so that bells arrive and a wrong address is reported early.

        Raises:
            RemoteError: No process answers at the socket.
            ConfigError: The process runs another version of tidemill.
        """
        await self._connect()

    async def close(self) -> None:
        """Close the connection; outstanding calls fail."""
        self._closed = True
        reading, self._reading = self._reading, None
        if self._writer is not None:
            self._writer.close()
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    async def _connect(self) -> asyncio.StreamWriter:
        if self._writer is not None and not self._writer.is_closing():
            return self._writer
        async with self._connecting:
            if self._closed:
                raise RemoteError(f"the connection to the store {self._label} has been closed", retryable=False)
            if self._writer is None or self._writer.is_closing():
                await self._open()
            assert self._writer is not None
            return self._writer

    async def _open(self) -> None:
        deadline = asyncio.get_running_loop().time() + self._connect_seconds
        while True:
            try:
                reader, writer, hello = await _greet(self._path, deadline)
                break
            except (OSError, asyncio.IncompleteReadError) as error:
                if asyncio.get_running_loop().time() >= deadline:
                    why = str(error) or "it accepts connections but sends nothing; it may be suspended"
                    raise RemoteError(
                        f"the process that has the store {self._label} open does not answer at {self._path}: {why}"
                    ) from error
            await asyncio.sleep(_AGAIN_SECONDS)
        if not isinstance(hello, CallHello) or hello.protocol != find_protocol():
            writer.close()
            raise ConfigError(
                f"the process that has the store {self._label} open runs another version of tidemill; restart it"
            )
        self._writer = writer
        self._reading = asyncio.get_running_loop().create_task(self._read(reader, writer), name="answers of the store")
        self._doorbell.ring(Channel)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        lost: Exception = ConnectionError("the other process closed it")
        try:
            while True:
                self._take(await read_frame(reader))
        except (OSError, asyncio.IncompleteReadError) as error:
            lost = error
        finally:
            writer.close()
            if self._writer is writer:
                self._writer = None
            failure = self._build_lost(lost)
            for _, future in list(self._waiting.values()):
                if not future.done():
                    future.set_exception(failure)
            # Wake services that wait for a bell: they poll for work and thereby reconnect.
            self._doorbell.ring(Channel)

    def _take(self, body: bytes) -> None:
        frame = decode_server_frame(body)
        match frame:
            case Rung(channels=channels):
                self._doorbell.ring(channels)
            case CallAnswered(id=number, answer=answer):
                kind, future = self._waiting.get(number, (None, None))
                if kind is not None and future is not None and not future.done():
                    self._settle(kind, future, answer)
            case CallRefused(id=number):
                _, future = self._waiting.get(number, (None, None))
                if future is not None and not future.done():
                    future.set_exception(build_error(frame))
            case CallHello():
                pass

    def _settle(self, kind: type[Call[Any]], future: asyncio.Future[Any], answer: msgspec.Raw) -> None:
        try:
            found = decode_answer(kind, answer)
        except msgspec.MsgspecError as error:
            # An unreadable answer fails only its own call, not the others of this connection.
            text = f"cannot decode the answer to {kind.__name__} from the process that has the store {self._label} open"
            future.set_exception(RemoteError(f"{text}: {error}", retryable=False))
        else:
            future.set_result(found)

    def _build_lost(self, error: BaseException) -> ConnectionLostError:
        return ConnectionLostError(f"the connection to the store {self._label} was lost: {error}")


async def _greet(path: Path, deadline: float) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, object]:
    """Connect and read the server's first frame.

    Raises:
        OSError: The server is unreachable, or sent nothing in time (TimeoutError).
    """
    # Even after the deadline, leave enough time for a running server to answer.
    async with asyncio.timeout_at(max(deadline, asyncio.get_running_loop().time() + _AGAIN_SECONDS)):
        reader, writer = await asyncio.open_unix_connection(path)
        try:
            return reader, writer, decode_server_frame(await read_frame(reader))
        except BaseException:
            writer.close()
            raise


async def call_patiently(store: StoreCalls, request: Call[T], pause_seconds: float = 0.1) -> T:
    """Send a repeatable call and return its answer; wait as long as an outage takes.

    Args:
        store: Answers the call.
        request: An idempotent call: one with a request number, or one that changes nothing when repeated.
        pause_seconds: The maximum delay after the first attempt; it grows up to MAX_PAUSE_SECONDS.

    Raises:
        CallRefusedError: The call was refused.
        RemoteError: The database rejects the content.
    """
    backoff, attempt = Backoff(pause_seconds, MAX_PAUSE_SECONDS), 0
    while True:
        attempt += 1
        try:
            return await store.call(request)
        except RemoteError as error:
            if not error.retryable:
                raise
            if not isinstance(error, StoreAwayError):
                throttle(log, 10.0).warning("the store cannot be reached; retrying", error=str(error))
        await asyncio.sleep(backoff.compute_delay(attempt, random.getrandbits(JITTER_BITS)))
