"""Waits for a file: at a path, matching a pattern, or below a folder."""

from __future__ import annotations

import asyncio
import contextlib
import glob
import os
import stat
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

from tidemill.core.triggers.stable_files import StableFiles, Version
from tidemill.triggers.base import BaseTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import check_path
from tidemill.triggers.builtin.identities import build_file_identity


class FileTrigger(BaseTrigger):
    """Fires once, when a file exists.

    The payload has `path`, `size_bytes` and `modified_ns` of the file. The identity is path, size, modification time
    and inode: with `restart: always`, each version of the file is stored once. The log says what was found instead,
    whenever that changes.

    Args:
        path: The file; or a folder, for any file below it; or a pattern with `*`, `?` and `[...]`, unless a file has
            this very name. Relative paths start at the working directory of the triggerer.
        poll_seconds: The time between two checks.
        settle_seconds: How long the file must be unchanged, for writers that do not move a complete file into the
            folder.
        recursive: Whether `**` in a pattern matches any number of folders.

    Raises:
        ValueError: A number is out of bounds, or no file can ever be at the path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        poll_seconds: float = 5.0,
        settle_seconds: float = 0.0,
        recursive: bool = False,
    ) -> None:
        super().__init__()
        self.path = os.fspath(path)
        check_path(self.path, "the file to wait for")
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds must be positive, got {poll_seconds}")
        if settle_seconds < 0:
            raise ValueError(f"settle_seconds must not be negative, got {settle_seconds}")
        self.poll_seconds = poll_seconds
        self.settle_seconds = settle_seconds
        self.recursive = recursive

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        names = ("path", "poll_seconds", "settle_seconds", "recursive")
        return "tidemill.triggers.builtin.file.FileTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll, then fire.

        Raises:
            OSError: A folder cannot be read.
        """
        stable_files = StableFiles(self.settle_seconds)
        said = ""
        while True:
            # In a thread, because network file systems can be slow.
            files, why = await asyncio.to_thread(look, self.path, self.recursive, every=self.settle_seconds > 0)
            stable_files.see_all(files, time.monotonic())
            settled = stable_files.take(time.monotonic())
            if settled:
                break
            if why != said:
                said = why
                self.log.info("waiting for a file", path=_show(self.path), found=why)
            due = stable_files.due
            pause = self.poll_seconds if due is None else min(self.poll_seconds, due - time.monotonic())
            await asyncio.sleep(max(pause, 0.0))
        path, version = settled[0]
        yield TriggerEvent(
            {"path": path, "size_bytes": version.size_bytes, "modified_ns": version.modified_ns},
            identity=build_file_identity(path, version),
        )


def look(path: str, recursive: bool, *, every: bool) -> tuple[dict[str, Version], str]:
    """Return the files at a path, and a description of what is there if there are none.

    Args:
        path: A file, a folder or a pattern.
        recursive: Whether `**` in a pattern matches any number of folders.
        every: Whether to return all files; if False, only the first one found.

    Raises:
        OSError: A folder cannot be read.
    """
    is_pattern = glob.has_magic(path) and not (Path(path).exists() or Path(path).is_symlink())
    files: dict[str, Version] = {}
    why = _explain_missing(path, is_pattern=is_pattern)
    # Not `Path.glob`, which needs a base folder and matches hidden files.
    for target in sorted(glob.iglob(path, recursive=recursive)) if is_pattern else [path]:  # noqa: PTH207
        for file, version in _read_files(target):
            files[file] = version
            if not every:
                return files, why
        if not files and (kind := _describe_kind(target)):
            why = f"{kind} at {target}" if is_pattern else kind
    return files, "a file that is still changing" if files else why


def _read_files(path: str) -> Iterator[tuple[str, Version]]:
    """Yield the file at a path, or the files below a folder."""
    if (version := read_version(path)) is not None:
        yield path, version
    elif Path(path).is_dir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed in the meantime
            os.scandir(path).close()  # raises if the folder cannot be read; `walk` would ignore that
        for folder, _, names in os.walk(path):
            for name in names:
                file = str(Path(folder, name))
                if (version := read_version(file)) is not None:
                    yield file, version


def read_version(path: str) -> Version | None:
    """Return the version of a file; None if it does not exist or is not a regular file."""
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Version(found.st_mtime_ns, found.st_size, found.st_ino)


def _describe_kind(path: str) -> str:
    """Return a description of what is at a path without a file; empty if nothing is."""
    there = Path(path)
    if there.is_dir():
        return "a folder without files"
    if there.exists():
        return "a device, pipe or socket instead of a regular file"
    return "a broken link" if there.is_symlink() else ""


def _show(path: str) -> str:
    return str(Path(path).absolute())


def _explain_missing(path: str, *, is_pattern: bool) -> str:
    """Return why no file was found at a path.

    Raises:
        OSError: The folder of a pattern cannot be read; `glob` would ignore that.
    """
    above = Path(path).parent
    while is_pattern and glob.has_magic(str(above)):
        above = above.parent
    try:
        if is_pattern:
            os.scandir(above).close()
        else:
            os.stat(f"{above}/")  # noqa: PTH116 - the slash asks for a folder
    except FileNotFoundError:
        return f"no folder {above}"
    except NotADirectoryError:
        return f"no folder {above}: the path leads through a file"
    return "no match for the pattern" if is_pattern else "nothing"
