"""Asks the trigger hosts of a list what they do, over Unix sockets, one per process.

The names of the sockets begin with a digest of the list's path, so that who knows the list finds its hosts on this
machine: the one that runs it, and those that wait to take over.

Invariants: a host answers one JSON document per connection and reads nothing; only its own user can connect; a socket
that can be seen is being listened to, unless its process was killed, and then the next host removes it.
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

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.lock import private_directory, refuse_foreign

ANSWER_SECONDS = 10.0
_MAX_PATH_BYTES = 100


class ControlServer:
    """Tells anybody who connects what this process does.

    Args:
        specs: The list of triggers of this host.
        report: Returns what there is to say; quick.
    """

    def __init__(self, specs: Path, report: Callable[[], dict[str, Any]]) -> None:
        """Listen to nobody yet."""
        self._specs = specs
        self._report = report
        self._path: Path | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            ConfigError: The folder for sockets cannot be used.
        """
        folder, prefix = _place(self._specs)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(folder)
            await asyncio.to_thread(_remove_dead, self._specs)
            path = folder / f"{prefix}{secrets.token_hex(4)}.sock"
            # It gets the name that others look for when it listens: until then it would look like a dead one.
            hidden = path.with_suffix(".new")
            self._server = await asyncio.start_unix_server(self._answer, hidden)
            hidden.chmod(0o600)
            hidden.rename(path)
        except OSError as error:
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

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(json.dumps(self._report()).encode())
            await writer.drain()
        finally:
            writer.close()


@dataclass(frozen=True, slots=True)
class Answers:
    """What the hosts of a list on this machine said.

    Attributes:
        reports: Of those that answered; the one that runs the list first.
        silent: How many did not answer in time.
    """

    reports: list[dict[str, Any]]
    silent: int


def ask(specs: Path) -> Answers:
    """Return the reports of the hosts of a list.

    Raises:
        RemoteError: There is none.
    """
    reports, silent = [], 0
    for path in _sockets(specs):
        try:
            reports.append(_ask(path))
        except TimeoutError:
            silent += 1
        except (OSError, ValueError):
            continue  # it has just ended, or was killed
    if not reports and not silent:
        raise RemoteError(f"no host runs {specs} on this machine; start one: tidemill triggers run {specs}")
    return Answers(sorted(reports, key=lambda report: bool(report.get("waits_for"))), silent)


def no_answer(specs: Path) -> RemoteError:
    """Return the error that says that a host is there and silent."""
    return RemoteError(
        f"a host of {specs} does not answer within {ANSWER_SECONDS:g} s; look into its log for what blocks it"
    )


def _ask(path: Path) -> dict[str, Any]:
    parts = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(ANSWER_SECONDS)
        connection.connect(str(path))
        while part := connection.recv(65536):
            parts.append(part)
    report: dict[str, Any] = json.loads(b"".join(parts))
    return report


def _remove_dead(specs: Path) -> None:
    """Remove the sockets of processes that were killed."""
    for path in _sockets(specs):
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(ANSWER_SECONDS)
            try:
                connection.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except OSError:
                continue


def _sockets(specs: Path) -> list[Path]:
    folder, prefix = _place(specs)
    return sorted(folder.glob(f"{prefix}*.sock"))


def _place(specs: Path) -> tuple[Path, str]:
    """Return where the hosts of a list listen: the folder, and how the names of their sockets begin."""
    # A digest: such a path may not be longer than about a hundred characters.
    digest = hashlib.blake2b(os.fsencode(specs.resolve()), digest_size=8).hexdigest()
    prefix = f"triggers.{digest}."
    folder = private_directory()
    # The kernel takes about a hundred bytes.
    fits = len(os.fsencode(folder / f"{prefix}12345678.sock")) < _MAX_PATH_BYTES
    return (folder if fits else private_directory({})), prefix
