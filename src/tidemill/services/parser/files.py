"""Which files of a folder may define DAGs, and whether one has changed since it was read."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tidemill.core.errors import escape_surrogates

#: A file without this word, in upper or lower case, defines no DAG.
_WORD: Final = b"dag"

#: Time, size and number of each of some files; None: it is not there.
Signature = tuple[tuple[str, int, int, int] | None, ...]


def find_files(folder: Path) -> list[str]:
    """Return the Python files below a folder in which the word `dag` occurs, relative to it, sorted.

    Hidden folders and files are left out, and so are links to folders, and files whose names are not Unicode text:
    no database accepts them.

    Raises:
        FileNotFoundError: There is no such folder, or it was moved while it was read.
    """
    before = _identify(folder)
    found = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if _may_define_dags(path))
    if before is None or _identify(folder) != before:
        raise FileNotFoundError(f"the folder of DAG files {str(folder)!r} does not exist")
    return found


def sign_files(folder: Path, names: Iterable[str]) -> Signature:
    """Return what changes whenever one of some files does."""
    return tuple(_sign(folder / name) for name in sorted(names))


def is_relevant(path: str) -> bool:
    """Return whether a changed file may change DAGs: not one that Python or an editor writes for itself."""
    parts = Path(path).parts
    return path.endswith(".py") and "__pycache__" not in parts and not Path(path).name.startswith(".")


def _identify(folder: Path) -> tuple[int, int] | None:
    """Return device and number of a folder; None: there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def _walk(folder: Path) -> Iterator[Path]:
    for root, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "__pycache__"]
        for name in files:
            path = Path(root, name)
            if name.endswith(".py") and not name.startswith(".") and _is_text(str(path)):
                yield path


def _is_text(name: str) -> bool:
    return escape_surrogates(name) == name


def _may_define_dags(path: Path) -> bool:
    try:
        return path.is_file() and _WORD in path.read_bytes().lower()
    except OSError:
        # It cannot be read, which is an error of this file that people should see.
        return path.is_file()


def _sign(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (str(path), found.st_mtime_ns, found.st_size, found.st_ino)
