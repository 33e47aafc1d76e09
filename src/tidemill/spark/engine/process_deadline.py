"""Ends an engine's process when its time is over, whatever hangs in it, and notices when the parent process is gone."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

#: The exit status of a worker whose deadline has passed; Spark only sees that it is gone.
DEADLINE_EXIT = 75
#: Where the daemon that forks the workers leaves its process id: it may be gone before a worker looks for its parent.
DAEMON_VARIABLE = "_TIDEMILL_DAEMON_PID"


class ProcessDeadline(threading.Thread):
    """Ends the process when its time is over, and notices when the parent process is gone.

    Args:
        on_orphaned: Called in this thread, once, when the parent has changed.
    """

    def __init__(self, on_orphaned: Any) -> None:
        """Start nothing; `start` watches."""
        super().__init__(name="tidemill-deadline", daemon=True)
        self._on_orphaned = on_orphaned
        self._parent = int(os.environ.get(DAEMON_VARIABLE) or os.getppid())
        self._at: float | None = None
        self._over = threading.Event()

    def within(self, seconds: float) -> None:
        """Let the process end after this time, unless it has to end sooner already."""
        at = time.monotonic() + seconds
        self._at = at if self._at is None else min(at, self._at)

    def cancel(self) -> None:
        """Let the process live, for other work afterwards."""
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
