"""Byte access to a file, read on demand.

Files are read, never mapped: if another process (on NFS: another host) truncates or removes a file, a read raises an
error, whereas access to a mapping would kill the process.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol


class ByteView(Protocol):
    """Random access to bytes: a `FileView`, or a `memoryview` of data in memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, wanted: slice, /) -> memoryview: ...


class FileView:
    """A file at its current size; data appended later is not visible.

    Args:
        path: The file.

    Raises:
        OSError: The file cannot be read, or is not a regular file of this user. Reads raise it too if the file was
            truncated.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(1, f"{path} is not a regular file of this user")
        self._size = status.st_size

    def __len__(self) -> int:
        """Return the number of bytes."""
        return self._size

    def __getitem__(self, wanted: slice, /) -> memoryview:
        """Read a slice of the file."""
        start, end, _ = wanted.indices(self._size)
        parts: list[bytes] = []
        while start < end:
            part = os.pread(self._fd, end - start, start)
            if not part:
                raise OSError(f"{self._path} was truncated while it was read")
            parts.append(part)
            start += len(part)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    @property
    def reopened(self) -> str:
        """A path that opens the same file again, even if its name now belongs to another one; valid while this view
        exists.
        """
        return f"/proc/self/fd/{self._fd}"

    def __del__(self) -> None:
        """Close the file."""
        if self._fd >= 0:
            os.close(self._fd)
