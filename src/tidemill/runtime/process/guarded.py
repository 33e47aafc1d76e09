"""Starts processes that never outlive this one, however it ends.

A second process waits until its standard input ends, which the kernel ensures, and then kills the first.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from tidemill.runtime.process.parent_pipes import keep_from_forks

#: Waits for a line before it becomes the command; until then no command runs that could be left behind.
_GATE = 'read -r _ && exec "$@" </dev/null'
#: Reads until its parent has exited for any reason, and then kills the group that the command leads.
_GUARD = 'trap "" HUP INT TERM; read -r _; kill -KILL -"$1"'


class Guarded:
    """A process, the leader of a session of its own, and its guard.

    Args:
        command: The program and its arguments.
        output: The file for standard output and standard error.
        cwd: The working folder; None is this process's.
        env: The environment; None is this process's.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        output: IO[bytes],
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start the process and its guard."""
        # A session of its own, because Ctrl-C in a terminal must not end the process before those that depend on it.
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", _GATE, "sh", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env=env,
            start_new_session=True,
        )
        self._guard = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "sh", str(self.process.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        keep_from_forks(self.process)
        keep_from_forks(self._guard)
        assert self.process.stdin is not None
        with self.process.stdin as gate:
            gate.write(b"go\n")

    def dismiss_guard(self) -> None:
        """End the guard, once the process has ended."""
        # The guard is killed without notice; told of the end, it would kill a process that has reused the id by then.
        self._guard.kill()
        self._guard.wait()
        if self._guard.stdin is not None:
            self._guard.stdin.close()
