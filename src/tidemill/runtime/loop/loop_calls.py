"""Calls functions on an event loop from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], seconds: float) -> T:
    """Call a function on a loop and return its result.

    Args:
        loop: The loop, which must not be the loop of the calling thread.
        function: The function; it must not block, and its exception is raised here.
        seconds: How long to wait.

    Raises:
        TimeoutError: The loop does not answer, or has ended.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        if not answer.set_running_or_notify_cancel():
            return  # the caller no longer waits
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    try:
        loop.call_soon_threadsafe(call)
    except RuntimeError:
        raise TimeoutError from None
    try:
        return answer.result(seconds)
    except TimeoutError:
        answer.cancel()
        raise


def await_on_loop(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T], seconds: float) -> T:
    """Run a coroutine on a loop and return its result; it is cancelled if it takes too long.

    Args:
        loop: The loop, which must not be the loop of the calling thread.
        work: The coroutine; its exception is raised here.
        seconds: How long to wait.

    Raises:
        TimeoutError: The coroutine takes too long, or the loop has ended.
    """
    try:
        answer = asyncio.run_coroutine_threadsafe(work, loop)
    except RuntimeError:
        work.close()
        raise TimeoutError from None
    try:
        return answer.result(seconds)
    except TimeoutError:
        answer.cancel()
        raise
