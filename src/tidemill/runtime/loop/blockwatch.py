"""Watches an event loop from another thread, and names the call that blocks it.

The loop regularly reports that it is alive. If it has not done so for longer than the threshold, the thread records the
current stack of the loop's thread and the running task. Each block is reported once, and again with its length when it
is over.

`core.blocking` decides what a late loop means. If the kernel does not report how long a thread waited for a CPU (no
/proc), a starved machine cannot be distinguished from a call that blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path
from types import FrameType

from tidemill.core.blocking import BlockCause, Usage, judge_block
from tidemill.runtime.loop.durations import Durations

#: The last frames of a stack are enough to show its position.
_FRAMES = 12
#: The file in which the event loop calls its callbacks.
_LOOP_FILE = asyncio.events.__file__


@dataclass(frozen=True, slots=True)
class Block:
    """A late event loop.

    Attributes:
        task: The name of the running task; None for a callback.
        cause: The cause.
        seconds: The length of the block, so far or in all.
        stack: The stack of the loop's thread when the block was detected, innermost frame last. It is '' for a starved
            loop, and for a block that was detected only when it was over because it held the interpreter.
    """

    task: str | None
    cause: BlockCause
    seconds: float
    stack: str


class BlockWatch:
    """A thread that watches the running loop.

    Args:
        threshold_seconds: How long one call may block the loop.
        on_block: Called when the loop is detected to be late: on the watching thread, or on the loop if that thread
            could not run.
        on_over: Called on the loop when it continues, with the same block and its whole length.
        lags: Counts how late the loop was; None creates a new object.
    """

    def __init__(
        self,
        threshold_seconds: float,
        on_block: Callable[[Block], None],
        on_over: Callable[[Block], None] = lambda _: None,
        lags: Durations | None = None,
    ) -> None:
        self._threshold = threshold_seconds
        self._pulse = threshold_seconds / 4
        self._on_block = on_block
        self._on_over = on_over
        # Guards the detected block and the time since when the loop is late, so that each block is reported once.
        self._changing = threading.Lock()
        #: How late the loop was at each of its reports.
        self.lags = Durations() if lags is None else lags
        self._found: Block | None = None
        self._ended = threading.Event()
        self._handle: asyncio.TimerHandle | None = None
        # Stays open, because it is read at every pulse.
        self._schedstat: FileIO | None = None
        self._thread = threading.Thread(target=self._watch, name="tidemill-blockwatch", daemon=True)

    def start(self) -> None:
        """Start; call it in the loop."""
        self._loop = asyncio.get_running_loop()
        self._ident = threading.get_ident()
        self._native_id = threading.get_native_id()
        self._clock_id = time.pthread_getcpuclockid(self._ident)
        with contextlib.suppress(OSError):
            self._schedstat = FileIO(f"/proc/self/task/{self._native_id}/schedstat")
        self._beat_at = time.monotonic()
        self._usage = self._read_usage()
        self._beat()
        self._thread.start()

    def close(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        if self._schedstat is not None and not self._thread.is_alive():
            self._schedstat.close()

    def _beat(self) -> None:
        now, usage = time.monotonic(), self._read_usage()
        with self._changing:
            found, self._found = self._found, None
            before, self._usage = self._usage, usage
            late, self._beat_at = now - self._beat_at, now
        if self._handle is not None:
            self.lags.add(max(0.0, late - self._pulse))
        if late >= self._threshold + self._pulse and (found is None or found.cause is BlockCause.STARVED):
            cause = judge_block(late, before, usage, self._threshold)
            if cause is BlockCause.COMPUTING:
                # The watching thread could not run meanwhile.
                found = Block(None, cause, late, "")
                self._on_block(found)
        if found is not None:
            self._on_over(Block(found.task, found.cause, late, found.stack))
        self._handle = self._loop.call_later(self._pulse, self._beat)

    def _watch(self) -> None:
        told = starved = 0.0
        overslept = 0.0
        late, limit = 0.0, self._threshold + self._pulse
        while True:
            slept_at = time.monotonic()
            # While the loop is alive, nothing can be detected before it may be late enough.
            pause = max(self._pulse, limit - late)
            if self._ended.wait(pause):
                return
            # The total time overslept since the loop was last alive.
            late_here = max(0.0, time.monotonic() - slept_at - pause)
            since, before = self._beat_at, self._usage
            overslept = late_here + (overslept if since < slept_at else 0.0)
            late = time.monotonic() - since
            if late < limit or told == since:
                continue
            frame = sys._current_frames().get(self._ident)
            usage = replace(self._read_usage(), is_runnable=self._is_runnable())
            cause = judge_block(late, before, usage, self._threshold, overslept)
            # A thread that woke up late sees the loop's current position, not the one that blocked it: what waits is
            # looked at again, and what computes may be over by then.
            if cause is BlockCause.WAITING and late_here >= self._threshold:
                continue
            unseen = cause is BlockCause.STARVED or (cause is BlockCause.COMPUTING and overslept >= self._threshold)
            block = Block(None if unseen else self._task_name(), cause, late, "" if unseen else describe_stack(frame))
            with self._changing:
                if since != self._beat_at:
                    continue  # it continued while its stack was recorded, so the stack is useless
                if cause is BlockCause.STARVED:
                    if starved == since:
                        continue
                    starved = since  # it may still turn out to block; check again
                else:
                    told = since
                self._found = block
                self._on_block(block)

    def _is_runnable(self) -> bool:
        with contextlib.suppress(OSError, IndexError):
            # The name before the state is in parentheses, and may contain any characters.
            return Path(f"/proc/self/task/{self._native_id}/stat").read_text().rpartition(")")[2].split()[0] == "R"
        return False

    def _task_name(self) -> str | None:
        task = asyncio.current_task(self._loop)
        return task.get_name() if task is not None else None

    def _read_usage(self) -> Usage:
        cpu = time.clock_gettime(self._clock_id)
        if self._schedstat is None:
            return Usage(cpu, 0.0)
        try:
            queued = os.pread(self._schedstat.fileno(), 100, 0).split()[1]
            return Usage(cpu, int(queued) / 1e9)
        except (OSError, ValueError, IndexError):
            return Usage(cpu, 0.0)


def describe_stack(frame: FrameType | None) -> str:
    """Return a thread's stack, starting at the event loop's callback."""
    if frame is None:
        return ""
    frames = traceback.extract_stack(frame)
    calls = [n for n, one in enumerate(frames) if one.filename == _LOOP_FILE]
    own = frames[calls[-1] + 1 :] if calls else frames
    return "".join(traceback.format_list(own[-_FRAMES:]))
