"""Asks the store for the events of all streams that attempts of a worker wait for, in one call.

Invariants: one call is under way at a time. An attempt gets an answer as soon as its stream has an event or has ended,
and an empty one after its wait, or at once if the worker drains: then the attempt leaves it, and its task goes on at
another worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from tidemill.store.calls.stream_calls import StreamBatch, StreamWant, TakeEvents
from tidemill.store.database import StoreCalls
from tidemill.store.wire.remote import call_patiently

#: How often the store is asked without a ring, because one may be missed.
SCAN_SECONDS = 1.0


@dataclass(slots=True, eq=False)
class _Waiting:
    """An attempt that waits for an event until `due`."""

    want: StreamWant
    due: float
    answer: asyncio.Future[StreamBatch]


class EventTaker:
    """The streams of a worker's attempts.

    Args:
        calls: The store.
    """

    def __init__(self, calls: StoreCalls) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        self._wake = asyncio.Event()
        self._work: asyncio.Task[None] | None = None
        self._leaving = False

    async def take(self, want: StreamWant, wait_seconds: float) -> StreamBatch:
        """Return the next events of a stream, as soon as there is one, or after a wait.

        Raises:
            CallRefusedError: The store refuses the call.
        """
        if self._leaving:
            return StreamBatch(want.trigger)
        one = _Waiting(want, self._loop.time() + wait_seconds, self._loop.create_future())
        self._waiting.append(one)
        self._wake.set()
        if self._work is None or self._work.done():
            self._work = self._loop.create_task(self._run(), name="events of streams")
        try:
            return await one.answer
        finally:
            with contextlib.suppress(ValueError):
                self._waiting.remove(one)

    @property
    def leaves(self) -> bool:
        """Whether attempts get no more events."""
        return self._leaving

    def note_ring(self) -> None:
        """Ask the store soon: there may be events."""
        self._wake.set()

    def leave(self) -> None:
        """Give no more events, so that attempts whose streams never end leave the worker."""
        self._leaving = True
        for one in self._waiting:
            if not one.answer.done():
                one.answer.set_result(StreamBatch(one.want.trigger))
        self._wake.set()

    async def _run(self) -> None:
        while self._waiting:
            self._wake.clear()
            asked = list(self._waiting)
            try:
                batches = await call_patiently(self._calls, TakeEvents(tuple(one.want for one in asked)))
            except Exception as error:  # the attempts are told; the next ones are asked for again
                self._fail(asked, error)
                continue
            self._answer(asked, {batch.trigger: batch for batch in batches})
            if self._waiting:
                pause = min(one.due for one in self._waiting) - self._loop.time()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, min(pause, SCAN_SECONDS))):
                        await self._wake.wait()

    def _answer(self, asked: list[_Waiting], batches: dict[int, StreamBatch]) -> None:
        now = self._loop.time()
        for one in asked:
            batch = batches.get(one.want.trigger) or StreamBatch(one.want.trigger)
            if one.answer.done():
                continue
            if batch.events or batch.ended or now >= one.due:
                self._waiting.remove(one)
                one.answer.set_result(batch)

    def _fail(self, asked: list[_Waiting], error: Exception) -> None:
        for one in asked:
            if not one.answer.done():
                self._waiting.remove(one)
                one.answer.set_exception(error)
