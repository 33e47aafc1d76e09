"""Runs all elements of a task in one attempt: `iterate` and `iterate_kwargs`.

Theory of operation: a feeder thread reads from the store which elements have to run, a page ahead of the work
(`element_feeder`). Workers run them: coroutines on the loop of the main thread if the function is `async`, threads
otherwise. A keeper thread sends what elements returned to the store, in groups (`result_keeper`). An element whose
function fails is run again after the retry delay of the task, in this attempt or in the next one.

Invariants: what is stored as done is never run again, because the store leaves it out. A result that is not stored yet
when the process dies is run again. Nothing waits for user code in a thread: those threads die with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from tidemill.core.wording import format_count
from tidemill.dags.attempt.current import is_interrupted, telling
from tidemill.dags.attempt.task_services import PartOutcome, TaskServices
from tidemill.dags.exceptions import TaskError, TaskTimeout
from tidemill.dags.execution.element_feeder import ElementFeeder
from tidemill.dags.execution.element_runner import ElementRunner
from tidemill.dags.execution.elements import ElementsWait, ElementToRun, PlaceLeft, Progress
from tidemill.dags.execution.result_keeper import ResultKeeper
from tidemill.runtime.store_clock import STORE_CLOCK

#: The number of elements that a worker of the loop runs in a row.
_TURNS: Final = 16


class Iteration:
    """Runs the elements of an attempt.

    Args:
        mapped: The task.
        runner: Runs one element.
        services: The access to the store.
        try_number: The try of the attempt.
        max_tries: The number of tries.
        read_clock: Returns the seconds of a clock that never goes back.
    """

    def __init__(
        self,
        mapped: Any,
        runner: ElementRunner,
        services: TaskServices,
        try_number: int,
        max_tries: int,
        read_clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._concurrency = int(mapped.task_concurrency or os.cpu_count() or 1)
        self._progress = Progress()
        self._changed = self._progress.changed
        self._keeper = ResultKeeper(mapped, services, self._progress, read_clock)
        is_last = try_number >= max_tries
        self._feeder = ElementFeeder(mapped, services, self._progress, self._keeper, is_last, read_clock)
        self._error: BaseException | None = None

    def run(self) -> PartOutcome:
        """Run all elements, and return how they ended.

        Raises:
            ElementsWait: Elements that have failed wait for their next try.
            PlaceLeft: The worker stops, or the attempt cannot wait here; elements are left.
            TaskTimeout: The attempt was interrupted.
            TaskError: The store refuses a result, for example because the attempt has been replaced.
        """
        threads = [
            threading.Thread(target=self._guard, args=(work,), name=f"tidemill-{name}", daemon=True)
            for name, work in (("elements", self._feeder.feed), ("results", self._keeper.keep))
        ]
        for thread in threads:
            thread.start()
        try:
            if self._runner.is_async:
                asyncio.run(self._run_async())
            else:
                self._run_threads()
        except BaseException:
            # An interruption may have come just after the lock was taken.
            with contextlib.suppress(RuntimeError):
                while True:
                    self._changed.release()
            # Results that are there are stored; a call under way uses the connection of the attempt's report.
            self._progress.stop()
            raise
        finally:
            with self._changed:
                self._progress.is_done = True
                self._changed.notify_all()
            for thread in threads:
                thread.join()
        if self._error is not None:
            raise self._error
        if self._progress.is_stopping:
            raise TaskTimeout("an element has ignored that its attempt was interrupted")
        if self._progress.is_leaving:
            raise PlaceLeft
        if self._feeder.waits:
            raise ElementsWait("elements that have failed wait for their next try")
        assert self._keeper.counts is not None
        return self._keeper.counts

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
            self._progress.stop()

    def _run_threads(self) -> None:
        workers = [
            threading.Thread(target=self._guard, args=(self._work,), name=f"tidemill-element-{number}", daemon=True)
            for number in range(self._concurrency)
        ]
        for worker in workers:
            worker.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ends)
            if self._progress.is_stopping:
                return
        # A process that has threads left runs no other attempt.
        for worker in workers:
            worker.join()

    @property
    def _ends(self) -> bool:
        return self._progress.is_done or self._progress.is_stopping

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ends or self._feeder.has_parts)
                part = self._feeder.take()
                if part is None:
                    if self._ends:
                        return
                    continue
            started_us = STORE_CLOCK.now_us()
            try:
                context, call = self._runner.find_call(part)
                with telling(context):
                    value = call()
                    if inspect.isawaitable(value):
                        value = asyncio.run(_wait(value))
            except BaseException as error:
                self._end(part, started_us, error=error)
            else:
                self._end(part, started_us, value)

    async def _run_async(self) -> None:
        loop = asyncio.get_running_loop()
        more = asyncio.Event()
        workers = [loop.create_task(self._work_async(more)) for _ in range(self._concurrency)]

        def note_end(worker: asyncio.Task[None]) -> None:
            if not worker.cancelled() and worker.exception() is not None:
                self._progress.stop()  # its element would be waited for

        for worker in workers:
            worker.add_done_callback(note_end)

        def look() -> None:
            more.set()
            if self._progress.is_stopping:
                for worker in workers:
                    worker.cancel()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(look)

        self._progress.wake = wake
        look()
        for ended in await asyncio.gather(*workers, return_exceptions=True):
            if isinstance(ended, BaseException) and not isinstance(ended, asyncio.CancelledError):
                raise ended

    async def _work_async(self, more: asyncio.Event) -> None:
        for number in itertools.count():
            with self._changed:
                part = self._feeder.take()
            if part is None:
                if self._ends:
                    return
                more.clear()
                if not (self._feeder.has_parts or self._ends):
                    await more.wait()
                continue
            started_us = STORE_CLOCK.now_us()
            try:
                context, call = self._runner.find_call(part)
                with telling(context):
                    value = await call()
            except asyncio.CancelledError:
                if self._progress.is_stopping or is_interrupted():
                    raise
                self._end(part, started_us, error=TaskError("the function was cancelled (asyncio.CancelledError)"))
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt) or (isinstance(error, TaskTimeout) and is_interrupted()):
                    self._progress.stop()
                    raise
                self._end(part, started_us, error=error)
            else:
                self._end(part, started_us, value)
            while not self._keeper.has_room():  # noqa: ASYNC110 (another thread makes room)
                await asyncio.sleep(0.005)
            if number % _TURNS == 0:
                await asyncio.sleep(0)  # a function that never waits keeps the loop from all others

    def _end(self, part: ElementToRun, started_us: int, value: Any = None, error: BaseException | None = None) -> None:
        """Note how an element ended."""
        result = self._keeper.describe(part, started_us, value, error)
        with self._changed:
            self._progress.running -= 1
            if result.state == "up_for_retry":
                self._feeder.retry(part, result.tries)
            self._keeper.add(result, is_idle=self._feeder.is_idle)
            if not self._runner.is_async:
                self._changed.wait_for(self._keeper.has_room)


async def _wait(value: Any) -> Any:
    return await value


def describe_failures(counts: PartOutcome) -> str:
    """Return the error of an attempt whose elements have failed for good."""
    total = counts.success + counts.failed + counts.skipped
    first = f"; element {counts.first_failed}: {counts.error}" if counts.first_failed is not None else ""
    return f"{counts.failed:,} of {format_count(total, 'element')} failed{first}"
