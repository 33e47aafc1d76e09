"""Control sockets: processes of this user on this machine each answer requests over a Unix socket.

The name of a socket begins with a prefix that names the kind of process and contains a digest of the object it works
on, so that all processes that work on the same object can be found. The folder is private to the user
(`runtime.files.lock.private_directory`).

A client may send one JSON document, ends its side of the connection, and receives one JSON document. Invariants: only
the socket's own user can connect (mode 0600 from the start). A visible socket has a listening process, unless that
process was killed; the next process that looks for its prefix then removes it. A silent client holds up no other.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import os
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from tidemill.core.errors import ConfigError, describe_error
from tidemill.runtime.files.lock import list_private_directories, private_directory, refuse_foreign

log = structlog.get_logger(__name__)

#: How long either side waits for the other.
ANSWER_SECONDS = 10.0
#: The maximum size of a client's request.
_MAX_REQUEST_BYTES = 64 * 1024
#: The kernel accepts a path of about a hundred bytes.
_MAX_PATH_BYTES = 100

Document = dict[str, Any]
Answer = Callable[[Document], Document | Awaitable[Document]]


def prefix_of(kind: str, what: bytes) -> str:
    """Return the prefix of the sockets of processes that work on the same object.

    Example:
        >>> prefix_of("triggers", b"/srv/list.yaml")
        'triggers.659a1a99a214194e.'
    """
    # A digest, because a socket's path may not be long.
    return f"{kind}.{hashlib.blake2b(what, digest_size=8).hexdigest()}."


class ControlSocket:
    """Answers each client that connects.

    Args:
        prefix: See `prefix_of`.
        answer: Called on the loop with the client's document ({} if it sent none); returns the answer or an awaitable
            of it, and must not block.
    """

    def __init__(self, prefix: str, answer: Answer) -> None:
        self._prefix = prefix
        self._answer = answer
        self._path: Path | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen, on the running loop.

        Raises:
            ConfigError: The folder for sockets cannot be used.
        """
        folder = _folder(self._prefix)
        listener = socket.socket(socket.AF_UNIX)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(folder)
            await asyncio.to_thread(_remove_dead, self._prefix)
            path = folder / f"{self._prefix}{secrets.token_hex(4)}.sock"
            # The socket gets its final name once it listens; until then it would look like one of a dead process.
            hidden = path.with_suffix(".new")
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(os.fspath(hidden))
            self._server = await asyncio.start_unix_server(self._serve, sock=listener)
            hidden.rename(path)
        except OSError as error:
            listener.close()
            raise ConfigError(
                f"cannot use {folder}: {error.strerror}; set XDG_RUNTIME_DIR to a folder that this user can write to"
            ) from error
        self._path = path

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                asked = await reader.read(_MAX_REQUEST_BYTES)
                request = json.loads(asked) if asked else {}
                said = await self._find_answer(request if isinstance(request, dict) else {})
                writer.write(json.dumps(said, default=str).encode())
                await writer.drain()
        except ConnectionError:
            pass  # the client has disconnected, or only checked for a listening process
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("a client of the control socket got no answer", error=str(error) or type(error).__name__)
        finally:
            writer.close()

    async def _find_answer(self, request: Document) -> Document:
        try:
            said = self._answer(request)
            return await said if inspect.isawaitable(said) else said
        except Exception as error:
            log.exception("a request to the control socket failed", request=request.get("do"))
            return {"error": f"it failed: {describe_error(error)}"}


class ControlThread:
    """Runs a control socket on an event loop in a thread of its own, so that clients hold up nothing else in the
    process.

    Args:
        control: The socket.

    Attributes:
        loop: The loop on which requests are answered.
    """

    def __init__(self, control: ControlSocket) -> None:
        self.loop = asyncio.new_event_loop()
        self._control = control
        self._thread = threading.Thread(target=self.loop.run_forever, name="tidemill-control", daemon=True)

    def __enter__(self) -> Self:
        """Listen.

        Raises:
            ConfigError: The folder for sockets cannot be used.
        """
        self._thread.start()
        try:
            asyncio.run_coroutine_threadsafe(self._control.start(), self.loop).result()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop listening; waiting clients get no answer."""
        asyncio.run_coroutine_threadsafe(self._close(), self.loop).result()
        self._end()

    async def _close(self) -> None:
        await self._control.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _end(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@dataclass(frozen=True, slots=True)
class ProcessAnswers:
    """The answers of the processes of a prefix.

    Attributes:
        reports: The answers.
        silent: How many processes did not answer in time.
    """

    reports: list[Document]
    silent: int


def ask(prefix: str, request: Document | None = None, seconds: float = ANSWER_SECONDS) -> ProcessAnswers:
    """Send a request to all processes of a prefix on this machine, and return their answers; blocks.

    Args:
        prefix: The prefix of their sockets; see `prefix_of`. A kind and a dot mean all processes of that kind.
        request: The document to send.
        seconds: How long to wait for an answer.
    """
    paths = _sockets(prefix)
    if not paths:
        return ProcessAnswers([], 0)
    with ThreadPoolExecutor(min(len(paths), 16)) as pool:
        answers = list(pool.map(lambda path: _ask(path, request, seconds), paths))
    reports = [answer for answer in answers if isinstance(answer, dict)]
    return ProcessAnswers(reports, sum(isinstance(answer, TimeoutError) for answer in answers))


def _ask(path: Path, request: Document | None, seconds: float) -> Document | Exception | None:
    """Return an answer; None or the error if there is none. The socket of a dead process is removed."""
    parts = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(seconds)
            connection.connect(str(path))
            if request is not None:
                connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                parts.append(part)
        report = json.loads(b"".join(parts))
    except ConnectionRefusedError as error:
        path.unlink(missing_ok=True)
        return error
    except (OSError, ValueError) as error:
        return error  # the process has just exited, or is silent
    return report if isinstance(report, dict) else None


def _remove_dead(prefix: str) -> None:
    """Remove the sockets of processes that were killed."""
    for path in _sockets(prefix):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def _sockets(prefix: str) -> list[Path]:
    """Return the sockets of a prefix, including sockets of processes that were started in another environment."""
    found: list[Path] = []
    for folder in dict.fromkeys((_folder(prefix), *list_private_directories())):
        with contextlib.suppress(OSError):  # the folder is missing, or another user's
            refuse_foreign(folder)
            found += sorted(folder.glob(f"{prefix}*.sock"))
    return found


def _folder(prefix: str) -> Path:
    """Return the folder in which processes of a prefix listen; all of a kind listen in one folder."""
    folder = private_directory()
    longest = f"{prefix_of(prefix.partition('.')[0], b'')}12345678.sock"
    return folder if len(os.fsencode(folder / longest)) < _MAX_PATH_BYTES else private_directory({})
