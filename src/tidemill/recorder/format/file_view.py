"""The bytes of a file, read where they are asked for.

Files are read, never mapped: where one is cut or removed by somebody else (on NFS: by another host), reading raises,
and touching a mapping would end the process.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol


class ByteView(Protocol):
    """Bytes of which parts are read: a `FileView`, or a `memoryview` of what is in memory."""

    def __len__(self) -> int: ...
    def __getitem__(self, wanted: slice, /) -> memoryview: ...


class FileView:
    """A file as it is now; what is written to it later is not seen.

    Args:
        path: The file.

    Raises:
        OSError: It cannot be read, or is not an ordinary file of this user; so does each read of a file that was cut.
    """

    def __init__(self, path: Path) -> None:
        """Open it."""
        self._path = path
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
            raise PermissionError(1, f"{path} is not an ordinary file of this user")
        self._size = status.st_size

    def __len__(self) -> int:
        """Return how many bytes there are."""
        return self._size

    def __getitem__(self, wanted: slice, /) -> memoryview:
        """Read a part."""
        start, end, _ = wanted.indices(self._size)
        parts: list[bytes] = []
        while start < end:
            part = os.pread(self._fd, end - start, start)
            if not part:
                raise OSError(f"{self._path} is shorter than it was")
            parts.append(part)
            start += len(part)
        return memoryview(parts[0] if len(parts) == 1 else b"".join(parts))

    @property
    def reopened(self) -> str:
        """A path that opens the same file again, whatever has its name now; for as long as this is kept."""
        return f"/proc/self/fd/{self._fd}"

    def __del__(self) -> None:
        """Close it."""
        if self._fd >= 0:
            os.close(self._fd)
