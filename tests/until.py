"""Waits until something is so: the one place where tests poll.

The default limit holds on a machine that is ten times too busy, and is never reached where nothing is wrong. A test
that shows how fast something happens gives its own. What has been waited for long is looked at less often: a look takes
processor time from what is waited for.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from typing import TypeVar

ValueT = TypeVar("ValueT")

LIMIT_SECONDS = 60.0
#: The limit on a machine that is busier still; pytest ends a test later.
LONGEST_SECONDS = 180.0
#: Between two looks there is this part of the time waited so far, but not more than `_LONGEST_PAUSE` times the pause.
_PAUSE_PART, _LONGEST_PAUSE = 0.02, 5
#: What to say when it did not come true: a text, or a function that returns one (a log, say).
What = str | Callable[[], object]


def wait_until(
    condition: Callable[[], ValueT],
    seconds: float | None = None,
    *,
    what: What = "it",
    pause_seconds: float = 0.02,
) -> ValueT:
    """Call a condition until what it returns is true, and return that."""
    seconds = _find_limit() if seconds is None else seconds
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited >= seconds:
            raise AssertionError(_in_vain(seconds, what))
        time.sleep(_find_pause(pause_seconds, waited))
    return value


async def until(
    condition: Callable[[], ValueT],
    seconds: float | None = None,
    *,
    what: What = "it",
    pause_seconds: float = 0.002,
) -> ValueT:
    """Do the same while the event loop runs on."""
    seconds = _find_limit() if seconds is None else seconds
    began = time.monotonic()
    while not (value := condition()):
        waited = time.monotonic() - began
        if waited >= seconds:
            raise AssertionError(_in_vain(seconds, what))
        await asyncio.sleep(_find_pause(pause_seconds, waited))
    return value


def slack(seconds: float) -> float:
    """Return how long something may take that takes up to this long while nothing else wants the processors."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _find_limit() -> float:
    return max(LIMIT_SECONDS, min(LONGEST_SECONDS, slack(LIMIT_SECONDS / 4)))


def _find_pause(shortest: float, waited: float) -> float:
    return max(shortest, min(waited * _PAUSE_PART, shortest * _LONGEST_PAUSE))


def _in_vain(seconds: float, what: What) -> str:
    return f"waited {seconds:g} s in vain until {what if isinstance(what, str) else what()}"
