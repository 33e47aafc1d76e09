"""Asks a running trigger host what it does, over a Unix socket of its own.

The socket's name comes from the path of the list of triggers, so that who knows the list finds the host. One host per
list on a machine: a lock beside the socket, which the kernel releases.

Invariants: the host answers one JSON document per connection and reads nothing; only its own user can connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.lock import HeldError, lock_file, private_directory, refuse_foreign

ANSWER_SECONDS = 10.0
_MAX_PATH_BYTES = 100


class HostRunsError(ConfigError):
    """Another host runs this list of triggers."""


def socket_path(specs: Path) -> Path:
    """Return where the host of a list answers.

    Args:
        specs: The list.
    """
    # A digest: such a path may not be longer than about a hundred characters.
    digest = hashlib.blake2b(os.fsencode(specs.resolve()), digest_size=8).hexdigest()
    path = private_directory() / f"triggers.{digest}.sock"
    # The kernel takes about a hundred bytes.
    return path if len(os.fsencode(path)) < _MAX_PATH_BYTES else private_directory({}) / path.name


class ControlServer:
    """Answers who asks.

    Args:
        specs: The list of triggers of this host.
        report: Returns what there is to say; quick.
    """

    def __init__(self, specs: Path, report: Callable[[], dict[str, Any]]) -> None:
        """Listen to nobody yet."""
        self._specs = specs
        self._path = socket_path(specs)
        self._report = report
        self._server: asyncio.Server | None = None
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the right to run this list here.

        Raises:
            HostRunsError: Another process has it.
            ConfigError: The folder for sockets cannot be used.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(self._path.parent)
            self._fd = lock_file(self._path.with_suffix(".lock"))
        except HeldError as error:
            raise HostRunsError(
                f"{self._specs} is run by process {error.holder} on this machine; stop that one, or reload it: "
                f"kill -HUP {error.holder}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"cannot use {self._path.parent}: {error.strerror}; set XDG_RUNTIME_DIR to a folder that this user "
                "can write to"
            ) from error

    async def start(self) -> None:
        """Listen."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()  # of one that was killed; the lock is ours
        self._server = await asyncio.start_unix_server(self._answer, self._path)
        self._path.chmod(0o600)

    async def close(self) -> None:
        """Stop listening, and let another one run the list."""
        if self._server is not None:
            self._server.close()
            with contextlib.suppress(FileNotFoundError):
                self._path.unlink()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(json.dumps(self._report()).encode())
            await writer.drain()
        finally:
            writer.close()


def ask(specs: Path) -> dict[str, Any]:
    """Return the report of the host that runs a list.

    Raises:
        RemoteError: There is none, or it does not answer.
    """
    parts = []
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(socket_path(specs)))
            while part := connection.recv(65536):
                parts.append(part)
        report: dict[str, Any] = json.loads(b"".join(parts))
    except TimeoutError:
        raise RemoteError(
            f"the host of {specs} does not answer within {ANSWER_SECONDS:g} s; look into its log for what blocks it"
        ) from None
    except (OSError, ValueError):
        raise RemoteError(f"no host runs {specs} on this machine; start one: tidemill triggers run {specs}") from None
    return report
