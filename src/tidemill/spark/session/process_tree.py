"""Waits for, or kills, processes that are not children of this one: those below the JVM, which briefly outlive it.

Without /proc and pidfd, which only Linux has, nothing is waited for.
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
    """The descendants of a process, held by pidfds, which stay valid even if process ids are reused.

    Args:
        root: The id of the process; it is not itself included.

    Example:
        >>> import subprocess
        >>> shell = subprocess.Popen(["sh", "-c", "sleep 0.01; :"])
        >>> with Descendants(shell.pid) as descendants:
        ...     descendants.wait(60.0)
        []
    """

    def __init__(self, root: int) -> None:
        """Find the current descendants."""
        self._files: dict[int, int] = {}
        self.look(root)

    def look(self, root: int) -> None:
        """Add descendants that were started since the last call."""
        for pid in set(find_descendants(root)) - set(self._files.values()):
            with contextlib.suppress(OSError, AttributeError):  # the process has exited, or this is not Linux
                self._files[os.pidfd_open(pid)] = pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the pidfds."""
        for file in self._files:
            os.close(file)
        self._files = {}

    def wait(self, seconds: float) -> list[int]:
        """Wait up to `seconds` until all processes have exited; return the ids of those that have not."""
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
    """Kill a process and all its descendants; stop them first, so that none can start another one unnoticed.

    Args:
        root: The id of a child of this process that has not been reaped yet.
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
    """Kill a process if it is a descendant of another one; return whether it was."""
    if pid not in find_descendants(root):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True
