"""Answers the calls of other processes over a Unix socket, in the process that has the store open.

Invariants: only this user can connect. Calls of one connection are answered in any order. A lost connection loses only
its answers. `close` takes bounded time, whatever the clients and the store do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import structlog

from tidemill.core.tasks.inputs import Channel
from tidemill.store.calls.call import Call
from tidemill.store.database import StoreClient
from tidemill.store.doorbell import BellBatches
from tidemill.store.wire.frames import (
    CallHello,
    Rung,
    build_refused,
    decode_call,
    encode_answer,
    encode_server_frame,
    find_protocol,
    read_frame,
)

log = structlog.get_logger(__name__)

#: A client with more unread bytes than this is disconnected.
_UNREAD_BYTES = 512 * 1024 * 1024
#: How long the server waits for outstanding calls when it closes.
CLOSE_SECONDS = 10.0
#: How long a client has to read its last answers.
_FLUSH_SECONDS = 1.0


class CallServer:
    """Answers calls over a socket.

    Args:
        store: Answers the calls.
        path: The socket's path, at most 100 bytes; its folder must exist.

    Example:
        >>> async def serve(database, path):
        ...     server = CallServer(database, path)
        ...     await server.start()
        ...     await server.close()
    """

    def __init__(self, store: StoreClient, path: Path) -> None:
        self.path = path
        self._store = store
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._bells = BellBatches(self._ring)
        self._closing = False

    async def start(self) -> None:
        """Start to listen, also after `close`; replaces a socket file that a killed process left behind."""
        self._closing = False
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, self.path)
        finally:
            os.umask(before)
        self._store.doorbell.listen(self._bells.add)

    async def close(self) -> None:
        """Answer outstanding calls within CLOSE_SECONDS, then close all connections."""
        server, self._server = self._server, None
        if server is None:
            return
        self._store.doorbell.ignore(self._bells.add)
        self._bells.close()
        self._closing = True
        server.close()
        if self._tasks:
            _, unanswered = await asyncio.wait(set(self._tasks), timeout=CLOSE_SECONDS)
            if unanswered:
                log.warning("the store did not answer all calls before it closed", calls=len(unanswered))
            for task in unanswered:
                task.cancel()
        for writer in list(self._writers):
            writer.close()
            if writer.transport.get_write_buffer_size():
                # Unread answers would keep the connection open.
                with contextlib.suppress(TimeoutError, ConnectionError):
                    await asyncio.wait_for(writer.wait_closed(), _FLUSH_SECONDS)
                writer.transport.abort()
        await server.wait_closed()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            writer.write(encode_server_frame(CallHello(find_protocol())))
            # Bells that rang before this connection need no replay: a client polls for work after it connects.
            while True:
                number, call = decode_call(await read_frame(reader))
                if self._closing:
                    return
                task = asyncio.get_running_loop().create_task(self._answer(writer, number, call))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client has disconnected
        except Exception as error:
            log.warning("closed a connection to the store's socket: received an invalid call", error=str(error))
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, number: int, call: Call[Any]) -> None:
        try:
            frame = encode_answer(number, await self._store.call(call))
        except Exception as error:
            frame = encode_server_frame(build_refused(number, error))
        self._send(writer, frame)

    def _send(self, writer: asyncio.StreamWriter, frame: bytes) -> None:
        if writer.is_closing():
            return
        if writer.transport.get_write_buffer_size() > _UNREAD_BYTES:
            log.warning("disconnected a client of the store's socket that does not read its answers")
            writer.transport.abort()
            return
        writer.write(frame)

    def _ring(self, channels: set[Channel]) -> None:
        frame = encode_server_frame(Rung(tuple(sorted(channels))))
        for writer in self._writers:
            self._send(writer, frame)
