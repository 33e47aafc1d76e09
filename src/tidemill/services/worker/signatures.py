"""What tells that a file has changed since it was read, without reading it."""

from __future__ import annotations

from pathlib import Path


def sign_file(file: Path) -> tuple[int, ...]:
    """Return the time of its last change, in nanoseconds since the epoch, and more; empty if it cannot be read."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns
