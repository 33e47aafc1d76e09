"""Keeps the pipes whose end tells a process that this one is gone out of processes that user code forks.

A forked process inherits this one's end of such a pipe. As long as that process lives, the other one would not notice
the end of this one.

Invariant: nothing is closed in a child, since its copies of the file objects would later close the same numbers again,
which may be other files by then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref

_PROCESSES: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def keep_from_forks(process: subprocess.Popen[bytes]) -> None:
    """Have only this process, and none that it forks, hold the standard input of another process open."""
    _PROCESSES.add(process)


def _replace_pipes() -> None:
    """Replace the pipes by the null device; in a forked process, which runs only one thread."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for process in list(_PROCESSES):
            # A pipe that is closed has no number.
            with contextlib.suppress(OSError, ValueError):
                if process.stdin is not None:
                    os.dup2(null, process.stdin.fileno(), inheritable=False)
        os.close(null)


# `subprocess` does not call this unless it has a `preexec_fn`, and its children close these pipes anyway.
os.register_at_fork(after_in_child=_replace_pipes)
