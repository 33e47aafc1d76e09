"""A shared stream over one folder: every new or changed file, once it is complete.

Notifications of the operating system (`watchfiles`, on its own thread) only say where to look; what is found there
counts. The whole folder is also scanned regularly, so a lost notification or a replaced folder causes a delay at most.
Files that exist when the stream starts are not reported; `look` lists them.

Invariants: no file that appears after the first `Looked` is left out; no version of a file is yielded twice; a file is
yielded once it was unchanged for `settle_seconds`; nothing blocks the loop, and the thread ends with the stream.
"""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import structlog

from tidemill.core.errors import ConfigError, describe_error
from tidemill.core.triggers.stable_files import StableFiles, Version

log = structlog.get_logger(__name__)

#: How often `Looked` is yielded; rarely, because each one occupies a slot in the queues of slow subscribers.
LOOKED_SECONDS = 60.0
_MISSING_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class DirectorySettings:
    """The folder to watch, and the settings of the watch.

    Attributes:
        path: The folder.
        recursive: Whether to include subfolders.
        settle_seconds: How long a file must be unchanged to count as complete.
        rescan_seconds: The interval of full scans, regardless of the notifications of the operating system.
        missing: What to do if the folder does not exist: `fail`, or `wait` for it.
    """

    path: str
    recursive: bool = False
    settle_seconds: float = 1.0
    rescan_seconds: float = 10.0
    missing: Literal["fail", "wait"] = "fail"

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: A value is out of bounds.
        """
        if not self.path:
            raise ValueError("path is empty; give the folder to watch")
        if self.settle_seconds < 0:
            raise ValueError(f"settle_seconds must not be negative, got {self.settle_seconds}")
        if self.rescan_seconds <= 0:
            raise ValueError(f"rescan_seconds must be positive, got {self.rescan_seconds}")
        if self.missing not in ("fail", "wait"):
            raise ValueError(f"missing must be fail or wait, got {self.missing!r}")


class FoundFile(msgspec.Struct, frozen=True):
    """A complete file.

    Attributes:
        path: The path relative to the folder.
        version: Identifies the state of the file.
    """

    path: str
    version: Version


class Looked(msgspec.Struct, frozen=True):
    """A raw event that says: from now on, every file that appears will be yielded.

    Attributes:
        at: The time of the last scan, in seconds of the loop's clock.
    """

    at: float


def look(settings: DirectorySettings) -> dict[str, Version]:
    """Return the files of a folder by their path in it; call it in a thread.

    Raises:
        FileNotFoundError: The folder does not exist.
        OSError: The folder cannot be read.
    """
    found: dict[str, Version] = {}
    folders = [""]
    while folders:
        folder = folders.pop()
        try:
            entries = list(os.scandir(Path(settings.path, folder)))
        except (FileNotFoundError, NotADirectoryError, PermissionError):
            if not folder:
                raise
            continue  # a subfolder that was removed in the meantime, or cannot be read
        for entry in entries:
            path = f"{folder}/{entry.name}" if folder else entry.name
            if settings.recursive and entry.is_dir(follow_symlinks=False):
                folders.append(path)
            elif (version := _read_entry(entry)) is not None:
                found[path] = version
    return found


async def look_twice(settings: DirectorySettings) -> list[tuple[str, Version]]:
    """Return the files that are unchanged between two scans, oldest first; none if the folder is missing."""
    try:
        first = await asyncio.to_thread(look, settings)
        await asyncio.sleep(settings.settle_seconds)
        second = await asyncio.to_thread(look, settings) if settings.settle_seconds else first
    except (FileNotFoundError, NotADirectoryError):
        return []
    same = [(path, version) for path, version in second.items() if first.get(path) == version]
    return sorted(same, key=lambda item: (item[1], item[0]))


async def directory_stream(settings: DirectorySettings) -> AsyncIterator[FoundFile | Looked]:
    """Yield the new files of a folder, for `open_shared_stream`.

    Raises:
        ConfigError: The folder is missing, and the settings do not say to wait for it.
        OSError: The folder cannot be read.
    """
    watch = _Watch(settings)
    try:
        async with aclosing(watch.run()) as news:
            async for found in news:
                yield found
    finally:
        await watch.close()


class _Watch:
    """The state of one stream, with its thread."""

    def __init__(self, settings: DirectorySettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._stable_files = StableFiles(settings.settle_seconds)
        self._bell = asyncio.Event()
        self._news: set[str] = set()
        self._thread: _WatchThread | None = None
        self._folder: tuple[int, int] | None = None

    async def run(self) -> AsyncGenerator[FoundFile | Looked, None]:
        """Yield new files forever."""
        files = await self._look_at_all()
        self._stable_files.know_all(files, self._loop.time())
        looked = said_at = self._loop.time()
        yield Looked(looked)
        while True:
            await self._wait_for_news(looked + self._settings.rescan_seconds)
            now = self._loop.time()
            if now >= looked + self._settings.rescan_seconds:
                files = await self._look_at_all()
                looked = now
                self._stable_files.see_all(files, self._loop.time())
            await self._look_at_news()
            for path, version in self._stable_files.take(self._loop.time()):
                yield FoundFile(path, version)
            if looked >= said_at + LOOKED_SECONDS:
                said_at = looked
                yield Looked(looked)

    async def close(self) -> None:
        """Stop the thread."""
        if self._thread is not None:
            thread, self._thread = self._thread, None
            await thread.end()

    async def _look_at_all(self) -> dict[str, Version]:
        while True:
            try:
                await self._watch_folder()
                return await asyncio.to_thread(look, self._settings)
            except (FileNotFoundError, NotADirectoryError) as error:
                if self._settings.missing == "fail":
                    raise ConfigError(
                        f"the folder {self._settings.path!r} does not exist; create it, or set missing: wait"
                    ) from error
            if self._folder is not None:
                log.warning("a watched folder was removed; waiting for it", path=self._settings.path)
                self._folder = None
            await asyncio.sleep(_MISSING_SECONDS)

    async def _watch_folder(self) -> None:
        """Start a thread that watches the folder now at the path, unless one already does."""
        found = await asyncio.to_thread(os.stat, self._settings.path)
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(self._settings.path)
        folder = (found.st_dev, found.st_ino)
        if self._thread is None or folder != self._folder:
            await self.close()
            self._folder = folder
            self._thread = _WatchThread(self._settings, self._loop, self._on_news)
            await self._thread.wait_watching()

    def _on_news(self, paths: set[str]) -> None:
        self._news |= paths
        self._bell.set()

    async def _wait_for_news(self, until: float) -> None:
        due = self._stable_files.due
        until = until if due is None else min(until, due)
        try:
            async with asyncio.timeout_at(until):
                await self._bell.wait()
        except TimeoutError:
            pass
        self._bell.clear()

    async def _look_at_news(self) -> None:
        # Notifications may be late, so check files once more right before they are reported.
        paths, self._news = self._news.union(self._stable_files.list_candidates(self._loop.time())), set()
        if paths:
            versions = await asyncio.to_thread(_read_versions, self._settings, paths)
            now = self._loop.time()
            for path, version in versions.items():
                self._stable_files.see(path, version, now)


class _WatchThread:
    """A thread that watches one folder; if the watch fails, the thread exits, and only the regular scans remain."""

    def __init__(
        self, settings: DirectorySettings, loop: asyncio.AbstractEventLoop, on_news: Callable[[set[str]], None]
    ) -> None:
        self._settings = settings
        self._loop = loop
        self._on_news = on_news
        self._stop = threading.Event()
        self._began = asyncio.Event()
        self._ended = asyncio.Event()
        # A dedicated thread: it runs as long as the stream and would occupy a thread of a pool.
        threading.Thread(target=self._run, name=f"directory[{settings.path}]", daemon=True).start()

    async def wait_watching(self) -> None:
        """Wait until the thread notices changes."""
        await self._began.wait()

    async def end(self) -> None:
        """Stop the thread, and wait until it has exited."""
        self._stop.set()
        await asyncio.shield(self._ended.wait())

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:
            log.warning(
                "cannot watch a folder; only regular scans will find new files",
                path=self._settings.path,
                every_seconds=self._settings.rescan_seconds,
                error=describe_error(error),
            )
        finally:
            self._tell(self._began.set)
            self._tell(self._ended.set)

    def _watch(self) -> None:
        import watchfiles

        root = os.path.realpath(self._settings.path)
        changes = watchfiles.watch(
            root,
            watch_filter=None,
            stop_event=self._stop,
            recursive=self._settings.recursive,
            raise_interrupt=False,
            ignore_permission_denied=True,
            rust_timeout=100,
            yield_on_timeout=True,
        )
        for changed in changes:
            self._tell(self._began.set)
            if changed:
                self._tell(self._on_news, {os.path.relpath(path, root) for _, path in changed})

    def _tell(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            # The loop is closed, so nothing waits for news any more.
            self._stop.set()


def _read_versions(settings: DirectorySettings, paths: set[str]) -> dict[str, Version | None]:
    """Return the current versions of single files; None for those that are gone."""
    found: dict[str, Version | None] = {}
    for path in paths:
        try:
            found[path] = _build_read_entry(Path(settings.path, path).stat())
        except OSError:
            found[path] = None
    return found


def _read_entry(entry: os.DirEntry[str]) -> Version | None:
    try:
        return _build_read_entry(entry.stat())
    except OSError:
        return None  # removed in the meantime, or a broken link


def _build_read_entry(found: os.stat_result) -> Version | None:
    if not stat.S_ISREG(found.st_mode):
        return None
    return Version(found.st_mtime_ns, found.st_size, found.st_ino)
