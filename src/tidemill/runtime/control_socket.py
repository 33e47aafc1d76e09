"""Control sockets: processes of this user on this machine that answer over a Unix socket each.

The names of the sockets begin with a prefix that says what kind of process it is and has a digest of what it works on,
so that all processes that work on it can be found. The folder is private to the user
(`runtime.lock.private_directory`).

A client may send one JSON document, ends its side of the connection, and gets one JSON document. Invariants: only the
socket's own user can connect (mode 0600 from the start); a socket that can be seen is being listened to, unless its
process was killed, and then the next one of its prefix removes it; a silent client holds up no other.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidemill.core.errors import ConfigError
from tidemill.runtime.lock import private_directory, refuse_foreign

log = structlog.get_logger(__name__)

#: How long either side waits for the other.
ANSWER_SECONDS = 10.0
#: What a client may send.
_MAX_REQUEST_BYTES = 64 * 1024
#: The kernel accepts a path of about a hundred bytes.
_MAX_PATH_BYTES = 100

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def prefix_of(kind: str, what: bytes) -> str:
    """Return the prefix of the sockets of processes that work on something.

    Example:
        >>> prefix_of("triggers", b"/srv/list.yaml")
        'triggers.659a1a99a214194e.'
    """
    # A digest: a path to a socket may not be long.
    return f"{kind}.{hashlib.blake2b(what, digest_size=8).hexdigest()}."


class ControlSocket:
    """Answers each client that connects.

    Args:
        prefix: See `prefix_of`.
        answer: Called on the loop with what a client sent ({} if nothing); returns the answer; must be quick.
    """

    def __init__(self, prefix: str, answer: Answer) -> None:
        """Do not listen yet."""
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
            # It gets its final name once it listens: until then it would look like a dead one.
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
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        if self._path is not None:
            self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                asked = await reader.read(_MAX_REQUEST_BYTES)
                request = json.loads(asked) if asked else {}
                said = self._answer(request if isinstance(request, dict) else {})
                writer.write(json.dumps(said).encode())
                await writer.drain()
        except (OSError, ValueError, TimeoutError) as error:
            log.warning("a client of the control socket got no answer", error=str(error) or type(error).__name__)
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Answers:
    """What the processes of a prefix answered.

    Attributes:
        reports: Of those that answered.
        silent: How many did not answer in time.
    """

    reports: list[dict[str, Any]]
    silent: int


def ask(prefix: str, request: dict[str, Any] | None = None) -> Answers:
    """Send a request to all processes of a prefix on this machine, and return their answers; blocks."""
    reports, silent = [], 0
    for path in _sockets(prefix):
        try:
            reports.append(_ask(path, request))
        except TimeoutError:
            silent += 1
        except (OSError, ValueError):
            continue  # it has just ended, or was killed
    return Answers(reports, silent)


def _ask(path: Path, request: dict[str, Any] | None) -> dict[str, Any]:
    parts = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
        if request is not None:
            connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        while part := connection.recv(65536):
            parts.append(part)
    report: dict[str, Any] = json.loads(b"".join(parts))
    return report


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
    return sorted(_folder(prefix).glob(f"{prefix}*.sock"))


def _folder(prefix: str) -> Path:
    """Return where processes of a prefix listen."""
    folder = private_directory()
    fits = len(os.fsencode(folder / f"{prefix}12345678.sock")) < _MAX_PATH_BYTES
    return folder if fits else private_directory({})
