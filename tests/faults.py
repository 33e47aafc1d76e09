"""Faults for tests: a TCP proxy that is down, slow, silent or resets connections, and a small server to put behind it.

Both run on a thread of their own, on 127.0.0.1, so that tests with and without an event loop can use them.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from tidemill.core.errors import RemoteError
from tidemill.sinks.base import Encoded, Refusal, Sink, to_json


class _OwnLoop:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def _do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(60)
        self._loop.close()

    async def _end(self) -> None:
        raise NotImplementedError


class FaultyProxy(_OwnLoop):
    """Passes connections on to `target_port` until it is told otherwise; existing ones are concerned too.

    Attributes:
        port: Where it listens; it keeps it while it is down.
        accepted: Connections so far.
    """

    def __init__(self, target_port: int, port: int = 0) -> None:
        super().__init__()
        self.target_port = target_port
        self.accepted = 0
        self._delay = 0.0
        self._resetting = False
        self._flowing = asyncio.Event()
        self._flowing.set()
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self.port = port
        self.up()

    # -- faults ------------------------------------------------------------------------------------------------

    def up(self) -> None:
        """Pass everything on, at once."""
        self._do(self._up())

    def down(self) -> None:
        """Refuse connections, and end those there are."""
        self._do(self._down())

    def slow(self, seconds: float) -> None:
        """Let each answer wait so long."""
        self._delay = seconds

    def reset(self) -> None:
        """Reset every connection, those to come included, as soon as something is sent over it."""
        self._resetting = True
        self._do(self._abort())

    def hang(self) -> None:
        """Take everything and pass nothing on; connections stay."""
        self._do(self._set_flowing(False))

    async def _up(self) -> None:
        self._delay, self._resetting = 0.0, False
        self._flowing.set()
        if self._server is None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]

    async def _down(self) -> None:
        if self._server is not None:
            server, self._server = self._server, None
            # asyncio forgets a connection that it accepted just before the close: its client would wait for ever.
            await asyncio.sleep(0.02)
            server.close()
        await self._abort()

    async def _set_flowing(self, flowing: bool) -> None:
        (self._flowing.set if flowing else self._flowing.clear)()

    async def _abort(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _end(self) -> None:
        await self._down()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- passing on --------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        self.accepted += 1
        there: asyncio.StreamWriter | None = None
        try:
            if self._server is None:
                raise ConnectionResetError  # it was accepted just before the fault
            from_there, there = await asyncio.open_connection("127.0.0.1", self.target_port)
            self._open.add(there)
            await asyncio.gather(self._pass(reader, there, 0.0), self._pass(from_there, writer, None))
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy is
        finally:
            for each in (writer, there):
                if each is not None:
                    self._open.discard(each)
                    _reset(each)
            self._tasks.discard(task)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float | None) -> None:
        while data := await reader.read(65536):
            if self._resetting:
                raise ConnectionResetError
            await self._flowing.wait()
            seconds = self._delay if delay is None else delay
            if seconds:
                await asyncio.sleep(seconds)
            writer.write(data)
            await writer.drain()
        raise ConnectionResetError


def _reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, AttributeError):
        sock = writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


class LineServer(_OwnLoop):
    """Takes `key TAB body` lines and answers each with a line: `ok`, or what `judge` says of it.

    Attributes:
        lines: (key, body) of what was taken, in order.
    """

    def __init__(self, judge: Callable[[str, str], str] = lambda key, body: "ok") -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []
        self.judge = judge
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def bodies(self, key: str | None = None) -> list[str]:
        return [body for each, body in self.lines if key in (None, each)]

    def counts(self) -> Counter[str]:
        return Counter(self.bodies())

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while line := await reader.readline():
                key, _, body = line.decode().rstrip("\n").partition("\t")
                answer = self.judge(key, body)
                if answer == "ok":
                    self.lines.append((key, body))
                writer.write(answer.encode() + b"\n")
                await writer.drain()
        except OSError:
            pass  # the client is gone
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)


class LineSink(Sink):
    """A sink over one connection to a `LineServer`, standing in for any sink with a server behind it.

    Takes whatever has `key` or `path`, and `data`.
    """

    type = "filesystem"
    max_batch_count = 50

    def __init__(self, name: str, port: int, kind: str = "filesystem") -> None:
        super().__init__(name)
        self.type = kind  # type: ignore[misc]
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.sent = 0

    async def connect(self) -> None:
        self._streams = await asyncio.open_connection("127.0.0.1", self._port)

    def encode(self, payload: Any) -> Encoded:
        key = str(getattr(payload, "key", None) or getattr(payload, "path", ""))
        body = to_json(payload.data)
        return Encoded(key or None, f"{key}\t{body.decode()}\n".encode(), len(body))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        try:
            if self._streams is None:
                await self.connect()
            assert self._streams is not None
            reader, writer = self._streams
            self.sent += len(batch)
            writer.writelines(item.body for item in batch)
            await writer.drain()
            answers = []
            for _ in batch:
                line = (await reader.readline()).decode()
                if not line:
                    raise ConnectionResetError("the connection was closed")
                answers.append(_refusal(line.strip()))
        except BaseException as error:
            await self.close()
            if isinstance(error, OSError):
                raise RemoteError(f"line server: {error}") from error
            raise
        return answers

    async def close(self) -> None:
        if self._streams is not None:
            self._streams[1].transport.abort()
            self._streams = None


def _refusal(answer: str) -> Refusal | None:
    return None if answer == "ok" else Refusal(answer, retryable=answer.startswith("again"))
