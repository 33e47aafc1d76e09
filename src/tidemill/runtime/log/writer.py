"""Writes log entries to standard error; equal entries are written once with a count (`repeats` decides).

Invariants: an entry is one write, so the lines of several threads and processes do not mix. Entries of all threads
appear in the order in which they were logged. A count is written even if nothing is logged afterwards, at the latest
when the process ends. Work continues if standard error is not writable or an entry cannot be rendered.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable
from typing import Any, TextIO

from tidemill.runtime.log.repeats import Entry, Repeats
from tidemill.runtime.log.values import describe_value


class LogWriter:
    """Writes all log entries of a process.

    Args:
        render: Turns an entry into text.
        stream: The stream to write to; None is standard error, looked up at each write.
        ignored: Fields in which equal entries may differ.
        clock: Seconds on a monotonic clock.
    """

    def __init__(
        self,
        render: Callable[[Entry], str],
        stream: TextIO | None = None,
        ignored: Collection[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._render = render
        self._stream = stream
        self._clock = clock
        self._repeats = Repeats(ignored)
        # Reentrant, because a signal handler or a finalizer may log during a write of its own thread.
        self._changed = threading.Condition(threading.RLock())
        self._teller: threading.Thread | None = None
        #: When the thread that writes counts wakes up next.
        self._wakes_at = 0.0

    def write(self, entry: Entry) -> None:
        """Write an entry, or count it; from any thread."""
        with self._changed:
            self._put(self._repeats.feed(entry, self._clock()))
            due = self._repeats.next_due
            if due is None:
                return
            if self._teller is not None:
                if due < self._wakes_at:
                    self._changed.notify_all()
            else:
                self._teller = threading.Thread(target=self._tell_in_time, name="tidemill-log", daemon=True)
                try:
                    self._teller.start()
                except RuntimeError:  # the interpreter is shutting down
                    self._teller = None
                    self._put(self._repeats.tell_all())

    def tell_all(self) -> None:
        """Write all counts now."""
        with self._changed:
            self._put(self._repeats.tell_all())
            self._changed.notify_all()

    def _tell_in_time(self) -> None:
        with self._changed:
            while (due := self._repeats.next_due) is not None:
                self._wakes_at = due
                self._changed.wait(max(0.0, due - self._clock()))
                self._put(self._repeats.tell_due(self._clock()))
            self._teller = None

    def reset_after_fork(self) -> None:
        """Drop, in a child process, the state that the parent's threads held."""
        self._changed = threading.Condition(threading.RLock())
        self._teller = None
        self._repeats.tell_all()

    def _put(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            # Work continues without a log if standard error is closed or its reader has exited.
            with contextlib.suppress(Exception):
                stream = self._stream or sys.stderr
                stream.write(self._render_anything(entry) + "\n")
                stream.flush()

    def _render_anything(self, entry: Entry) -> str:
        try:
            return self._render(entry)
        except Exception:
            return self._render({name: self._make_renderable(name, value) for name, value in entry.items()})

    def _make_renderable(self, name: str, value: Any) -> Any:
        try:
            self._render({name: value})
        except Exception:
            return describe_value(value)
        return value


class _Current:
    """The writer of this process."""

    writer: LogWriter | None = None

    def tell_all(self) -> None:
        if self.writer is not None:
            self.writer.tell_all()

    def reset_after_fork(self) -> None:
        if self.writer is not None:
            self.writer.reset_after_fork()


_CURRENT = _Current()
atexit.register(_CURRENT.tell_all)
os.register_at_fork(after_in_child=_CURRENT.reset_after_fork)


def replace_writer(writer: LogWriter) -> None:
    """Set the writer of this process; the previous writer writes its counts."""
    _CURRENT.tell_all()
    _CURRENT.writer = writer


def tell_repeats() -> None:
    """Write all counts of equal entries now, for a process that is about to end without Python's exit hooks."""
    _CURRENT.tell_all()
