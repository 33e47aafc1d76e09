"""Records which ports belong to processes that record in the same folder and may configure the same port.

Each process locks a file for each port that it tries; the kernel releases the lock when the process ends for any
reason. Invariant: without a writable folder, every claim is unknown and nothing fails.
"""

from __future__ import annotations

import contextlib
import enum
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from tidemill.runtime.files.lock import HeldError, lock_file


class PortClaim(enum.Enum):
    """The owner of a port's claim: this process, another one of the folder, or unknown."""

    OWN = "own"
    OTHER = "other"
    UNKNOWN = "unknown"


class PortOwners:
    """The claims of this process, while the block runs.

    Args:
        db_dir: The folder of the recordings; '' for none.
    """

    def __init__(self, db_dir: str) -> None:
        self._db_dir = db_dir
        self._locks: dict[int, int] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release all claims."""
        for port in list(self._locks):
            self.give_up(port)

    def claim(self, port: int) -> PortClaim:
        """Claim a port before it is tried."""
        if not self._db_dir:
            return PortClaim.UNKNOWN
        try:
            folder = Path(self._db_dir).expanduser()
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._locks[port] = lock_file(folder / f".port-{port}.lock")
        except HeldError:
            return PortClaim.OTHER
        except (OSError, RuntimeError):  # RuntimeError: a user without a home
            return PortClaim.UNKNOWN
        return PortClaim.OWN

    def give_up(self, port: int) -> None:
        """Release a claim, if there is one."""
        lock = self._locks.pop(port, None)
        if lock is not None:
            with contextlib.suppress(OSError):
                os.close(lock)
