"""The tasks of an engine: which ends are told, and which are not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NoReturn

import pytest

from tidemill.runtime.loop.engine_tasks import EngineTasks


class Watch(EngineTasks):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.told = asyncio.Event()
        super().__init__(self.note)

    def note(self, text: str) -> None:
        self.faults.append(text)
        self.told.set()

    async def first(self) -> str:
        await asyncio.wait_for(self.told.wait(), 30)
        return self.faults[0]


@pytest.fixture
async def tasks() -> AsyncIterator[Watch]:
    watch = Watch()
    yield watch
    watch.close()


async def forever() -> NoReturn:
    while True:
        await asyncio.Event().wait()


async def raising() -> NoReturn:
    raise ValueError("no \ud800 today")


async def returning() -> None:
    pass


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_task_that_raises_is_named_with_its_error_in_sound_words(tasks: Watch) -> None:
    tasks.keep("the beats", raising())
    assert await tasks.first() == (
        "a part of the engine ended unexpectedly: the beats failed: ValueError: no \\ud800 today"
    )


async def test_a_task_that_has_to_run_on_is_named_when_it_returns(tasks: Watch) -> None:
    tasks.keep("the beats", returning())  # type: ignore[arg-type]  # that is the point
    assert "the beats returned" in await tasks.first()


async def test_a_task_that_others_cancel_is_named(tasks: Watch) -> None:
    task = tasks.run("a hook", forever())
    await turns()
    task.cancel()
    assert "a hook was cancelled" in await tasks.first()


async def test_tasks_that_are_stopped_or_come_to_their_end_are_not_told(tasks: Watch) -> None:
    async def stubborn() -> NoReturn:
        try:
            await forever()
        finally:
            raise OSError("on the way out")

    kept = [tasks.keep("one", forever()), tasks.keep("two", stubborn())]
    done = tasks.run("three", returning())
    await done
    await tasks.stop(*kept, done)
    assert all(task.done() for task in kept)
    tasks.keep("four", forever())
    tasks.close()
    await turns()
    assert tasks.faults == []


async def test_callbacks_of_the_loop_are_watched_where_they_are_tidemills(tasks: Watch) -> None:
    loop = asyncio.get_running_loop()
    others: list[str] = []
    loop.set_exception_handler(lambda _, context: others.append(str(context["exception"])))
    tasks.watch()

    def of_a_user() -> None:
        raise LookupError("a user's own")

    loop.call_soon(of_a_user)
    await turns()
    assert (others, tasks.faults) == (["a user's own"], [])
    loop.call_soon(tasks._on_ended, None)  # stands for any callback of tidemill's that raises
    assert "AttributeError" in await tasks.first()
    tasks.close()
    loop.call_soon(of_a_user)
    await turns()
    assert others[-1] == "a user's own", "the loop has its own handler back"
    loop.set_exception_handler(None)
