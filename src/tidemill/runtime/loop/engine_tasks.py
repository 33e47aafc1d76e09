"""Owns all asyncio tasks of an engine, so that none of them ends unnoticed.

All tasks besides the engine itself are started here: the link's beats, senders, periodic hooks, the runners of hooks,
the cache, file writers. Callbacks of the event loop (the intake, timers, the pipes of programs) have no task; if one of
tidemill's callbacks raises, the loop reports it to this module.

Invariants: a task that ends without having been stopped is named once, in the log and to `on_fault`. A task that was
stopped here, or that may return and returned, is not reported. The loop's own error handler is restored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, NoReturn, TypeVar

import structlog

from tidemill.core.errors import describe_error

log = structlog.get_logger(__name__)

T = TypeVar("T")


class EngineTasks:
    """All tasks of one engine.

    Args:
        on_fault: Called on the loop with the ended part and the reason; the engine cannot continue without it.
    """

    def __init__(self, on_fault: Callable[[str], None] = lambda _: None) -> None:
        self._on_fault = on_fault
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopped: set[asyncio.Task[Any]] = set()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._handler: Any = None

    def keep(self, name: str, course: Coroutine[Any, Any, NoReturn]) -> asyncio.Task[NoReturn]:
        """Start a task that runs until it is stopped."""
        return self._start(name, course, endless=True)

    def run(self, name: str, course: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that may return at any time, but must neither raise nor be cancelled by other code."""
        return self._start(name, course, endless=False)

    def _start(self, name: str, course: Coroutine[Any, Any, T], *, endless: bool) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(course, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_kept_ended if endless else self._on_ended)
        return task

    def is_ending(self, task: asyncio.Task[Any]) -> bool:
        """Return whether a task was cancelled by code that is allowed to."""
        return self._closed or task in self._stopped or task not in self._tasks

    def cancel(self, task: asyncio.Task[Any]) -> None:
        """Cancel a task whose end is expected from now on."""
        if not task.done():
            self._stopped.add(task)
            task.cancel()

    async def stop(self, *tasks: asyncio.Task[Any]) -> None:
        """Cancel tasks and wait for their ends."""
        for task in tasks:
            self.cancel(task)
        if tasks:
            await asyncio.wait(tasks)

    def close(self) -> None:
        """Cancel all running tasks; from now on no end is reported."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._loop is not None:
            self._loop.set_exception_handler(self._handler)
            self._loop = None

    def watch(self) -> None:
        """Watch the callbacks of the running loop as well, until `close`."""
        self._loop = asyncio.get_running_loop()
        self._handler = self._loop.get_exception_handler()
        self._loop.set_exception_handler(self._on_loop_error)

    def fault(self, name: str, error: BaseException) -> None:
        """Report the failure of a part that the engine cannot do without."""
        self._tell(f"{name} failed: {describe_error(error)}", error)

    def _on_kept_ended(self, task: asyncio.Task[Any]) -> None:
        self._on_ended(task, endless=True)

    def _on_ended(self, task: asyncio.Task[Any], *, endless: bool = False) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()  # retrieved, or asyncio would log it
        if self._closed or task in self._stopped:
            self._stopped.discard(task)
            if error is not None:
                log.warning("a task of the engine failed while it was stopped", task=task.get_name(), exc_info=error)
        elif error is not None:
            self.fault(task.get_name(), error)
        elif task.cancelled():
            self._tell(f"{task.get_name()} was cancelled, which only the engine may do", None)
        elif endless:
            self._tell(f"{task.get_name()} returned, although it must not end", None)

    def _tell(self, text: str, error: BaseException | None) -> None:
        if self._closed:
            return
        log.error("a part of the engine ended unexpectedly", what=text, exc_info=error)
        self._on_fault(f"a part of the engine ended unexpectedly: {text}")

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        of_a_future = "future" in context or "task" in context
        if error is not None and not of_a_future and _is_ours(error.__traceback__):
            self.fault(context.get("message", "a callback"), error)
        elif self._handler is not None:
            self._handler(loop, context)
        else:
            loop.default_exception_handler(context)


def _is_ours(traceback: TracebackType | None) -> bool:
    """Return whether the loop's callback belongs to tidemill, judged by the first frame outside asyncio."""
    while traceback is not None:
        module = traceback.tb_frame.f_globals.get("__name__", "")
        if module.partition(".")[0] != "asyncio":
            return bool(module.partition(".")[0] == "tidemill")
        traceback = traceback.tb_next
    return False
