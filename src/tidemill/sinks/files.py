"""Files as a sink: JSON lines appended below one folder, even by several processes to the same file, or whole files
that are replaced atomically.

Each file gets the lines of a batch in one write under an exclusive lock. Invariants: lines are neither mixed nor torn;
half a line that a crash left is cut off before anything is appended; a batch that could not be written completely
leaves nothing behind; readers of a file that is replaced see the old or the new one; nothing outside the base path is
ever opened (`sinks.base_folder`); no lock outlives its write. Writing happens on the sink's own thread.
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

from tidemill.config.sink_settings import FilesystemSinkSettings
from tidemill.core.errors import ConfigError, RemoteError, WrongPlaceError
from tidemill.sinks import file_replacement
from tidemill.sinks.base import Encoded, Refusal, Sink, shorten
from tidemill.sinks.base_folder import BaseFolder, OutsideError, sync_folder
from tidemill.sinks.payloads import FilePayload

log = structlog.get_logger(__name__)

#: Files kept open; the least recently used is closed first.
MAX_OPEN_FILES = 64
#: Paths that were checked; all are forgotten when there are too many.
MAX_KNOWN_PATHS = 10_000
#: The kernel does not accept longer ones.
MAX_PATH_BYTES = 4095
#: How long another process may lock a file before this write counts as failed, to be retried.
LOCK_SECONDS = 10.0
_TAIL_BYTES = 64 * 1024
_NAME_ERRORS = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EILSEQ}
)
#: Not the fault of one file: others cannot be written either.
_HOST_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})


class _Writing(msgspec.Struct):
    """What a batch has for one file: new content, if any, and the lines after it.

    Attributes:
        content: The new content; None: the file is appended to.
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
        settings: Its section; `base_path` is relative to the working directory of this process.
        lock_seconds: How long another process may lock a file.
    """

    type: ClassVar[str] = "filesystem"
    max_batch_count = 4_000
    max_batch_bytes = 4 * 1024 * 1024

    def __init__(self, name: str, settings: FilesystemSinkSettings, *, lock_seconds: float = LOCK_SECONDS) -> None:
        """Prepare; nothing is touched before `connect`."""
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
        """Create the base path and check that it can be written.

        Raises:
            ConfigError: It cannot.
        """
        await asyncio.to_thread(self._check)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, f"tidemill-files-{self.name}")

    def _check(self) -> None:
        try:
            Path(self._given).mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise ConfigError(
                f"{self._what}: base_path {self._given!r} is not a folder; create it there, or change base_path"
            ) from error
        except OSError as error:
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be created: {error.strerror}") from error
        if not os.access(self._given, os.W_OK | os.X_OK):
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be written; check its permissions")
        self._root = os.fsencode(os.path.realpath(self._given))

    def encode(self, payload: FilePayload) -> Encoded:
        """Return the line without its line break, or the content, for the checked path.

        Raises:
            ValueError: The path is outside the base path, the data has a line break of its own, or the operation is not
                known.
        """
        path = self._known.get(payload.path) or self._check_path(payload.path)
        if payload.op == "replace":
            text = payload.data.encode() if isinstance(payload.data, str) else self.to_json(payload.data)
            return Encoded(path, _Content(text), len(text))
        if payload.op != "append":
            raise ValueError(f"unknown op {payload.op!r:.50}; use append or replace")
        line = self.to_json(payload.data)
        # Only bytes and a model's own dump can have one; JSON escapes it.
        if b"\n" in line:
            raise ValueError(
                f"{_show(path)}: data given as bytes has a line break, so it is not one line; "
                "op='replace' writes a whole file"
            )
        return Encoded(path, line, len(line) + 1)

    def _check_path(self, path: Any) -> bytes:
        """Return a path in its normal form, checked by its text alone; links are checked when it is opened."""
        if not isinstance(path, str) or not path or "\0" in path or path.endswith("/"):
            raise ValueError(f"path {shorten(repr(path))} is not a valid file name")
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"path {shorten(repr(path))} is not below the base path; use a relative one without '..'")
        # Names that are not UTF-8 come from the file system with escaped bytes, and are restored here.
        normal = posixpath.normpath(path).encode("utf-8", "surrogateescape")
        name = posixpath.basename(normal)
        if normal == b"." or name.startswith(file_replacement.TEMPORARY.encode()):
            raise ValueError(f"path {shorten(repr(path))} is not a valid file name")
        if len(normal) > MAX_PATH_BYTES:
            raise ValueError(f"path {shorten(repr(path))} has {len(normal)} bytes, more than {MAX_PATH_BYTES}")
        if len(self._known) >= MAX_KNOWN_PATHS:
            self._known.clear()
        self._known[path] = normal
        return normal

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Write; the payloads for one file are accepted or refused together.

        Raises:
            WrongPlaceError: The base path is no longer a folder.
            RemoteError: No file could be written, through no fault of theirs.
        """
        if self._thread is None:
            raise ConfigError(f"{self._what} is not connected")
        files: dict[bytes, _Writing] = {}
        for item in batch:
            writing = files.get(item.key)
            if writing is None:
                writing = files[item.key] = _Writing()
            if isinstance(item.body, _Content):
                # What it replaces within the batch need not be written.
                writing.content = item.body.data
                writing.lines.clear()
            else:
                writing.lines.append(item.body)
        refusals = await asyncio.get_running_loop().run_in_executor(self._thread, self._write_all, files)
        if not refusals:
            return [None] * len(batch)
        return [refusals.get(item.key) for item in batch]

    async def close(self) -> None:
        """Wait for the current write, and close the files."""
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
        """Return the base folder, reopened if its path now leads to another one.

        Raises:
            WrongPlaceError: It is not a folder.
        """
        try:
            if self._base is None or not self._base.is_current():
                self._close_all()
                self._base = BaseFolder(self._root)
        except OSError as error:
            self._close_all()
            raise WrongPlaceError(
                f"{self._what}: base_path {self._given!r} is no longer a folder ({error.strerror}); "
                "nothing is written until it is one again"
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
        """Remove, once per folder, files that a killed process left."""
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
                # Nothing of a refused batch may remain; if even this fails, the next append cuts off the torn line.
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
            # The file may have been renamed or removed (log rotation) before it was locked.
            same = False
            try:
                same = _is_same_file(descriptor, posixpath.join(self._root, path))
            finally:
                if not same:
                    # Closing releases the lock, whatever happened to the file.
                    del self._open[path]
                    os.close(descriptor)
            if same:
                return descriptor
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the file is constantly replaced")

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
        log.warning("cut off half a line at the end of a file", path=_show(path), size_bytes=size - end)
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
    """Lock by polling: waiting inside flock could not be interrupted if the holder hangs."""
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
