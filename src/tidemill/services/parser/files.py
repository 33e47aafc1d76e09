"""Finds the files that may define DAGs, and detects their changes."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from tidemill.core.errors import escape_surrogates
from tidemill.services.parser.ignoring import IGNORE_FILE, IgnoreRules

#: A file without this word, in any case, defines no DAG.
_WORD: Final = b"dag"

#: Path, modification time, size and inode of each of some files; None for a missing file.
Signature = tuple[tuple[str, int, int, int] | None, ...]


def find_files(folder: Path) -> list[str]:
    """Return the Python files below a folder that contain the word `dag`: relative paths, sorted.

    Skipped are hidden files and folders, files ignored by `.airflowignore`, and files whose names are not Unicode text,
    which databases reject. Links to folders are followed, but no folder is read twice.

    Raises:
        FileNotFoundError: The folder does not exist, or was moved during the call.
    """
    before = _identify(folder)
    found = sorted(path.relative_to(folder).as_posix() for path in _walk(folder) if _may_define_dags(path))
    if before is None or (after := _identify(folder)) is None:
        raise FileNotFoundError(f"the folder of DAG files {str(folder)!r} does not exist")
    # If a link to the folder was moved meanwhile, start again.
    return found if after == before else find_files(folder)


def sign_files(folder: Path, names: Iterable[str]) -> Signature:
    """Return a value that changes whenever one of the files changes."""
    return tuple(_sign(folder / name) for name in sorted(names))


def is_relevant(path: str) -> bool:
    """Return whether a changed file may change DAGs; files that Python or an editor writes for itself may not."""
    parts = Path(path).parts
    if parts[-1] == IGNORE_FILE:
        return True
    return path.endswith(".py") and "__pycache__" not in parts and not Path(path).name.startswith(".")


def _identify(folder: Path) -> tuple[int, int] | None:
    """Return the device and the inode of a folder; None if there is none."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISDIR(found.st_mode) else None


def _walk(folder: Path) -> Iterator[Path]:
    """Yield the Python files below a folder; real folders come before links, so that files keep the names of real
    folders.
    """
    seen: set[tuple[int, int] | None] = set()
    waiting = deque([(folder, IgnoreRules())])
    links: deque[tuple[Path, IgnoreRules]] = deque()
    while waiting or links:
        at, outer = (waiting or links).popleft()
        if (identity := _identify(at)) is None or identity in seen:
            continue
        seen.add(identity)
        rules = outer.enter(at)
        folders, files = _list(at)
        for path in files:
            if path.suffix == ".py" and _is_text(str(path)) and not rules.ignores(path, is_folder=False):
                yield path
        for path in folders:
            if path.name != "__pycache__" and not rules.ignores(path, is_folder=True):
                (links if path.is_symlink() else waiting).append((path, rules))


def _list(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the folders and files in a folder, sorted, without hidden ones."""
    folders: list[Path] = []
    files: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if not entry.name.startswith("."):
                (folders if _is_folder(entry) else files).append(Path(entry.path))
    return folders, files


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _is_text(name: str) -> bool:
    return escape_surrogates(name) == name


def _may_define_dags(path: Path) -> bool:
    try:
        return path.is_file() and _WORD in path.read_bytes().lower()
    except OSError:
        # An unreadable file is an error that users should see.
        return path.is_file()


def _sign(path: Path) -> tuple[str, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return (str(path), found.st_mtime_ns, found.st_size, found.st_ino)
