"""Waits for a file to exist: that of a path, one that a pattern matches, or one in a folder."""

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

    What is fired holds `path`, `size_bytes` and `modified_ns` of the file that was found. Its identity is path, size,
    time and inode: with `restart: always` each version of the file is stored once. Whenever what it sees changes, its
    log says so.

    Args:
        path: The file; a folder, for any file below it; or a pattern with `*`, `?` and `[...]`, which is one if nothing
            has it as its name. A relative path begins in the working folder of the process that hosts the trigger.
        poll_seconds: How often to look.
        settle_seconds: How long it has to be unchanged, for writers that do not move a complete file into place.
        recursive: Whether `**` in a pattern matches any number of folders.

    Raises:
        ValueError: A number is out of its bounds, or the path can never be one of a file.
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
        """Return the arguments of this trigger."""
        names = ("path", "poll_seconds", "settle_seconds", "recursive")
        return "tidemill.triggers.builtin.file.FileTrigger", {name: getattr(self, name) for name in names}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll, and fire.

        Raises:
            OSError: A folder cannot be read.
        """
        stable_files = StableFiles(self.settle_seconds)
        said = ""
        while True:
            # In a thread: a network file system may be slow.
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
    """Return the files that a path leads to, and what is there instead if there are none.

    Args:
        path: A file, a folder or a pattern.
        recursive: Whether `**` in a pattern matches any number of folders.
        every: Whether to return all files; else the first one that is found.

    Raises:
        OSError: A folder cannot be read.
    """
    is_pattern = glob.has_magic(path) and not (Path(path).exists() or Path(path).is_symlink())
    files: dict[str, Version] = {}
    why = _explain_missing(path, is_pattern=is_pattern)
    # Not by `Path.glob`, which has one folder, and hidden files.
    for place in sorted(glob.iglob(path, recursive=recursive)) if is_pattern else [path]:  # noqa: PTH207
        for file, version in _read_files(place):
            files[file] = version
            if not every:
                return files, why
        if not files and (kind := _describe_kind(place)):
            why = f"{kind} at {place}" if is_pattern else kind
    return files, "a file that still changes" if files else why


def _read_files(place: str) -> Iterator[tuple[str, Version]]:
    """Yield the file of a path, or those below a folder."""
    if (version := read_version(place)) is not None:
        yield place, version
    elif Path(place).is_dir():
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # it is gone by now
            os.scandir(place).close()  # `walk` does not say that it may not read it
        for folder, _, names in os.walk(place):
            for name in names:
                file = str(Path(folder, name))
                if (version := read_version(file)) is not None:
                    yield file, version


def read_version(path: str) -> Version | None:
    """Return the version of a file; None if it is not a regular file, or does not exist."""
    try:
        found = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return Version(found.st_mtime_ns, found.st_size, found.st_ino)


def _describe_kind(place: str) -> str:
    """Return what is at a path that has no file; empty: nothing is."""
    there = Path(place)
    if there.is_dir():
        return "a folder without files"
    if there.exists():
        return "no regular file, but a device, a pipe or a socket"
    return "a link that leads nowhere" if there.is_symlink() else ""


def _show(path: str) -> str:
    return str(Path(path).absolute())


def _explain_missing(path: str, *, is_pattern: bool) -> str:
    """Return why there may be nothing at a path.

    Raises:
        OSError: The folder of a pattern cannot be read, which `glob` does not say.
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
        return f"no folder {above}: it is, or is below, a file"
    return "nothing that the pattern matches" if is_pattern else "nothing"
