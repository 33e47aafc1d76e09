"""What triggers can do to the event loop that they share."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

from tidemill.services.triggerer.hosting.trigger_loop import RUN, TriggerLoop, TriggerLoopTask


class Run:
    """A trigger, as the loop sees it."""

    def __init__(self) -> None:
        self.errors: list[str] = []
        self.disturbed = False

    def blame(self, error: str) -> None:
        self.errors.append(error)

    def start(self, work: Coroutine[Any, Any, Any], *, guarded: bool = True) -> asyncio.Task[Any]:
        context = contextvars.copy_context()
        context.run(RUN.set, self)
        task = asyncio.get_running_loop().create_task(work, context=context)
        assert isinstance(task, TriggerLoopTask)
        task.guarded = guarded
        return task


@pytest.fixture
def loop() -> Iterator[TriggerLoop]:
    made = TriggerLoop()
    yield made
    made.close()


def exit_in_task() -> None:
    async def leave() -> None:
        sys.exit(3)

    asyncio.get_running_loop().create_task(leave())


def interrupt_in_task() -> None:
    async def interrupt() -> None:
        raise KeyboardInterrupt

    asyncio.get_running_loop().create_task(interrupt())


def exit_in_callback() -> None:
    asyncio.get_running_loop().call_later(0.001, sys.exit, "no")


def stop_loop() -> None:
    asyncio.get_running_loop().stop()


def cancel_all() -> None:
    for task in asyncio.all_tasks():
        task.cancel()


def gather_and_cancel_all() -> None:
    asyncio.gather(*asyncio.all_tasks()).cancel()


HARMS = [
    (exit_in_task, "raised SystemExit: 3"),
    (interrupt_in_task, "raised KeyboardInterrupt"),
    (exit_in_callback, "raised SystemExit: no"),
    (stop_loop, "called loop.stop()"),
    (cancel_all, "cancelled tasks of others"),
    (gather_and_cancel_all, "cancelled tasks of others"),
]


@pytest.mark.parametrize(("harm", "said"), HARMS)
def test_a_trigger_that_harms_others_is_blamed_and_those_go_on(
    loop: TriggerLoop, harm: Callable[[], None], said: str
) -> None:
    culprit, innocent = Run(), Run()

    async def harm_others() -> None:
        harm()
        await asyncio.Event().wait()

    async def work() -> str:
        waiting = asyncio.get_running_loop().create_future()
        good = innocent.start(wait_for(waiting))
        bad = culprit.start(harm_others())
        while not culprit.errors:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        waiting.set_result("done")
        bad.cancel()
        await asyncio.wait({good})
        return good.result()

    assert loop.run_to_end(work()) == "done"
    assert all(said in error for error in culprit.errors)
    assert not innocent.errors
    assert not innocent.disturbed


async def wait_for(waiting: asyncio.Future[str]) -> str:
    return await waiting


def test_a_trigger_whose_helper_task_is_cancelled_by_another_one_is_disturbed_and_not_to_blame(loop: TriggerLoop):
    culprit, innocent = Run(), Run()

    async def cancel(task: asyncio.Task[Any]) -> None:
        task.cancel()

    async def own() -> asyncio.Task[Any]:
        return asyncio.create_task(asyncio.Event().wait())

    async def work() -> None:
        helper = await innocent.start(own())
        await culprit.start(cancel(helper))
        await asyncio.wait({helper})
        assert helper.cancelled()

    loop.run_to_end(work())
    assert innocent.disturbed
    assert not culprit.disturbed
    assert not culprit.errors


def test_timeouts_and_groups_of_a_trigger_cancel_its_own_tasks(loop: TriggerLoop):
    run = Run()

    async def use() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.sleep(60), 0.001)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.001):
                await asyncio.create_task(asyncio.sleep(60))

    async def work() -> None:
        await run.start(use())

    loop.run_to_end(work())
    assert (run.errors, run.disturbed) == ([], False)


@pytest.mark.parametrize("harm", ["stop", "exit"])
def test_what_a_thread_of_nobody_does_to_the_loop_is_ignored(loop: TriggerLoop, harm: str):
    async def work() -> str:
        call = loop.stop if harm == "stop" else lambda: sys.exit(3)
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=[call])
        thread.start()
        await asyncio.sleep(0.05)
        thread.join()
        return "done"

    assert loop.run_to_end(work()) == "done"


def test_what_the_work_itself_raises_is_raised(loop: TriggerLoop):
    async def work() -> None:
        raise RuntimeError("Event loop stopped before Future completed.")

    with pytest.raises(RuntimeError):
        loop.run_to_end(work())
    assert not loop.is_guarding


def test_a_loop_that_cannot_go_on_ends_the_process_at_once(loop: TriggerLoop, monkeypatch: pytest.MonkeyPatch):
    """A trigger that closes the descriptors of others, for example."""

    class ExitedError(Exception):
        pass

    def leave(code: int) -> None:
        raise ExitedError(code)

    monkeypatch.setattr(os, "_exit", leave)

    def fail(timeout: float | None = None) -> list[Any]:
        raise OSError(9, "Bad file descriptor")

    async def work() -> None:
        monkeypatch.setattr(loop._selector, "select", fail)  # type: ignore[attr-defined]
        await asyncio.sleep(60)

    with pytest.raises(ExitedError):
        loop.run_to_end(work())
    monkeypatch.undo()


def test_a_library_may_cancel_the_task_of_the_host_in_which_it_runs(loop: TriggerLoop):
    """As its timeouts do."""

    async def work() -> str:
        task = asyncio.current_task()
        assert task is not None
        loop.call_later(0.001, lambda: task.cancel())
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            task.uncancel()
            return "timed out"
        return "slept"

    assert loop.run_to_end(work()) == "timed out"
