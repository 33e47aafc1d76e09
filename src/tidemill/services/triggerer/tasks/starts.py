"""Renders the arguments of triggers that start their tasks.

Templates are the user's code. They run on a thread of their own, one after another, with a time limit each, so that
they never hold up the event loop of all triggers. Invariant: a template that exceeds its limit fails its task alone;
its thread is interrupted, and another one continues with the next.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import queue
import threading
from datetime import UTC, datetime, timedelta
from typing import Final

from tidemill.core.errors import describe_error
from tidemill.runtime.json.codec import decode
from tidemill.services.triggerer.hosting.loading import TriggerError
from tidemill.store.calls.task_calls import MAX_XCOM_BYTES
from tidemill.store.calls.trigger_calls import ClaimedTrigger

#: The time limit for the arguments of a trigger.
RENDER_SECONDS: Final = 1.0
#: How long arguments that have exceeded the limit are refused at once: a map may have thousands of equal ones.
_REFUSE_SECONDS: Final = 60.0
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

_Job = tuple[ClaimedTrigger, "asyncio.Future[str]"]


class _RenderingTooLongError(BaseException):
    """Interrupts the thread; templates cannot catch it."""


def render_start(claim: ClaimedTrigger) -> str:
    """Return the arguments of a trigger with their templates rendered.

    Raises:
        TriggerError: A template cannot be rendered.
    """
    # That module imports Jinja, which few triggers need.
    from tidemill.dags.triggers.start_templates import render_kwargs

    start = claim.start
    if start is None or start.attempt is None:
        raise TriggerError(
            "the templates in trigger_kwargs cannot be rendered, because this version of tidemill cannot read the "
            "structure of the DAG; upgrade the process that serves the store"
        )
    try:
        element = {name: decode(text) for name, text in start.element}
        started = _EPOCH + timedelta(microseconds=start.started_us)
        text = render_kwargs(claim.kwargs, start.attempt, element, started, native=start.native)
    except Exception as error:
        said = str(error) if isinstance(error, ValueError) else describe_error(error)
        raise TriggerError(f"the templates in trigger_kwargs cannot be rendered: {said}") from error
    if (size_bytes := len(text.encode())) > MAX_XCOM_BYTES:
        raise TriggerError(
            f"trigger_kwargs are {size_bytes:,} bytes long once rendered; at most {MAX_XCOM_BYTES:,} fit"
        )
    return text


class StartRenderer:
    """Renders arguments on a thread; used on one event loop.

    Args:
        limit_seconds: The time limit for the arguments of one trigger.
    """

    def __init__(self, limit_seconds: float = RENDER_SECONDS) -> None:
        self._limit_seconds = limit_seconds
        self._lock = asyncio.Lock()
        self._thread: _RenderThread | None = None
        self._slow: dict[tuple[str, str], float] = {}

    async def render(self, claim: ClaimedTrigger) -> str:
        """Return the rendered arguments of a trigger.

        Raises:
            TriggerError: A template cannot be rendered, or takes too long.
        """
        key, loop = (claim.classpath, claim.kwargs), asyncio.get_running_loop()
        async with self._lock:
            if self._slow.get(key, 0.0) > loop.time():
                raise self._explain()
            if self._thread is None:
                # Its import may take longer than the limit on a busy machine.
                await asyncio.to_thread(importlib.import_module, "tidemill.dags.triggers.start_templates")
                self._thread = _RenderThread(loop)
            rendering = self._thread.submit(claim)
            try:
                return await asyncio.wait_for(rendering, self._limit_seconds)
            except TimeoutError:
                self._slow = {one: until for one, until in self._slow.items() if until > loop.time()}
                self._slow[key] = loop.time() + _REFUSE_SECONDS
                raise self._explain() from None
            finally:
                if not rendering.done() or rendering.cancelled():
                    self.close()

    def close(self) -> None:
        """End the thread, and interrupt what it does."""
        if self._thread is not None:
            self._thread.end()
            self._thread = None

    def _explain(self) -> TriggerError:
        return TriggerError(
            f"rendering the templates in trigger_kwargs took longer than {self._limit_seconds:g} s; compute the value "
            "in the trigger, or defer in execute"
        )


class _RenderThread:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        # A thread that cannot be interrupted must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="templates of triggers", daemon=True)
        self._thread.start()

    def submit(self, claim: ClaimedTrigger) -> asyncio.Future[str]:
        rendering: asyncio.Future[str] = self._loop.create_future()
        self._jobs.put((claim, rendering))
        return rendering

    def end(self) -> None:
        self._jobs.put(None)
        ident = self._thread.ident
        assert ident is not None
        error = ctypes.py_object(_RenderingTooLongError)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident), error)

    def _run(self) -> None:
        with contextlib.suppress(_RenderingTooLongError):
            while (job := self._jobs.get()) is not None:
                self._do(*job)

    def _do(self, claim: ClaimedTrigger, rendering: asyncio.Future[str]) -> None:
        text, fault = "", None
        try:
            text = render_start(claim)
        except Exception as error:
            fault = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(_settle, rendering, text, fault)


def _settle(rendering: asyncio.Future[str], text: str, fault: Exception | None) -> None:
    if rendering.done():
        return
    if fault is None:
        rendering.set_result(text)
    else:
        rendering.set_exception(fault)
