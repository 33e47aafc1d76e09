"""Waits until something is so: the one place where tests poll.

The default limit holds on a machine that is ten times too busy, and is never reached where nothing is wrong. A test
that shows how fast something happens gives its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

ValueT = TypeVar("ValueT")

LIMIT_SECONDS = 60.0
#: What to say when it did not come true: a text, or a function that returns one (a log, say).
What = str | Callable[[], object]


def wait_until(
    condition: Callable[[], ValueT],
    seconds: float = LIMIT_SECONDS,
    *,
    what: What = "it",
    pause_seconds: float = 0.02,
) -> ValueT:
    """Call a condition until what it returns is true, and return that."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(_in_vain(seconds, what))
        time.sleep(pause_seconds)
    return value


async def until(
    condition: Callable[[], ValueT],
    seconds: float = LIMIT_SECONDS,
    *,
    what: What = "it",
    pause_seconds: float = 0.002,
) -> ValueT:
    """Do the same while the event loop runs on."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() >= deadline:
            raise AssertionError(_in_vain(seconds, what))
        await asyncio.sleep(pause_seconds)
    return value


def _in_vain(seconds: float, what: What) -> str:
    return f"waited {seconds:g} s in vain until {what if isinstance(what, str) else what()}"
