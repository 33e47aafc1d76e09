"""Ends an engine's process at a deadline, whatever hangs in it, and detects that the parent process has exited."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

#: The exit status of a worker whose deadline has passed; Spark only sees that the process is gone.
DEADLINE_EXIT = 75
#: The variable in which the forking daemon stores its process id; it may exit before a worker reads its parent's id.
DAEMON_VARIABLE = "_TIDEMILL_DAEMON_PID"


class ProcessDeadline(threading.Thread):
    """Ends the process at a deadline, and detects that the parent process has exited.

    Args:
        on_orphaned: Called once, in this thread, when the parent process has changed.
    """

    def __init__(self, on_orphaned: Any) -> None:
        super().__init__(name="tidemill-deadline", daemon=True)
        self._on_orphaned = on_orphaned
        self._parent = int(os.environ.get(DAEMON_VARIABLE) or os.getppid())
        self._at: float | None = None
        self._over = threading.Event()

    def within(self, seconds: float) -> None:
        """End the process after this time at the latest; an earlier deadline stays in force."""
        at = time.monotonic() + seconds
        self._at = at if self._at is None else min(at, self._at)

    def cancel(self) -> None:
        """Cancel the deadline, so that the process can do other work."""
        self._over.set()

    def run(self) -> None:
        """Check every half second."""
        orphaned = False
        while not self._over.is_set():
            if self._at is not None and time.monotonic() >= self._at:
                os._exit(DEADLINE_EXIT)
            if not orphaned and os.getppid() != self._parent:
                orphaned = True
                self._on_orphaned()
            self._over.wait(0.5)
