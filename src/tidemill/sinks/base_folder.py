"""Opens files below one folder so that no link leads out of it, not even one that is created at the last moment.

Each part of a path is opened relative to its parent folder, and never through a link. A link is read, and followed only
if its target is below the base folder at that moment; the target's path is then walked in the same way.
Invariant: every file or folder is opened or created in a folder that was reached from the base folder without a link.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

#: The kernel's own limit.
MAX_LINKS = 40
_FOLDER = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class OutsideError(Exception):
    """A path leads out of the base folder."""


class BaseFolder:
    """An open folder, held by its file descriptor.

    Args:
        path: The folder's real path, without links.

    Raises:
        OSError: The path cannot be opened, or is not a folder.
    """

    def __init__(self, path: bytes) -> None:
        self.path = path
        self._descriptor = os.open(path, _FOLDER)
        self._identity = _identify(os.fstat(self._descriptor))

    def is_current(self) -> bool:
        """Return whether the path still leads to this folder.

        Raises:
            OSError: The path does not lead to a folder.
        """
        there = os.stat(self.path, follow_symlinks=False)  # noqa: PTH116 - once per batch, by bytes
        if not stat.S_ISDIR(there.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        return _identify(there) == self._identity

    def close(self) -> None:
        os.close(self._descriptor)

    @contextlib.contextmanager
    def open_parent(self, path: bytes, *, fsync: bool = False) -> Iterator[tuple[int, bytes]]:
        """Open the folder of a file and create missing folders; yield its descriptor and the file's name in it.

        Args:
            path: Relative to this folder, without '..'.
            fsync: Wait until created folders are on disk.

        Raises:
            OutsideError: A link in the path leads out of the base folder.
            OSError: The folder cannot be opened or created.
        """
        descriptor = os.dup(self._descriptor)
        walked: list[bytes] = []
        todo = _split(path)[::-1]
        links = 0
        try:
            while todo:
                name = todo.pop()
                if _is_link(name, descriptor):
                    links += 1
                    if links > MAX_LINKS:
                        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
                    todo += self._resolve_link(b"/".join([*walked, name]))[::-1]
                    walked.clear()
                    os.close(descriptor)
                    descriptor = os.dup(self._descriptor)
                elif todo:
                    below = _open_folder(name, descriptor, fsync)
                    os.close(descriptor)
                    descriptor = below
                    walked.append(name)
                else:
                    yield descriptor, name
                    return
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        finally:
            os.close(descriptor)

    def _resolve_link(self, link: bytes) -> list[bytes]:
        """Return the parts of a link's target path, relative to the base folder."""
        real = os.path.realpath(os.path.join(self.path, link))  # noqa: PTH118
        root = self.path.rstrip(b"/") + b"/"
        if not real.startswith(root):
            raise OutsideError(f"path {os.fsdecode(link)!r} leads outside the base path through a link")
        return _split(real[len(root) :])


def sync_folder(descriptor: int) -> None:
    """Wait until the entries of a folder are on disk."""
    readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=descriptor)
    try:
        os.fsync(readable)
    finally:
        os.close(readable)


def _identify(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _split(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part not in (b"", b".")]


def _is_link(name: bytes, folder: int) -> bool:
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISLNK(status.st_mode)


def _open_folder(name: bytes, folder: int, fsync: bool) -> int:
    """Open a folder inside a folder; create it if it is missing."""
    try:
        return os.open(name, _FOLDER, dir_fd=folder)
    except FileNotFoundError:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, dir_fd=folder)
        if fsync:
            sync_folder(folder)
        return os.open(name, _FOLDER, dir_fd=folder)
