"""Runs blocking work of the web UI on a limited number of daemon threads, each call for a limited time.

Invariants: work for a page never delays the exit of the process. A call that takes too long, or that finds no free
thread, is answered with a problem. Work can check whether its time is over or its request has ended (`is_over`); its
thread counts against the limit until the work returns. Used on one event loop.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import inspect
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from fastapi.routing import APIRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from tidemill.web.problems import RequestProblem

#: How many calls may run at a time, and how long each may take.
MAX_THREADS = 8
CALL_SECONDS = 20.0
#: How long a call waits for a free thread.
WAIT_SECONDS = 5.0

CallP = ParamSpec("CallP")
AnswerT = TypeVar("AnswerT")


@dataclass(slots=True)
class _Call:
    ends_at: float
    ended: threading.Event = field(default_factory=threading.Event)


_CALL: contextvars.ContextVar[_Call | None] = contextvars.ContextVar("tidemill_web_call", default=None)
_WORKERS: contextvars.ContextVar[Workers] = contextvars.ContextVar("tidemill_web_workers")


def is_over() -> bool:
    """Return whether this thread's result is no longer wanted; False outside of `Workers`."""
    call = _CALL.get()
    return call is not None and (call.ended.is_set() or time.monotonic() >= call.ends_at)


class Workers:
    """Runs blocking calls.

    Args:
        threads: How many calls may run at a time.
        seconds: How long a call may take.
        wait_seconds: How long a call waits for a free thread.
    """

    def __init__(
        self, threads: int = MAX_THREADS, seconds: float = CALL_SECONDS, wait_seconds: float = WAIT_SECONDS
    ) -> None:
        self._seconds = seconds
        self._wait_seconds = wait_seconds
        self._free = asyncio.Semaphore(threads)

    async def run(self, function: Callable[CallP, AnswerT], *args: CallP.args, **kwargs: CallP.kwargs) -> AnswerT:
        """Return the result of a blocking function.

        Raises:
            Problem: No thread is free, or the call takes too long.
        """
        try:
            async with asyncio.timeout(self._wait_seconds):
                await self._free.acquire()
        except TimeoutError:
            text = "the web UI is busy with other requests; try again in a moment"
            raise RequestProblem(503, text, {"Retry-After": "5"}) from None
        call = _Call(time.monotonic() + self._seconds)
        answer = self._start(call, functools.partial(function, *args, **kwargs))
        try:
            async with asyncio.timeout(self._seconds):
                return await answer
        except TimeoutError:
            if not answer.cancelled():
                raise  # raised by the function
            text = f"the request took longer than {self._seconds:g} s; choose a shorter time range or more filters"
            raise RequestProblem(504, text) from None
        finally:
            call.ended.set()

    def _start(self, call: _Call, function: Callable[[], AnswerT]) -> asyncio.Future[AnswerT]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[AnswerT] = loop.create_future()

        def settle(value: AnswerT | None, error: BaseException | None) -> None:
            self._free.release()
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(value)  # type: ignore[arg-type]

        def work() -> None:
            value, error = None, None
            _CALL.set(call)
            try:
                value = function()
            except BaseException as raised:
                # A future rejects StopIteration, and would keep the frames of the thread alive.
                error = RuntimeError(repr(raised)) if isinstance(raised, StopIteration) else raised
            try:
                loop.call_soon_threadsafe(settle, value, error)
            except RuntimeError:
                return  # the server has stopped
            finally:
                del error

        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(work,), name="tidemill-web-work", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system has no more threads
            self._free.release()
            text = "the system cannot start another thread; try again later"
            raise RequestProblem(503, text, {"Retry-After": "30"}) from None
        return answer


class WithWorkers:
    """Gives the routes of an application their workers.

    Args:
        app: The application.
        workers: The workers of its routes.
    """

    def __init__(self, app: ASGIApp, workers: Workers) -> None:
        self._app = app
        self._workers = workers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _WORKERS.set(self._workers)
        await self._app(scope, receive, send)


async def run_blocking(function: Callable[CallP, AnswerT], *args: CallP.args, **kwargs: CallP.kwargs) -> AnswerT:
    """Return the result of a blocking function; see `Workers.run`."""
    return await _WORKERS.get().run(function, *args, **kwargs)


class BlockingRoute(APIRoute):
    """A route whose function, unless it is a coroutine function, runs on a thread of the workers."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **kwargs: Any) -> None:
        if not inspect.iscoroutinefunction(endpoint):
            endpoint = _wrap(endpoint)
        super().__init__(path, endpoint, **kwargs)


def _wrap(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    async def run(*args: Any, **kwargs: Any) -> Any:
        return await run_blocking(function, *args, **kwargs)

    return run
