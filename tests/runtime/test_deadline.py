"""One budget for several steps."""

from __future__ import annotations

import asyncio

import pytest
from tests.until import slack

from tidemill.runtime.loop.deadline import Deadline


async def seconds_of(limit: asyncio.Timeout) -> float:
    start = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        async with limit:
            await asyncio.sleep(10)
    return asyncio.get_running_loop().time() - start


async def test_steps_share_one_budget() -> None:
    deadline = Deadline(0.3)
    first = await seconds_of(deadline.before(0.2).limit())
    assert 0.09 < first < slack(0.19)
    assert await seconds_of(deadline.limit()) < slack(0.4) - first
    assert deadline.left_seconds == 0.0


async def test_a_step_gets_no_more_than_its_most_and_no_less_than_its_least() -> None:
    assert await seconds_of(Deadline(10).limit(0.05)) < slack(1)
    assert await seconds_of(Deadline(-10).limit(least_seconds=0.05)) > 0.04
    assert await seconds_of(Deadline(-10).limit(0.01, least_seconds=5)) < slack(1)
