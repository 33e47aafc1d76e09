"""Calls functions on an event loop from other threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[[], T], seconds: float) -> T:
    """Return what a function returns on a loop.

    Args:
        loop: The loop; not that of the calling thread.
        function: It must not block; what it raises is raised here.
        seconds: How long to wait.

    Raises:
        TimeoutError: The loop does not answer, or has ended.
    """
    answer: concurrent.futures.Future[T] = concurrent.futures.Future()

    def call() -> None:
        if not answer.set_running_or_notify_cancel():
            return  # nobody waits any more
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
    """Return what a coroutine returns on a loop; it is cancelled if that takes too long.

    Args:
        loop: The loop; not that of the calling thread.
        work: What it raises is raised here.
        seconds: How long to wait.

    Raises:
        TimeoutError: It takes too long, or the loop has ended.
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
