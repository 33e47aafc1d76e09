"""What tells that a file has changed since it was read, without reading it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path


def sign_file(file: Path) -> tuple[int, ...]:
    """Return the time of its last change, in nanoseconds since the epoch, and more; empty if it cannot be read."""
    try:
        stat = file.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino, stat.st_ctime_ns


def sign_files(folder: Path, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Return what `sign_file` says of files, by their paths below a folder."""
    return {name: sign_file(folder / name) for name in names}


def is_unchanged(folder: Path, files: Mapping[str, tuple[int, ...]]) -> bool:
    """Tell whether files are what was read; what `sign_file` said of them is given by their paths below the folder."""
    return all(sign and sign_file(folder / name) == sign for name, sign in files.items())
