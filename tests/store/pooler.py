"""A pooler in front of a PostgreSQL server, as strict as PgBouncer in transaction mode.

It refuses the start parameters that PgBouncer refuses, tells a process number of its own, and clears the server's
session after each transaction: what was kept in it is gone, as if the next one had another session.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator

ALLOWED = {"user", "database", "application_name", "client_encoding", "datestyle", "timezone"}
_SSL_REQUEST = 80877103
_CANCEL_REQUEST = 80877102


@contextlib.asynccontextmanager
async def pooler(socket_path: str) -> AsyncIterator[int]:
    """Listen in front of a server with a Unix socket; yield the port."""
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
                await _serve(socket_path, reader, writer)
        finally:
            tasks.discard(task)
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _serve(socket_path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    start, code = await _start(reader)
    while code == _SSL_REQUEST:
        writer.write(b"N")
        start, code = await _start(reader)
    if code == _CANCEL_REQUEST:
        return
    words = start[8:].split(b"\0")
    names = {name.decode() for name in words[:-2:2]}
    if names - ALLOWED:
        text = f"unsupported startup parameter: {sorted(names - ALLOWED)[0]}".encode()
        writer.write(_message(b"E", b"SFATAL\0VFATAL\0C08P01\0M" + text + b"\0\0"))
        await writer.drain()
        return
    upstream, server = await asyncio.open_unix_connection(socket_path)
    try:
        server.write(start)
        answers = asyncio.ensure_future(_answers(upstream, server, writer))
        try:
            while True:
                kind, body = await _read(reader)
                server.write(_message(kind, body))
                if kind == b"X":
                    return
        finally:
            answers.cancel()
    finally:
        server.close()


async def _start(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    size, code = struct.unpack("!II", await reader.readexactly(8))
    return struct.pack("!II", size, code) + await reader.readexactly(size - 8), code


async def _read(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    kind = await reader.readexactly(1)
    [size] = struct.unpack("!I", await reader.readexactly(4))
    return kind, await reader.readexactly(size - 4)


def _message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!I", len(body) + 4) + body


async def _answers(upstream: asyncio.StreamReader, server: asyncio.StreamWriter, writer: asyncio.StreamWriter) -> None:
    """Pass on the server's answers; after a transaction, reset the session before the client learns of its end."""
    while True:
        kind, body = await _read(upstream)
        if kind == b"K":
            body = struct.pack("!II", 1, 1)
        if (kind, body) == (b"Z", b"I"):
            server.write(_message(b"Q", b"DISCARD ALL\0"))
            while (await _read(upstream))[0] != b"Z":
                pass
        writer.write(_message(kind, body))
