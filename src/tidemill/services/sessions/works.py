"""Runs the parts of a service side by side until it is stopped, or one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from tidemill.core.errors import RemoteError

#: A part of a service: its name, and the work, which runs until it is cancelled.
Work = tuple[str, Coroutine[Any, Any, None]]


async def run_works(works: Sequence[Work], stop: asyncio.Event, end: Callable[[], Awaitable[None]]) -> None:
    """Run all parts until `stop` is set; then end them.

    Args:
        works: The parts.
        stop: Set when the service is to stop.
        end: Ends in order what must not be cancelled; awaited before the parts are cancelled.

    Raises:
        RemoteError: A part ended by itself; or the error of the part that failed.
    """
    tasks = [asyncio.create_task(work, name=name) for name, work in works]
    stopping = asyncio.create_task(stop.wait())
    try:
        done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {stopping}:
            task.result()
            raise RemoteError(f"the {task.get_name()} stopped unexpectedly; see the log")
    finally:
        await end()
        for each in (*tasks, stopping):
            each.cancel()
        await asyncio.gather(*tasks, stopping, return_exceptions=True)
