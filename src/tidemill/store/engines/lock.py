"""One writing process per SQLite file: a lock file beside it, whose lock the kernel releases.

SQLite itself would let two hosts write in turn; both would then run the same triggers. The lock ends with the process,
however that ends: it is never stale, and a lock file that is left behind means nothing.
"""

from __future__ import annotations

import os
from pathlib import Path

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.lock import HeldError, lock_file


class StoreInUseError(ConfigError):
    """Another process writes to this store."""


class StoreLock:
    """The right to write to a SQLite file.

    Args:
        path: The database file; links are followed, so that all names of a file share one lock.
    """

    def __init__(self, path: Path) -> None:
        """Start without the lock."""
        self._database = path
        self.path = Path(f"{path.resolve()}.lock")
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            StoreInUseError: Another process holds it.
            ConfigError: The lock file cannot be used.
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
        """Write where this process answers calls into the lock file, as its second line."""
        if self._fd is not None:
            line = f"{os.getpid()}\n{address}\n".encode()
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, line, 0)

    def read_address(self) -> str | None:
        """Return where the process that holds the lock answers calls; None: nowhere, as far as is known."""
        try:
            lines = self.path.read_text().splitlines()
        except OSError:
            return None
        return lines[1] if len(lines) > 1 and lines[1] else None

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
