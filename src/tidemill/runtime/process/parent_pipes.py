"""Keeps pipes that signal this process's exit away from processes that user code forks.

Other processes notice this one's exit by the end of a pipe. A forked process would inherit this side of the pipe, and
as long as it lives, the others would not notice.

Invariant: nothing is closed in a child, because its copies of the file objects would later close the same numbers
again, which may be other files by then.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import weakref

_PROCESSES: weakref.WeakSet[subprocess.Popen[bytes]] = weakref.WeakSet()


def keep_from_forks(process: subprocess.Popen[bytes]) -> None:
    """Let only this process, and none that it forks, hold the standard input of another process open."""
    _PROCESSES.add(process)


def _replace_pipes() -> None:
    """Replace the pipes by the null device; runs in a forked process, which has only one thread."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_RDWR)
        for process in list(_PROCESSES):
            # A closed pipe has no number.
            with contextlib.suppress(OSError, ValueError):
                if process.stdin is not None:
                    os.dup2(null, process.stdin.fileno(), inheritable=False)
        os.close(null)


# `subprocess` calls this only with a `preexec_fn`, and its children close these pipes anyway.
os.register_at_fork(after_in_child=_replace_pipes)
