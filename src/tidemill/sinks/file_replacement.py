"""Replaces a whole file: writes the new file next to it, then renames it.

Invariants: readers see the old file or the new one, never a part. A failed write leaves nothing behind. The temporary
files of a killed process are removed by the next process that replaces a file in that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat

from tidemill.sinks.base_folder import sync_folder

#: Prefix of the temporary names under which new files are written.
TEMPORARY = ".tidemill-"


def replace(folder: int, name: bytes, content: bytes, *, fsync: bool) -> None:
    """Replace or create a file.

    Args:
        folder: The descriptor of the file's folder.
        name: The file's name in that folder.
        content: The new content.
        fsync: Wait until content and name are on disk.

    Raises:
        OSError: The existing file is not a regular file, or the new one cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    temporary, descriptor = _create(folder)
    try:
        write_whole(descriptor, content)
        if fsync:
            os.fsync(descriptor)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    if fsync:
        sync_folder(folder)


def _create(folder: int) -> tuple[str, int]:
    """Create a file and lock it, so that `remove_left_over` leaves it alone; return its name and descriptor."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    while True:
        temporary = TEMPORARY + secrets.token_hex(8)
        descriptor = os.open(temporary, flags, 0o644, dir_fd=folder)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return temporary, descriptor
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=folder)
            raise
        os.close(descriptor)  # another process removed it before it was locked


def remove_left_over(folder: int) -> int:
    """Remove the files that killed processes left in a folder; return how many."""
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # the folder is writable, but not readable
        return 0
    try:
        names = [name for name in os.listdir(readable) if name.startswith(TEMPORARY)]
    finally:
        os.close(readable)
    return sum(_remove(folder, name) for name in names)


def _remove(folder: int, name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except OSError:  # another process writes it, or has removed it
        return False
    finally:
        os.close(descriptor)
    return True


def check_regular(status: os.stat_result) -> None:
    """Raise OSError unless the status is one of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is not a regular file")


def write_whole(descriptor: int, data: bytes) -> None:
    """Write all data; when the disk is nearly full, the kernel may write only a part per call."""
    written = os.write(descriptor, data)
    if written < len(data):
        view = memoryview(data)
        while written < len(data):
            written += os.write(descriptor, view[written:])
