"""Ensures one writing process per SQLite file, with a kernel lock on a file next to it.

SQLite alone would let two hosts write in turn, and both would run the same triggers. The kernel releases the lock when
the process exits for any reason, so the lock is never stale; a leftover lock file is harmless.
"""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.lock import HeldError, lock_file


class StoreInUseError(ConfigError):
    """Another process writes to this store."""


class StoreLock:
    """The exclusive right to write to a SQLite file.

    Args:
        path: The database file; symbolic links are resolved, so that all names of a file share one lock.
    """

    def __init__(self, path: Path) -> None:
        self._database = path
        self.path = Path(f"{path.resolve()}.lock")
        self._fd: int | None = None

    def acquire(self) -> None:
        """Acquire the lock.

        Raises:
            StoreInUseError: Another process holds it.
            ConfigError: The lock file cannot be created or locked.
        """
        try:
            self._fd = lock_file(self.path)
        except HeldError as error:
            raise StoreInUseError(
                f"the store {self._database} is in use by process {error.holder}, and only one process may write to a "
                "SQLite file; stop that process, give this one a file of its own (store.url), or use PostgreSQL"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"the store {self._database} cannot be used: {self.path}: {error.strerror}; "
                "set store.url to a file in a folder that this user may write to"
            ) from error

    def publish(self, address: str) -> None:
        """Write the address at which this process answers calls into the lock file, as its second line."""
        if self._fd is not None:
            line = f"{os.getpid()}\n{address}\n".encode()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, line, 0)

    def read_address(self) -> str | None:
        """Return the address at which the lock's holder answers calls; None if it has published none."""
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return None
        return lines[1] if len(lines) > 1 and lines[1] else None

    def release(self) -> None:
        """Release the lock if it is held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
