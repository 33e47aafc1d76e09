"""Waits for a file to exist."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from tidemill.core.triggers.stable_files import StableFiles, Version
from tidemill.triggers.base import BaseTrigger, TriggerEvent
from tidemill.triggers.builtin.identities import build_file_identity


class FileTrigger(BaseTrigger):
    """Fires once, when a file exists.

    What is fired holds `path`, `size_bytes` and `modified_ns`. Its identity is path, size, time and inode: with
    `restart: always` each version of the file is stored once.

    Args:
        path: The file.
        poll_seconds: How often to look.
        settle_seconds: How long it has to be unchanged, for writers that do not move a complete file into place.

    Raises:
        ValueError: A number is out of its bounds, or the path is empty.
    """

    def __init__(self, path: str | os.PathLike[str], *, poll_seconds: float = 5.0, settle_seconds: float = 0.0) -> None:
        """Check the arguments."""
        super().__init__()
        self.path = os.fspath(path)
        if not self.path:
            raise ValueError("path is empty; give the file to wait for")
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds must be positive, got {poll_seconds}")
        if settle_seconds < 0:
            raise ValueError(f"settle_seconds must not be negative, got {settle_seconds}")
        self.poll_seconds = poll_seconds
        self.settle_seconds = settle_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the arguments of this trigger."""
        return (
            "tidemill.triggers.builtin.file.FileTrigger",
            {"path": self.path, "poll_seconds": self.poll_seconds, "settle_seconds": self.settle_seconds},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll, and fire.

        Raises:
            OSError: The folder of the file cannot be read.
        """
        stable_files = StableFiles(self.settle_seconds)
        while True:
            # In a thread: a network file system may be slow.
            stable_files.see(self.path, await asyncio.to_thread(read_version, self.path), time.monotonic())
            settled = stable_files.take(time.monotonic())
            if settled:
                break
            due = stable_files.due
            pause = self.poll_seconds if due is None else min(self.poll_seconds, due - time.monotonic())
            await asyncio.sleep(max(pause, 0.0))
        version = settled[0][1]
        yield TriggerEvent(
            {"path": self.path, "size_bytes": version.size_bytes, "modified_ns": version.modified_ns},
            identity=build_file_identity(self.path, version),
        )


def read_version(path: str) -> Version | None:
    """Return the version of a file; None if it is not a regular file, or does not exist."""
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Version(found.st_mtime_ns, found.st_size, found.st_ino)
