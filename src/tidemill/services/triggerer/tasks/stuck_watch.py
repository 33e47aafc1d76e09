"""Ends a triggerer whose loop a trigger blocks forever, and fails the task of that trigger.

The next triggerer runs the other triggers.

The blocked loop can do nothing, so a thread watches it. Invariants: a trigger is blamed only if its own step has
exceeded the limit; the failure is stored before the process ends, or else no trigger is blamed for its death.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from tidemill.core.blocking import Standstill
from tidemill.core.errors import describe_error
from tidemill.core.tasks.instance import format_instance
from tidemill.runtime.log.writer import tell_repeats
from tidemill.runtime.loop.blockwatch import describe_stack
from tidemill.runtime.process.exitcode import BLOCKED
from tidemill.store.calls.trigger_calls import ClaimedTrigger, FailTrigger
from tidemill.store.wire.remote import RemoteStore

log = structlog.get_logger(__name__)

#: The longest interval between looks; a shorter limit is divided into `_LOOKS` looks.
_LOOK_SECONDS = 5.0
_LOOKS = 8
#: How long storing the failure may take.
_STORE_SECONDS = 10.0
#: The folder of tidemill's own code; the first frame outside it belongs to the trigger.
_PACKAGE = str(Path(__file__).parents[3])

#: Called on the watching thread with the name of the task that blocks the loop (None: a callback does), and its stack.
OnStuck = Callable[[str | None, str], None]


class StuckWatch:
    """A thread that watches the running loop.

    Args:
        limit_seconds: How long one step of the loop may take.
        on_stuck: Called once for each step that has taken longer.
    """

    def __init__(self, limit_seconds: float, on_stuck: OnStuck) -> None:
        self._limit, self._on_stuck = limit_seconds, on_stuck
        self._pulse = min(_LOOK_SECONDS, limit_seconds / _LOOKS)
        self._beats = 0
        self._handle: asyncio.TimerHandle | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tidemill-stuckwatch", daemon=True)

    def start(self) -> None:
        """Start watching; call it on the loop."""
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._beat()
        self._thread.start()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._ended.set()

    def _beat(self) -> None:
        self._beats += 1
        self._handle = self._loop.call_later(self._pulse / 2, self._beat)

    def _watch(self) -> None:
        standstill, told = Standstill(self._pulse), 0
        looked_at = time.monotonic()
        while not self._ended.wait(self._pulse):
            now = time.monotonic()
            beats, task = self._beats, asyncio.current_task(self._loop)
            seconds = standstill.look(beats, task, now - looked_at)
            looked_at = now
            if seconds >= self._limit and told != beats:
                told = beats
                stack = describe_stack(sys._current_frames().get(self._ident))
                self._on_stuck(None if task is None else task.get_name(), stack)


def end_stuck(address: Path, session: int, claim: ClaimedTrigger | None, stack: str, limit_seconds: float) -> None:
    """Fail the task of a trigger, and end this process, whose loop that trigger blocks.

    Args:
        address: The Unix socket of the process that serves the store.
        session: The session of this process.
        claim: The trigger; None: it is unknown.
        stack: The stack of the blocking step.
        limit_seconds: The exceeded limit.
    """
    log.error(
        "the event loop has been blocked for too long; the triggerer exits and is restarted",
        trigger=None if claim is None else claim.id,
        task=None if claim is None else format_instance(claim.task_id, claim.map_index),
        limit_seconds=limit_seconds,
        stack=stack,
    )
    known = claim is not None and asyncio.run(_fail(address, session, claim, _explain(stack, limit_seconds)))
    tell_repeats()
    if known:
        os._exit(BLOCKED)
    os.kill(os.getpid(), signal.SIGKILL)


async def _fail(address: Path, session: int, claim: ClaimedTrigger, error: str) -> bool:
    store = RemoteStore(address)
    try:
        async with asyncio.timeout(_STORE_SECONDS):
            await store.call(FailTrigger(session, claim.id, claim.token, error))
    except Exception as problem:
        log.warning("cannot store which trigger blocks the event loop", error=describe_error(problem))
        return False
    finally:
        await store.close()
    return True


def _explain(stack: str, limit_seconds: float) -> str:
    lines = [line.strip() for line in stack.splitlines() if line.lstrip().startswith("File ")]
    theirs = [where for where in lines if _PACKAGE not in where]
    where = f", at {theirs[0][len('File ') :]}" if theirs else ""
    return (
        f"the trigger blocked the event loop of all triggers for {limit_seconds:g} s (triggerer.block_limit_seconds)"
        f"{where}; use await instead of blocking calls, or run these with asyncio.to_thread"
    )
