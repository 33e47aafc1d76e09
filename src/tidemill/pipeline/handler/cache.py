"""The `self.cache` of a handler: a bounded memory, backed by one file per engine that is written in the background.

`core.pipeline.write_behind` decides what is in memory, what has to be written and what is valid; `cache_file` reads and
writes in a thread of its own. Values are stored as MessagePack, also in memory. So every read returns a fresh copy,
which is the same from memory and, after a restart, from the file; and a file cannot contain code.

Invariants: the event loop never waits for the disk. Values in memory are served whatever the disk does. The last flush
comes after the last hook.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pydantic
import structlog

from tidemill.config.settings import CacheSettings
from tidemill.core.errors import HandlerError, RemoteError
from tidemill.core.pipeline.write_behind import CacheEntry, Known, WriteBehind
from tidemill.pipeline.handler.cache_file import CacheFile
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.engine_tasks import EngineTasks

log = structlog.get_logger(__name__)

#: The time limit of the last flush; a disk that hangs must not keep an engine from stopping.
LAST_FLUSH_SECONDS = 15.0


class CacheStatistics(msgspec.Struct, frozen=True):
    """Statistics of a cache.

    Attributes:
        hits: Reads that found a value.
        misses: Reads that found none.
        entries: How many values are in memory.
    """

    hits: int
    misses: int
    entries: int


#: The statistics of an engine without a cache.
NO_CACHE_STATISTICS = CacheStatistics(0, 0, 0)


class Cache:
    """Values by key for the hooks of one engine, on its event loop; see `Handler.cache`.

    Keys are text. Values are everything that MessagePack supports: None, booleans, numbers (integers of 64 bits), text,
    bytes, lists, dicts, and times with a time zone. Dataclasses, msgspec Structs and pydantic models are read back as
    dicts, tuples and sets as lists, and other types that msgspec supports (dates, UUIDs, decimals) as text.

    Args:
        settings: Size, interval and folder.
        engine: The engine's permanent name, which is part of the file's name.
        tasks: Runs its tasks.
    """

    def __init__(self, settings: CacheSettings, engine: str, tasks: EngineTasks | None = None) -> None:
        self._tasks = tasks or EngineTasks()
        self._settings = settings
        self._file = CacheFile(Path(settings.path) / f"{engine}-cache.db")
        self._known = WriteBehind(settings.max_memory_entries)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_encode_model).encode
        self._full = asyncio.Event()
        #: Failed operations (read, write) and their errors.
        self._problems: dict[str, str] = {}
        self._flusher: asyncio.Task[NoReturn] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._open = False
        self._hits = 0
        self._misses = 0

    # -- for hooks --------------------------------------------------------------------------------------------

    def peek(self, key: str, default: Any = None) -> Any:
        """Return a value if it is in memory, without waiting; this does not count as a use of the value."""
        found = self._known.peek(check_key(key), time.time())
        return default if isinstance(found, Known) else msgspec.msgpack.decode(found)

    async def get(self, key: str, default: Any = None) -> Any:
        """Return a value, from memory or from the file."""
        found = await self._find(key)
        if isinstance(found, Known):
            self._misses += 1
            return default
        self._hits += 1
        return msgspec.msgpack.decode(found)

    async def _find(self, key: str) -> bytes | Known:
        self._check_open()
        found = self._known.get(check_key(key), time.time())
        while found is Known.UNKNOWN:
            load = self._known.begin_load(key)
            entry: CacheEntry | None = None
            try:
                entry = await self._in_thread(self._file.read, key)
                self._problems.pop("read", None)
            except RemoteError as error:
                self._failed("read", error)
            finally:
                found = self._known.end_load(load, entry, time.time())
        return found

    def set(self, key: str, value: Any, ttl: float | None = None) -> None:
        """Store a value. It can be read back immediately; the file is written in the background.

        Args:
            key: Its key.
            value: The value.
            ttl: Seconds, by the wall clock, until it expires; None: never.

        Raises:
            TypeError: The key is not text, or MessagePack does not support the value.
            ValueError: `ttl` is not a positive number.
        """
        entry = self.make_entry(key, value, ttl)
        self._known.set(key, entry)
        self._changed()

    def delete(self, key: str) -> None:
        """Delete a value if it exists."""
        self._check_open()
        self._known.delete(check_key(key))
        self._changed()

    def __contains__(self, key: object) -> bool:
        """Return whether a value is in memory, like `peek`."""
        return isinstance(key, str) and not isinstance(self._known.peek(key, time.time()), Known)

    # -- for the engine ---------------------------------------------------------------------------------------

    def make_entry(self, key: str, value: Any, ttl: float | None = None) -> CacheEntry:
        """Return the entry that `set` would store."""
        self._check_open()
        expires_at = math.inf
        if ttl is not None:
            if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0:
                raise ValueError(f"ttl must be a positive number of seconds or None, not {ttl!r}")
            expires_at = time.time() + ttl
        try:
            data = self._encode(value)
        except (msgspec.MsgspecError, OverflowError, TypeError) as error:
            raise TypeError(f"the cache cannot store the value of {key!r}: {error}") from error
        check_key(key)
        return CacheEntry(data, expires_at)

    async def look(self, key: str, default: Any = None) -> Any:
        """Return a value like `get`, without counting a hit or miss."""
        found = await self._find(key)
        return default if isinstance(found, Known) else msgspec.msgpack.decode(found)

    async def open(self) -> None:
        """Load the newest entries of the file; if it cannot be read, log that and start with an empty memory."""
        self._thread = ThreadPoolExecutor(1, "tidemill-cache")
        self._open = True
        try:
            limit = self._settings.max_memory_entries
            self._known.start(*await self._in_thread(self._file.read_newest, limit, time.time()))
        except RemoteError as error:
            self._failed("read", error)
        self._flusher = self._tasks.keep("the flushes of the cache", self._flush_regularly())

    def statistics(self) -> CacheStatistics:
        """Return the hits and misses so far, and how many values are in memory."""
        return CacheStatistics(self._hits, self._misses, len(self._known))

    def describe_wait(self) -> str | None:
        """Return why the file is not written, and the consequences; None: it is written."""
        if not self._problems:
            return None
        said, known = "; ".join(self._problems.values()), self._known
        return f"{said}; continuing in memory only: {known.unwritten} unwritten, {known.lost} lost"

    async def close(self) -> None:
        """Write the remaining changes, and close the file."""
        if not self._open:
            return
        self._open = False
        if self._flusher is not None:
            await self._tasks.stop(self._flusher)
        try:
            async with asyncio.timeout(LAST_FLUSH_SECONDS):
                if self._writing is not None:
                    await self._writing
                await self._write()
                await self._in_thread(self._file.close)
        except TimeoutError:
            log.error("the cache could not be written before the engine stopped", path=str(self._file.path))  # noqa: TRY400
        if self._known.unwritten:
            log.error(
                "cached values are lost: they were not written to the cache's file",
                path=str(self._file.path),
                values=self._known.unwritten,
            )
        self._thread.shutdown(wait=False)

    def _check_open(self) -> None:
        if not self._open:
            raise HandlerError("the cache is closed: this engine has stopped")

    def _changed(self) -> None:
        if self._known.is_full:
            self._full.set()

    async def _flush_regularly(self) -> NoReturn:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.flush_interval_seconds):
                    await self._full.wait()
            self._full.clear()
            # Shielded: a shutdown does not cancel a write in progress; the last flush waits for it.
            self._writing = self._tasks.run("a flush of the cache", self._write())
            await asyncio.shield(self._writing)

    async def _write(self) -> None:
        batch = self._known.take()
        if batch is None:
            return
        try:
            await self._in_thread(self._file.write, batch, time.time())
        except RemoteError as error:
            self._known.note_failed()
            self._failed("write", error)
        else:
            self._known.note_written()
            if self._problems:
                log.info("the cache's file is written again", path=str(self._file.path), lost=self._known.lost)
                self._problems.clear()

    def _failed(self, what: str, error: RemoteError) -> None:
        self._problems[what] = str(error)
        throttle(log, 30.0).error("the cache continues in memory only", path=str(self._file.path), error=str(error))

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


class NoCache:
    """Stands in for the cache where there is none, and raises an error that says why."""

    def __getattr__(self, name: str) -> Any:
        """Raise HandlerError."""
        if name.startswith("__"):
            raise AttributeError(name)  # pickle and inspect probe for these
        raise HandlerError(_NO_CACHE)

    def __contains__(self, key: object) -> bool:
        """Raise HandlerError."""
        raise HandlerError(_NO_CACHE)


_NO_CACHE = (
    "there is no cache here: set cache.enabled, and use it in engines only (from on_ready on, not in on_startup)"
)


def check_key(key: str) -> str:
    """Return a key if it is valid.

    Raises:
        TypeError: It is not text.
        UnicodeEncodeError: It contains a lone surrogate.
    """
    if not isinstance(key, str):
        raise TypeError(f"a cache key must be text, not {key!r}")
    if not key.isascii():
        key.encode()  # refuse lone surrogates here, in the hook that sent them, instead of in the file
    return key


def _encode_model(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"MessagePack does not support {type(value).__name__}")
