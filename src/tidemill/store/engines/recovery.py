"""Detects that the file of an open SQLite store was removed or moved, and saves its content.

SQLite does not report the loss: it keeps writing to a file that has no path and that disappears when it is closed.

Invariants: nothing is ever written to the old path; its file may have been removed on purpose, and another program may
use the path now. The copy is complete and readable only by this user. Opening and closing files here never releases
SQLite's locks: POSIX drops all locks of a process on a file when it closes any descriptor of it, except O_PATH ones.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tidemill.core.errors import RemoteError


class StoreLostError(RemoteError):
    """The file of the store was removed or moved while the store was open."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)


class FileWatch:
    """Compares the open files of a store with the files at their paths.

    Args:
        paths: The database and its lock file; both exist, and no other process is replacing them now.
    """

    def __init__(self, *paths: Path) -> None:
        self._files = [(path.absolute(), os.open(path, os.O_PATH | os.O_CLOEXEC)) for path in paths]

    def find_loss(self) -> str | None:
        """Describe the loss of the first file that is no longer at its path; None if all files are in place."""
        for path, fd in self._files:
            own, found = os.fstat(fd), None
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found = path.stat()
            if found is not None and os.path.samestat(own, found):
                continue
            if own.st_nlink == 0:
                return f"{path} was removed"
            return f"{path} was moved to {os.readlink(f'/proc/self/fd/{fd}')}"  # noqa: PTH115
        return None

    def list_folders(self) -> Iterator[Path]:
        """Yield folders for a copy, best first: the original, the new one, the working and the temporary directory."""
        path, fd = self._files[0]
        yield path.parent
        if os.fstat(fd).st_nlink:
            yield Path(os.readlink(f"/proc/self/fd/{fd}")).parent  # noqa: PTH115
        with contextlib.suppress(OSError):
            yield Path.cwd()
        yield Path(tempfile.gettempdir())

    def close(self) -> None:
        """Close the descriptors."""
        for _, fd in self._files:
            os.close(fd)
        self._files.clear()


def save_copy(source: sqlite3.Connection, name: str, watch: FileWatch) -> Path:
    """Copy a database to a new file `NAME.recovered-TIME` and return its path.

    Raises:
        StoreLostError: No folder is writable.
    """
    name, problems = f"{name}.recovered-{time.strftime('%Y%m%dT%H%M%S')}", []
    for folder in watch.list_folders():
        path = folder / name
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with contextlib.closing(sqlite3.connect(path)) as target:
                source.backup(target)
        except (OSError, sqlite3.Error) as error:
            problems.append(f"{path}: {error}")
        else:
            return path
    raise StoreLostError(f"and no copy could be written: {'; '.join(problems)}")
