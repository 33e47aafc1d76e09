"""Waits for, or kills, processes that are not this one's children: those below the JVM, which outlive it by a moment.

Where the system has no /proc or no pidfd (only Linux has both), nothing is waited for.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections import defaultdict
from typing import Self


class Descendants:
    """The processes that descend from one, held by files that stand for them even after their ids are used again.

    Args:
        root: The id of the process; it is not among them.

    Example:
        >>> with Descendants(os.getpid()) as nobody:
        ...     nobody.left(1.0)
        []
    """

    def __init__(self, root: int) -> None:
        """Look at who is there now."""
        self._files: dict[int, int] = {}
        self.look(root)

    def look(self, root: int) -> None:
        """Look again, and note those that were started since."""
        for pid in set(_below(root)) - set(self._files.values()):
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

    def left(self, seconds: float) -> list[int]:
        """Wait until all of them have ended, but no longer than this; return the ids of those that have not."""
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
    """Kill a process and all below it; they are stopped first, so that none starts another that is missed.

    Args:
        root: The id of a child of this process that was not waited for yet.
    """
    seen: set[int] = set()
    found = {root}
    while new := found - seen:
        for pid in new:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
        seen |= new
        found = {root, *_below(root)}
    for pid in seen:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_below(root: int, pid: int) -> bool:
    """Kill a process if it is below another one; tell whether it was."""
    if pid not in _below(root):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    return True


def _below(root: int) -> list[int]:
    children = defaultdict(list)
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir("/proc"):
            if name.isdigit():
                with contextlib.suppress(OSError):  # it ended meanwhile
                    children[_parent(name)].append(int(name))
    found = []
    look_at = [root]
    while look_at:
        below = children[look_at.pop()]
        found += below
        look_at += below
    return found


def _parent(pid: str) -> int:
    # A `Path` would take four times as long, and there may be thousands of processes.
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        stat = os.read(file, 4096)
    finally:
        os.close(file)
    # The name of the program, in parentheses, may hold anything; the parent is the second behind it.
    return int(stat.rpartition(b")")[2].split(None, 2)[1])
