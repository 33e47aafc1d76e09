from __future__ import annotations

import asyncio

import pytest

from tidemill.runtime.process.service_signals import finish_or_stop


async def answer(value: int) -> int:
    return value


async def fail() -> int:
    raise ValueError("no")


async def test_work_that_ends_is_returned_with_what_it_raised() -> None:
    done = await finish_or_stop(answer(3), asyncio.Event())
    assert done is not None
    assert done.result() == 3
    failed = await finish_or_stop(fail(), asyncio.Event())
    assert failed is not None
    with pytest.raises(ValueError, match="no"):
        failed.result()


async def test_work_that_does_not_end_is_cancelled_by_a_stop() -> None:
    stop, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        stop.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    assert await finish_or_stop(wait(), stop) is None
    assert ended.is_set()


async def test_work_ends_with_who_waits_for_it() -> None:
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    waiting = asyncio.create_task(finish_or_stop(wait(), asyncio.Event()))
    await began.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    assert ended.is_set()
