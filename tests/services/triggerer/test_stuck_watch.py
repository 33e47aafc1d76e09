"""The thread that notices that one step of the loop does not end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

import pytest

from tidemill.services.triggerer.tasks.stuck_watch import StuckWatch

LIMIT_SECONDS = 1.0


class Found:
    """What a watch has found."""

    def __init__(self) -> None:
        self.found: list[tuple[str | None, str]] = []
        self.event = threading.Event()

    def __call__(self, name: str | None, stack: str) -> None:
        self.found.append((name, stack))
        self.event.set()

    def block(self, seconds: float = 30.0) -> None:
        """Block until something is found."""
        self.event.wait(seconds)


@pytest.fixture
def found() -> Found:
    return Found()


async def watch(found: Found, work: Callable[[], object]) -> None:
    watch = StuckWatch(LIMIT_SECONDS, found)
    watch.start()
    try:
        await asyncio.create_task(_run(work), name="the trigger")
    finally:
        watch.close()


async def _run(work: Callable[[], object]) -> None:
    await asyncio.sleep(0)
    work()


async def test_a_task_that_waits_in_a_call_is_named_with_its_place(found: Found) -> None:
    await watch(found, found.block)

    ((name, stack),) = found.found
    assert name == "the trigger"
    assert "self.event.wait(seconds)" in stack


async def test_a_task_that_computes_is_named(found: Found) -> None:
    def compute() -> None:
        end = time.monotonic() + 30
        while not found.event.is_set() and time.monotonic() < end:
            pass

    await watch(found, compute)
    assert [name for name, _ in found.found] == ["the trigger"]


async def test_a_callback_that_blocks_has_no_name(found: Found) -> None:
    watch = StuckWatch(LIMIT_SECONDS, found)
    watch.start()
    asyncio.get_running_loop().call_soon(found.block)
    await asyncio.sleep(0.1)
    watch.close()
    assert [name for name, _ in found.found] == [None]


async def test_many_short_steps_in_a_row_are_not_one_that_is_stuck(found: Found) -> None:
    """One turn of the loop takes longer than the limit, but no step of it does."""
    watch = StuckWatch(LIMIT_SECONDS, found)
    watch.start()
    tasks = [asyncio.create_task(_run(lambda: time.sleep(0.05)), name=f"short {n}") for n in range(60)]
    await asyncio.gather(*tasks)
    watch.close()
    assert found.found == []
