"""Waits for, or kills, processes that are not this one's children: those below the JVM, which outlive it briefly.

Where the system has no /proc or no pidfd (only Linux has both), nothing is waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from typing import Self

from tidemill.runtime.process.table import find_descendants


class Descendants:
    """The processes that descend from one, held by pidfds, which stay theirs even after their ids are reused.

    Args:
        root: The id of the process; it is not among them itself.

    Example:
        >>> import subprocess
        >>> shell = subprocess.Popen(["sh", "-c", "sleep 0.01; :"])
        >>> with Descendants(shell.pid) as descendants:
        ...     descendants.wait(60.0)
        []
    """

    def __init__(self, root: int) -> None:
        """Find those that there are now."""
        self._files: dict[int, int] = {}
        self.look(root)

    def look(self, root: int) -> None:
        """Look again, and add those that were started since."""
        for pid in set(find_descendants(root)) - set(self._files.values()):
            with contextlib.suppress(OSError, AttributeError):  # it has ended; or this is not Linux
                self._files[os.pidfd_open(pid)] = pid

    def __enter__(self) -> Self:
        """Nothing more to do."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files."""
        for file in self._files:
            os.close(file)
        self._files = {}

    def wait(self, seconds: float) -> list[int]:
        """Wait up to this long until all of them have ended; return the ids of those that have not."""
        deadline = time.monotonic() + seconds
        poll = select.poll()
        for file in self._files:
            poll.register(file, select.POLLIN)
        waiting = set(self._files)
        while waiting and (rest := deadline - time.monotonic()) > 0:
            for file, _ in poll.poll(rest * 1000):
                poll.unregister(file)
                waiting.discard(file)
        return sorted(self._files[file] for file in waiting)


def kill_tree(root: int) -> None:
    """Kill a process and all its descendants; they are stopped first, so that none starts another that is missed.

    Args:
        root: The id of a child of this process that was not reaped yet.
    """
    seen: set[int] = set()
    found = {root}
    while new := found - seen:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        seen |= new
        found = {root, *find_descendants(root)}
    for pid in seen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_below(root: int, pid: int) -> bool:
    """Kill a process if it is below another one; tell whether it was."""
    if pid not in find_descendants(root):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True
