"""`self.cache` of a handler: a memory of bounded size, backed by a file per engine that is written in the background.

`core.pipeline.write_behind` knows what is in memory, what has to be written and what counts; `cache_file` reads and
writes, in one thread of its own. Values are kept as MessagePack, in memory too: what is read is always a fresh copy,
and the same whether it comes from memory or, after a restart, from the file; and a file cannot bring code with it.

Invariants: the event loop never waits for the disk; whatever the disk does, what is in memory is served; the last
flush comes after the last hook.
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
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.log import throttle

log = structlog.get_logger(__name__)

#: At the stop the last flush may take this long; a disk that hangs must not keep an engine from ending.
LAST_FLUSH_SECONDS = 15.0


class CacheStatistics(msgspec.Struct, frozen=True):
    """What a cache was good for.

    Attributes:
        hits: Reads that found a value.
        misses: Reads that did not.
        entries: How many values are in memory.
    """

    hits: int
    misses: int
    entries: int


#: Where there is no cache.
NO_CACHE_STATISTICS = CacheStatistics(0, 0, 0)


class Cache:
    """Values by key, for the hooks of one engine, on its event loop.

    Keys are text. Values are what MessagePack can hold: None, booleans, numbers (integers of 64 bits), text, bytes,
    lists, dicts, and times with a time zone. Dataclasses, msgspec Structs and pydantic models come back as dicts,
    tuples and sets as lists, and what else msgspec takes (dates, UUIDs, decimals) as text.

    Args:
        settings: Size, interval and folder.
        engine: The engine's lasting name, which is part of the file's.
        tasks: Where its tasks run.
    """

    def __init__(self, settings: CacheSettings, engine: str, tasks: EngineTasks | None = None) -> None:
        """Open nothing yet."""
        self._tasks = tasks or EngineTasks()
        self._settings = settings
        self._file = CacheFile(Path(settings.path) / f"{engine}-cache.db")
        self._known = WriteBehind(settings.max_memory_entries)
        self._encode = msgspec.msgpack.Encoder(enc_hook=_encode_model).encode
        self._full = asyncio.Event()
        #: What fails, reading or writing, and why.
        self._problems: dict[str, str] = {}
        self._flusher: asyncio.Task[NoReturn] | None = None
        self._writing: asyncio.Future[None] | None = None
        self._open = False
        self._hits = 0
        self._misses = 0

    # -- for hooks --------------------------------------------------------------------------------------------

    def peek(self, key: str, default: Any = None) -> Any:
        """Return a value if it is in memory now; does not wait, and does not count as a use of it."""
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
        """Keep a value; reading it back works at once, the file follows.

        Args:
            key: Its name.
            value: What to keep.
            ttl: Seconds, by the wall clock, after which it has expired; None: it never expires.

        Raises:
            TypeError: The key is not text, or MessagePack cannot hold the value.
            ValueError: `ttl` is not a positive number.
        """
        entry = self.make_entry(key, value, ttl)
        self._known.set(key, entry)
        self._changed()

    def delete(self, key: str) -> None:
        """Forget a value, if there is one."""
        self._check_open()
        self._known.delete(check_key(key))
        self._changed()

    def __contains__(self, key: object) -> bool:
        """Tell whether a value is in memory now, as `peek` sees it."""
        return isinstance(key, str) and not isinstance(self._known.peek(key, time.time()), Known)

    # -- for the engine ---------------------------------------------------------------------------------------

    def make_entry(self, key: str, value: Any, ttl: float | None = None) -> CacheEntry:
        """Return a value as it would be kept; see `set`."""
        self._check_open()
        expires_at = math.inf
        if ttl is not None:
            if isinstance(ttl, bool) or not isinstance(ttl, (int, float)) or not ttl > 0:
                raise ValueError(f"ttl has to be a positive number of seconds or None, not {ttl!r}")
            expires_at = time.time() + ttl
        try:
            data = self._encode(value)
        except (msgspec.MsgspecError, OverflowError, TypeError) as error:
            raise TypeError(f"the value of {key!r} cannot be kept in the cache: {error}") from error
        check_key(key)
        return CacheEntry(data, expires_at)

    async def look(self, key: str, default: Any = None) -> Any:
        """Return a value as `get` does, without counting that."""
        found = await self._find(key)
        return default if isinstance(found, Known) else msgspec.msgpack.decode(found)

    async def open(self) -> None:
        """Read the newest entries of the file; if it cannot be read, start with an empty memory and log that."""
        self._thread = ThreadPoolExecutor(1, "tidemill-cache")
        self._open = True
        try:
            limit = self._settings.max_memory_entries
            self._known.start(*await self._in_thread(self._file.read_newest, limit, time.time()))
        except RemoteError as error:
            self._failed("read", error)
        self._flusher = self._tasks.keep("the flushes of the cache", self._flush_regularly())

    def statistics(self) -> CacheStatistics:
        """Return how it was used so far, and how many values are in memory now."""
        return CacheStatistics(self._hits, self._misses, len(self._known))

    def describe_stall(self) -> str | None:
        """Return why the file is not written, and what that means; None while it is."""
        if not self._problems:
            return None
        said, known = "; ".join(self._problems.values()), self._known
        return f"{said}; continuing in memory only: {known.unwritten} unwritten, {known.lost} lost"

    async def close(self) -> None:
        """Write what is left, and close the file."""
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
            log.error("the cache could not be written in time at the stop", path=str(self._file.path))  # noqa: TRY400
        if self._known.unwritten:
            log.error(
                "values of the cache are not in its file", path=str(self._file.path), values=self._known.unwritten
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
            # Shielded: a stop does not cancel a batch in flight; the last flush waits for it.
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
    """Takes the place of the cache where there is none, and says why."""

    def __getattr__(self, name: str) -> Any:
        """Refuse any use."""
        if name.startswith("__"):
            raise AttributeError(name)  # what pickle and inspect ask for
        raise HandlerError(_NO_CACHE)

    def __contains__(self, key: object) -> bool:
        """Refuse any use."""
        raise HandlerError(_NO_CACHE)


_NO_CACHE = (
    "there is no cache here: set cache.enabled; it lives in the engines, from on_ready on, and not in on_startup"
)


def check_key(key: str) -> str:
    """Return a key.

    Raises:
        TypeError: It is not text.
        UnicodeEncodeError: It has a lone surrogate.
    """
    if not isinstance(key, str):
        raise TypeError(f"a key of the cache has to be text, not {key!r}")
    if not key.isascii():
        key.encode()  # a lone surrogate is refused here, where it can be blamed, and not in the file
    return key


def _encode_model(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"MessagePack cannot hold a {type(value).__name__}")
