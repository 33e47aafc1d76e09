"""Puts a whole file in place of another: written beside it, then renamed.

Invariants: a reader has the old file or the new one, never a part; a write that failed leaves nothing behind, and what
a process left that was killed is removed by the next one that replaces a file in that folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat

from tidemill.sinks.beneath import sync_folder

#: The name under which a file is written begins like this.
BESIDE = ".tidemill-"


def replace(folder: int, name: bytes, content: bytes, *, fsync: bool) -> None:
    """Replace a file, or make it.

    Args:
        folder: The descriptor of its folder.
        name: Its name there.
        content: What it is to have.
        fsync: Wait until content and name are on the disk.

    Raises:
        OSError: It is not a regular file, or cannot be written.
    """
    with contextlib.suppress(FileNotFoundError):
        check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    beside = BESIDE + secrets.token_hex(8)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(beside, flags, 0o644, dir_fd=folder)
    try:
        # Tells `remove_left_over` that somebody writes it.
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        write_whole(descriptor, content)
        if fsync:
            os.fsync(descriptor)
        os.rename(beside, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)
    if fsync:
        sync_folder(folder)


def remove_left_over(folder: int) -> int:
    """Remove what killed processes left in a folder; return how many files."""
    try:
        readable = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    except OSError:  # it may be written, but not read
        return 0
    try:
        names = [name for name in os.listdir(readable) if name.startswith(BESIDE)]
    finally:
        os.close(readable)
    return sum(_removed(folder, name) for name in names)


def _removed(folder: int, name: str) -> bool:
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.unlink(name, dir_fd=folder)
    except OSError:  # it is being written, or gone
        return False
    finally:
        os.close(descriptor)
    return True


def check_regular(status: os.stat_result) -> None:
    """Refuse what is not a regular file."""
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "is no regular file")


def write_whole(descriptor: int, data: bytes) -> None:
    """Write everything: the kernel may take a part only, when the disk is nearly full."""
    written = os.write(descriptor, data)
    if written < len(data):
        view = memoryview(data)
        while written < len(data):
            written += os.write(descriptor, view[written:])
