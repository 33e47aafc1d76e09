"""What tells that a file has changed since it was read, without reading it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def sign_file(file: Path) -> tuple[int, ...]:
    """Return the time of its last change, in nanoseconds since the epoch, and more; empty if it cannot be read."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns


def is_unchanged(folder: Path, files: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether files are what was read; what `sign_file` said of them is given by their paths below the folder."""
    return all(sign and sign_file(folder / name) == sign for name, sign in files.items())
