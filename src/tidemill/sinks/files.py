"""Files as a sink: JSON lines appended below one folder, by several processes to the same file if need be.

Each file gets the lines of a batch in one write under an exclusive lock. Invariants: no line is mixed with another
or torn; half a line that a crash left is cut off before anything is appended; a batch that could not be written
whole leaves nothing behind; nothing outside the base path is ever opened. Writing happens on the sink's own thread.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import fcntl
import os
import posixpath
import stat
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import structlog

from tidemill.config.settings import FilesystemSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.sinks.base import Encoded, Refusal, Sink, to_json
from tidemill.sinks.payloads import FilePayload

log = structlog.get_logger(__name__)

#: Files kept open, the least recently used is closed first.
MAX_OPEN_FILES = 64
#: Paths whose form was checked; forgotten together when there are too many.
MAX_KNOWN_PATHS = 10_000
#: How long another process may hold a file before its lines are tried again later.
LOCK_SECONDS = 10.0
_TAIL_BYTES = 64 * 1024
_NAME_ERRORS = frozenset(
    {errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.EILSEQ}
)
#: Not the fault of one file: no other one can be written either.
_HOST_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE})


class FilesystemSink(Sink):
    """One `sinks.filesystem.<name>`.

    Args:
        name: The instance's name.
        settings: Its section; `base_path` is taken as it is given, relative to this process.
        lock_seconds: How long another process may hold a file.
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
        self._base = ""
        self._known: dict[str, str] = {}
        self._open: OrderedDict[str, int] = OrderedDict()
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
            raise ConfigError(f"{self._what}: base_path {self._given!r} is not a folder") from error
        except OSError as error:
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be created: {error.strerror}") from error
        if not os.access(self._given, os.W_OK | os.X_OK):
            raise ConfigError(f"{self._what}: base_path {self._given!r} cannot be written; check its permissions")
        self._base = os.path.realpath(self._given)

    def encode(self, payload: FilePayload) -> Encoded:
        """Return the line, without its end, for the checked path.

        Raises:
            ValueError: The path leaves the base path, or the data has a line break of its own.
        """
        path = self._known.get(payload.path) or self._checked(payload.path)
        line = to_json(payload.data)
        # Only bytes and a model's own dump can have one; JSON escapes it.
        if b"\n" in line:
            raise ValueError(f"{path}: data given as bytes has a line break, so it is not one line")
        return Encoded(path, line, len(line) + 1)

    def _checked(self, path: str) -> str:
        """Return a path in its normal form, judged by its text alone; links are looked at when it is opened."""
        if not isinstance(path, str) or not path or "\0" in path or path.endswith("/"):
            raise ValueError(f"path {path!r} is no name of a file")
        if path.startswith("/") or ".." in path.split("/"):
            raise ValueError(f"path {path!r} is not below the base path; use a relative one without '..'")
        normal = posixpath.normpath(path)
        if normal == ".":
            raise ValueError(f"path {path!r} is no name of a file")
        if len(self._known) >= MAX_KNOWN_PATHS:
            self._known.clear()
        self._known[path] = normal
        return normal

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Append; the lines of one file are taken or refused together.

        Raises:
            RemoteError: No file could be written, and that was none of theirs' fault.
        """
        if self._thread is None:
            raise ConfigError(f"{self._what} is not connected")
        lines: dict[str, list[bytes]] = {}
        for item in batch:
            path = item.key
            if path in lines:
                lines[path].append(item.body)
            else:
                lines[path] = [item.body]
        refusals = await asyncio.get_running_loop().run_in_executor(self._thread, self._append_all, lines)
        if not refusals:
            return [None] * len(batch)
        return [refusals.get(item.key) for item in batch]

    async def close(self) -> None:
        """Wait for the write that is going on, and close the files."""
        thread, self._thread = self._thread, None
        if thread is not None:
            await asyncio.get_running_loop().run_in_executor(thread, self._close_all)
            thread.shutdown(wait=False)

    # -- the sink's thread ------------------------------------------------------------------------------------

    def _append_all(self, lines: dict[str, list[bytes]]) -> dict[str, Refusal]:
        refusals: dict[str, Refusal] = {}
        host_errors = 0
        for path, of_path in lines.items():
            data = b"\n".join(of_path) + b"\n"
            try:
                self._append(path, data)
            except _OutsideError as error:
                refusals[path] = Refusal(str(error), retryable=False)
            except OSError as error:
                text = f"{path}: {error.strerror or error}"
                refusals[path] = Refusal(text, retryable=error.errno not in _NAME_ERRORS)
                host_errors += error.errno in _HOST_ERRORS
        if host_errors == len(lines):
            raise RemoteError(f"{self._what}: {text}")
        return refusals

    def _append(self, path: str, data: bytes) -> None:
        descriptor = self._locked(path)
        try:
            start = self._repaired(descriptor, path)
            try:
                _write_whole(descriptor, data)
                if self._fsync:
                    os.fsync(descriptor)
            except OSError:
                # Nothing of a refused batch may stay; if even this fails, the next append cuts the torn line.
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, start)
                raise
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def _locked(self, path: str) -> int:
        """Return the descriptor of the file that has this path now, exclusively locked."""
        deadline = time.monotonic() + self._lock_seconds
        while True:
            descriptor = self._open.get(path)
            if descriptor is None:
                descriptor = self._opened(path)
            else:
                self._open.move_to_end(path)
            _lock(descriptor, deadline)
            # The file may have been renamed or removed (log rotation) before the lock was ours.
            if _same_file(descriptor, posixpath.join(self._base, path)):
                return descriptor
            del self._open[path]
            os.close(descriptor)
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "the file is replaced all the time")

    def _opened(self, path: str) -> int:
        real = os.path.realpath(posixpath.join(self._base, path))
        if not real.startswith(self._base.rstrip("/") + "/"):
            raise _OutsideError(f"path {path!r} leads out of the base path by a link")
        parent = posixpath.dirname(real)
        Path(parent).mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(real, flags, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no regular file")
        if self._fsync:
            _fsync_folder(parent)
        self._open[path] = descriptor
        if len(self._open) > MAX_OPEN_FILES:
            os.close(self._open.popitem(last=False)[1])
        return descriptor

    def _repaired(self, descriptor: int, path: str) -> int:
        """Cut a torn last line off; return the file's size."""
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
        log.warning("half a line at the end of a file was cut off", path=path, size_bytes=size - end)
        return end

    def _close_all(self) -> None:
        while self._open:
            os.close(self._open.popitem()[1])


class _OutsideError(Exception):
    """A path leads out of the base path."""


def _lock(descriptor: int, deadline: float) -> None:
    """Take the lock by trying: a wait inside flock could not be ended when its holder hangs."""
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


def _same_file(descriptor: int, path: str) -> bool:
    try:
        there = os.stat(path)  # noqa: PTH116 - once per batch and file
    except FileNotFoundError:
        return False
    here = os.fstat(descriptor)
    return (there.st_ino, there.st_dev) == (here.st_ino, here.st_dev)


def _write_whole(descriptor: int, data: bytes) -> None:
    """Write everything: the kernel may take a part only, when the disk is nearly full."""
    written = os.write(descriptor, data)
    if written < len(data):
        view = memoryview(data)
        while written < len(data):
            written += os.write(descriptor, view[written:])


def _fsync_folder(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
