"""Files as a sink: JSON lines appended to files below one folder, or whole files that are replaced atomically. Several
processes may append to the same file.

Each file gets the lines of a batch in one write under an exclusive lock. Invariants:
- Lines are neither mixed nor torn; a torn line that a crash left is cut off before anything is appended.
- A batch that could not be written completely leaves nothing behind.
- Readers of a replaced file see the old file or the new one.
- No file outside the base path is ever opened (`sinks.base_folder`).
- No lock outlives its write.

All writes run on the sink's own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import posixpath
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import structlog

from tidemill.config.sections.sink_settings import FilesystemSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, TargetMissingError
from tidemill.core.wording import shorten
from tidemill.sinks import file_replacement
from tidemill.sinks.base import Encoded, Refusal, Sink
from tidemill.sinks.base_folder import BaseFolder, OutsideError, sync_folder
from tidemill.sinks.payloads import FilePayload

log = structlog.get_logger(__name__)

#: How many files stay open; the least recently used is closed first.
MAX_OPEN_FILES = 64
#: How many checked paths are cached; a full cache is cleared.
MAX_KNOWN_PATHS = 10_000
#: The kernel does not accept longer paths.
MAX_PATH_BYTES = 4095
#: How long to wait for another process's lock before the write counts as failed and is retried.
LOCK_SECONDS = 10.0
_TAIL_BYTES = 64 * 1024
_NAME_ERRORS = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EILSEQ}
)
#: Errors of the host rather than of one file: other files cannot be written either.
_HOST_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})


class _Writing(msgspec.Struct):
    """The part of a batch for one file: its new content, if any, and the lines that follow it.

    Attributes:
        content: The new content; None appends to the file.
        lines: The lines.
    """

    content: bytes | None = None
    lines: list[bytes] = []


class _Content(msgspec.Struct, frozen=True, gc=False):
    """The content of a whole file."""

    data: bytes


class FilesystemSink(Sink):
    """One `sinks.filesystem.<name>`.

    Args:
        name: The instance's name.
        settings: The instance's section; `base_path` is relative to the working directory of this process.
        lock_seconds: How long to wait for another process's lock.
    """

    type: ClassVar[str] = "filesystem"
    max_batch_count = 4_000
    max_batch_bytes = 4 * 1024 * 1024

    def __init__(self, name: str, settings: FilesystemSinkSettings, *, lock_seconds: float = LOCK_SECONDS) -> None:
        super().__init__(name)
        self._what = f"sinks.filesystem.{name}"
        self._given = settings.base_path
        self._fsync = settings.fsync
        self._lock_seconds = lock_seconds
        self._root = b""
        self._base: BaseFolder | None = None
        self._known: dict[str, bytes] = {}
        self._open: OrderedDict[bytes, int] = OrderedDict()
        self._cleaned: set[tuple[int, int]] = set()
        self._thread: concurrent.futures.ThreadPoolExecutor | None = None

    async def connect(self) -> None:
        """Create the base path and check that it is writable.

        Raises:
            ConfigError: The base path cannot be created or is not writable.
        """
        await asyncio.to_thread(self._check)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, f"tidemill-files-{self.name}")

    def _check(self) -> None:
        try:
            Path(self._given).mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(
                f"{self._what}: base_path {self._given!r} is not a folder; remove that file, or change base_path"
            ) from error
        except OSError as error:
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be created: {error.strerror}") from error
        if not os.access(self._given, os.W_OK | os.X_OK):
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be written; check its permissions")
        self._root = os.fsencode(os.path.realpath(self._given))

    def encode(self, payload: FilePayload) -> Encoded:
        """Return the line without its line break, or the content, for the checked path.

        Raises:
            ValueError: The path is outside the base path, the data contains a line break, or the operation is unknown.
        """
        path = self._known.get(payload.path) or self._check_path(payload.path)
        if payload.op == "replace":
            text = payload.data.encode() if isinstance(payload.data, str) else self.to_json(payload.data)
            return Encoded(path, _Content(text), len(text))
        if payload.op != "append":
            raise ValueError(f"unknown op {payload.op!r:.50}; use append or replace")
        line = self.to_json(payload.data)
        # Only bytes and a model's own dump can contain a line break; JSON escapes it.
        if b"\n" in line:
            raise ValueError(
                f"{_show(path)}: data given as bytes contains a line break, so it is not one line; "
                "use op='replace' to write a whole file"
            )
        return Encoded(path, line, len(line) + 1)

    def _check_path(self, path: Any) -> bytes:
        """Return a path in its normal form, checked by its text alone; `open_parent` checks links."""
        if not isinstance(path, str) or not path or "\0" in path or path.endswith("/"):
            raise ValueError(f"path {shorten(repr(path))} is not a valid file name")
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"path {shorten(repr(path))} is not below the base path; use a relative one without '..'")
        # The file system's names that are not UTF-8 arrive with escaped bytes, which are restored here.
        normal = posixpath.normpath(path).encode("utf-8", "surrogateescape")
        name = posixpath.basename(normal)
        if normal == b"." or name.startswith(file_replacement.TEMPORARY.encode()):
            raise ValueError(f"path {shorten(repr(path))} is not a valid file name")
        if len(normal) > MAX_PATH_BYTES:
            raise ValueError(
                f"path {shorten(repr(path))} is {len(normal)} bytes long; at most {MAX_PATH_BYTES} are allowed"
            )
        if len(self._known) >= MAX_KNOWN_PATHS:
            self._known.clear()
        self._known[path] = normal
        return normal

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Write a batch; the payloads for one file are accepted or refused together.

        Raises:
            TargetMissingError: The base path is no longer a folder.
            RemoteError: The host failed, so no file could be written.
        """
        if self._thread is None:
            raise ConfigError(f"{self._what} is not connected")
        files: dict[bytes, _Writing] = {}
        for item in batch:
            writing = files.get(item.key)
            if writing is None:
                writing = files[item.key] = _Writing()
            if isinstance(item.body, _Content):
                # Earlier lines and content of this batch would be overwritten.
                writing.content = item.body.data
                writing.lines.clear()
            else:
                writing.lines.append(item.body)
        refusals = await asyncio.get_running_loop().run_in_executor(self._thread, self._write_all, files)
        if not refusals:
            return [None] * len(batch)
        return [refusals.get(item.key) for item in batch]

    async def close(self) -> None:
        """Wait for the current write, then close the files."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._close_all)
            thread.shutdown(wait=False)

    # -- the sink's thread ------------------------------------------------------------------------------------

    def _write_all(self, files: dict[bytes, _Writing]) -> dict[bytes, Refusal]:
        refusals: dict[bytes, Refusal] = {}
        host_errors = 0
        base = self._open_base()
        for path, writing in files.items():
            try:
                self._write(base, path, writing)
            except OutsideError as error:
                refusals[path] = Refusal(str(error), retryable=False)
            except OSError as error:
                text = f"{_show(path)}: {error.strerror or error}"
                refusals[path] = Refusal(text, retryable=error.errno not in _NAME_ERRORS)
                host_errors += error.errno in _HOST_ERRORS
        if host_errors == len(files):
            raise RemoteError(f"{self._what}: {text}")
        return refusals

    def _open_base(self) -> BaseFolder:
        """Return the base folder; reopen it if its path leads to another folder now.

        Raises:
            TargetMissingError: The base path is not a folder.
        """
        try:
            if self._base is None or not self._base.is_current():
                self._close_all()
                self._base = BaseFolder(self._root)
        except OSError as error:
            self._close_all()
            raise TargetMissingError(
                f"{self._what}: base_path {self._given!r} is no longer a folder ({error.strerror}); "
                "restore the folder, and writing resumes"
            ) from None
        return self._base

    def _write(self, base: BaseFolder, path: bytes, writing: _Writing) -> None:
        if writing.content is not None:
            with base.open_parent(path, fsync=self._fsync) as (folder, name):
                self._clean_up(folder, path)
                file_replacement.replace(folder, name, writing.content, fsync=self._fsync)
        if writing.lines:
            self._append(base, path, b"\n".join(writing.lines) + b"\n")

    def _clean_up(self, folder: int, path: bytes) -> None:
        """Remove the temporary files of killed processes, once per folder."""
        status = os.fstat(folder)
        if (status.st_dev, status.st_ino) not in self._cleaned:
            if len(self._cleaned) >= MAX_KNOWN_PATHS:
                self._cleaned.clear()
            self._cleaned.add((status.st_dev, status.st_ino))
            if removed := file_replacement.remove_left_over(folder):
                log.warning("removed half-written files that a killed process left", path=_show(path), files=removed)

    def _append(self, base: BaseFolder, path: bytes, data: bytes) -> None:
        descriptor = self._lock_file(base, path)
        try:
            start = self._repair(descriptor, path)
            try:
                file_replacement.write_whole(descriptor, data)
                if self._fsync:
                    os.fsync(descriptor)
            except OSError:
                # A refused batch leaves nothing behind; if the truncation fails too, the next append cuts off the torn
                # line.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, start)
                raise
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _lock_file(self, base: BaseFolder, path: bytes) -> int:
        """Lock the file that has this path now, and return its descriptor."""
        deadline = time.monotonic() + self._lock_seconds
        while True:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._open_file(base, path)
            else:
                self._open.move_to_end(path)
            _lock(descriptor, deadline)
            # Log rotation may have renamed or removed the file before it was locked.
            same = False
            try:
                same = _is_same_file(descriptor, posixpath.join(self._root, path))
            finally:
                if not same:
                    # Closing releases the lock in every case.
                    del self._open[path]
                    os.close(descriptor)
            if same:
                return descriptor
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "another process keeps replacing the file")

    def _open_file(self, base: BaseFolder, path: bytes) -> int:
        with base.open_parent(path, fsync=self._fsync) as (folder, name):
            flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            descriptor = os.open(name, flags, 0o644, dir_fd=folder)
            try:
                file_replacement.check_regular(os.fstat(descriptor))
                if self._fsync:
                    sync_folder(folder)
            except OSError:
                os.close(descriptor)
                raise
        self._open[path] = descriptor
        if len(self._open) > MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _repair(self, descriptor: int, path: bytes) -> int:
        """Cut off a torn last line; return the file's size."""
        size = os.fstat(descriptor).st_size
        if size == 0 or os.pread(descriptor, 1, size - 1) == b"\n":
            return size
        end = size
        while end > 0:
            begin = max(0, end - _TAIL_BYTES)
            found = os.pread(descriptor, end - begin, begin).rfind(b"\n")
            if found >= 0:
                end = begin + found + 1
                break
            end = begin
        os.ftruncate(descriptor, end)
        log.warning("cut off a torn line at the end of a file", path=_show(path), size_bytes=size - end)
        return end

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])
        base, self._base = self._base, None
        if base is not None:
            base.close()


def _show(path: bytes) -> str:
    return path.decode("utf-8", "backslashreplace")


def _lock(descriptor: int, deadline: float) -> None:
    """Lock by polling, because a wait inside flock could not be interrupted if the holder hangs."""
    pause = 0.0005
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "locked by another process for too long") from None
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        else:
            return


def _is_same_file(descriptor: int, path: bytes) -> bool:
    try:
        there = os.stat(path)  # noqa: PTH116 - once per batch and file
    except (FileNotFoundError, NotADirectoryError):
        return False
    here = os.fstat(descriptor)
    return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)
