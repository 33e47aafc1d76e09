"""The lock of a name on one machine: its holder knows that no earlier process of this machine still has the name.

The lock only speeds up a takeover; the store decides which process does the work.

Invariants: the kernel releases the lock however its process ends. The lock's identity differs wherever the locked file
differs (another boot, another machine, a container or a user with another folder), so equal identities mean that the
earlier holder has exited.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tidemill.core.errors import ConfigError
from tidemill.runtime.files.lock import HeldError, lock_file, private_directory, refuse_foreign
from tidemill.runtime.process.boot import read_boot_id


class IdentityLock:
    """The lock of one name on this machine.

    Args:
        purpose: Part of the name of the lock file.
        name: The name: of a trigger list, or of a service.
        directory: The folder of the lock file; None: one that only this user can write to.

    Attributes:
        identity: Identifies the locked file among all machines and boots; '': the lock is not held.
        holder: The process that held the lock at the last attempt; '': none did.
    """

    def __init__(self, purpose: str, name: str, directory: Path | None = None) -> None:
        digest = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
        self._path = (directory or private_directory()) / f"{purpose}.{digest}.lock"
        self._fd: int | None = None
        self.identity = ""
        self.holder = ""

    @property
    def held(self) -> bool:
        """Whether this process holds the lock."""
        return self._fd is not None

    def acquire(self) -> bool:
        """Try to take the lock; return whether this process holds it.

        Raises:
            ConfigError: The folder for locks cannot be used.
        """
        if self._fd is not None:
            return True
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            refuse_foreign(self._path.parent)
            self._fd = lock_file(self._path)
        except HeldError as error:
            self.holder = error.holder
            return False
        except OSError as error:
            raise ConfigError(
                f"cannot use {self._path.parent}: {error.strerror}; set XDG_RUNTIME_DIR to a folder that this user "
                "can write to"
            ) from error
        self.holder = ""
        self.identity = self._identify(self._fd)
        return True

    def release(self) -> None:
        """Release the lock; does nothing if it is not held."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
            self.identity = ""

    def _identify(self, fd: int) -> str:
        boot = read_boot_id()
        found = os.fstat(fd)
        return f"{boot}:{found.st_dev}:{found.st_ino}:{self._path}" if boot else ""
