"""The services that an engine offers its handler besides hooks: cache, periodic hooks, threads for blocking calls, and
a watch over the event loop that names the hook that blocks it.

Services open before `on_ready` and close after the last `on_revoke`, so that every hook of an engine has them.
Invariants: no use of a service can end the engine; `close` restores the handler.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import CodeType
from typing import Any

import msgspec
import structlog

from tidemill.config.settings import Settings
from tidemill.core.blocking import BlockCause
from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import HOOKS, Handler
from tidemill.pipeline.handler.cache import NO_CACHE_STATISTICS, Cache, CacheStatistics
from tidemill.pipeline.handler.periodic import PeriodicRunner, PeriodicStatistics, find_periodic_hooks
from tidemill.pipeline.hooks import HookCalls, latest
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.loop.blockwatch import Block, BlockWatch
from tidemill.runtime.loop.durations import Durations
from tidemill.runtime.loop.engine_tasks import EngineTasks

log = structlog.get_logger(__name__)


class ServiceStatistics(msgspec.Struct, frozen=True):
    """Statistics of a handler's services.

    Attributes:
        periodic: The runs of its periodic hooks.
        cache: The uses of its cache; zeros without one.
        loop_blocks: How often the event loop was blocked for too long.
        hooks: How long the calls of each hook took.
        loop_lags: How late the event loop was; empty if the watch is off.
    """

    periodic: PeriodicStatistics
    cache: CacheStatistics
    loop_blocks: int
    hooks: dict[str, Durations]
    loop_lags: Durations


class Services:
    """The services of one engine.

    Args:
        settings: The configuration.
        handler: The handler; open services are attributes of it.
        identity: The engine's identity.
        tasks: Runs the services' tasks.
        calls: Where hooks are registered while they run.
    """

    def __init__(
        self,
        settings: Settings,
        handler: Handler[Any, Any],
        identity: EngineIdentity,
        tasks: EngineTasks,
        calls: HookCalls,
    ) -> None:
        self._handler = handler
        self._calls = calls
        self._offload = Offload(settings.executor.offload_threads)
        self.periodic = PeriodicRunner(handler, identity.slot, tasks, calls)
        self._cache = Cache(settings.cache, identity.instance_id, tasks) if settings.cache.enabled else None
        self._seconds = settings.executor.block_seconds
        self._watch: HookWatch | None = None
        #: Called with hook, task and seconds when the event loop is blocked; on any thread.
        self.on_block: Callable[[str | None, str | None, float], None] | None = None

    async def open(self) -> None:
        """Open the services and attach them to the handler."""
        if self._seconds:
            self._watch = HookWatch(self._handler, self._seconds, self.on_block)
            self._watch.start()
        self._handler.__dict__["_offload"] = self._offload
        if self._cache is not None:
            if self._handler.cache is not Handler.cache:
                name = type(self._handler).__name__
                raise HandlerError(
                    f"{name} has an attribute 'cache' of its own: rename it, or leave cache.enabled false"
                )
            await self._cache.open()
            self._handler.__dict__["cache"] = self._cache

    def start_periodic(self) -> None:
        self.periodic.start()

    async def stop_periodic(self) -> None:
        await self.periodic.stop()

    async def close(self) -> None:
        """Detach the services from the handler, and write the cache."""
        if self._watch is not None:
            self._watch.close()
        for name, mine in (("_offload", self._offload), ("cache", self._cache)):
            if mine is not None and self._handler.__dict__.get(name) is mine:
                del self._handler.__dict__[name]
        self._offload.close()
        if self._cache is not None:
            await self._cache.close()

    def describe_wait(self) -> dict[str, str]:
        """Return the services that do not work, with the reasons."""
        found = {f"periodic {name}": f"stopped for good: {error}" for name, error in self.periodic.stopped.items()}
        cache = self._cache.describe_wait() if self._cache is not None else None
        return found if cache is None else {**found, "cache": cache}

    def statistics(self) -> ServiceStatistics:
        return ServiceStatistics(
            self.periodic.statistics(),
            self._cache.statistics() if self._cache is not None else NO_CACHE_STATISTICS,
            self._watch.blocks if self._watch is not None else 0,
            {name: durations.copy() for name, durations in self._calls.durations.items()},
            self._watch.lags.copy() if self._watch is not None else Durations(),
        )


class Offload:
    """A limited number of threads for a handler's blocking calls; further calls wait."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, "tidemill-offload")

    async def __call__(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a function in one of the threads."""
        context = contextvars.copy_context()
        call = functools.partial(context.run, _call_guarded, function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    def close(self) -> None:
        """Start no more calls; running ones cannot be stopped from here."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _call_guarded(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except StopIteration as error:  # a future cannot carry StopIteration: the caller would wait forever
        raise HandlerError(f"an offloaded call raised StopIteration({error.value!r})") from error


class HookWatch:
    """Names the hook that blocks the event loop.

    Args:
        handler: The handler with the hooks.
        seconds: How long a hook may occupy the loop without a break.
        on_block: Called with hook, task and seconds when a hook exceeds that; on any thread.
    """

    def __init__(
        self,
        handler: Handler[Any, Any],
        seconds: float,
        on_block: Callable[[str | None, str | None, float], None] | None = None,
    ) -> None:
        self._tell = on_block
        self._names: dict[CodeType, str] = {}
        for name in (*HOOKS, *find_periodic_hooks(handler)):
            method: Any = getattr(handler, name)
            while method is not None:  # any layer of a decorated hook identifies it
                with contextlib.suppress(AttributeError):
                    self._names[method.__code__] = name
                method = getattr(method, "__wrapped__", None)
        self._watch = BlockWatch(seconds, self._on_block, self._on_over)
        self._hook: str | None = None
        #: How often code in the loop blocked it.
        self.blocks = 0

    @property
    def lags(self) -> Durations:
        """How late the loop was."""
        return self._watch.lags

    def start(self) -> None:
        """Start to watch the running loop."""
        self._ident = threading.get_ident()
        self._watch.start()

    def close(self) -> None:
        self._watch.close()

    def _on_block(self, block: Block) -> None:
        """Log the blocking hook; called on the watching thread during the block, if that thread could run."""
        if block.cause is BlockCause.STARVED:
            return
        self._hook = self._find_running_hook() if block.stack else self._find_latest_hook()
        self.blocks += 1
        if self._tell is not None:
            self._tell(self._hook, block.task, block.seconds)
        log.warning(
            "a hook blocks the event loop; use self.offload for blocking calls"
            if self._hook
            else "code outside hooks blocks the event loop",
            hook=self._hook,
            task=block.task,
            seconds=round(block.seconds, 3),
            stack=block.stack,
        )

    def _on_over(self, block: Block) -> None:
        if block.cause is not BlockCause.STARVED:
            log.warning("the event loop is running again", hook=self._hook, seconds=round(block.seconds, 3))

    def _find_latest_hook(self) -> str | None:
        return self._names.get(getattr(latest[0], "cr_code", None))  # type: ignore[arg-type]

    def _find_running_hook(self) -> str | None:
        frame = sys._current_frames().get(self._ident)
        found = None
        while frame is not None:
            found = self._names.get(frame.f_code, found)  # the outermost hook: a hook may call the code of another
            frame = frame.f_back
        return found
