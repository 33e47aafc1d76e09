"""Replaces an engine's warden whenever it dies, because a killed engine's children would survive without one.

Separate from `warden`, because that file is also a program and has to stay small. All work happens in callbacks of the
engine's loop; there is no task that could end.
"""

from __future__ import annotations

import asyncio
import os

import structlog

from tidemill.runtime.process.warden import Warden

log = structlog.get_logger(__name__)

#: The pause between two starts, and between two checks if the system cannot report a process's exit.
PAUSE_SECONDS = 0.5


class KeptWarden:
    """A warden that is replaced when it dies; use it on one loop only.

    Args:
        warden: Started, and restarted when it dies.
    """

    def __init__(self, warden: Warden) -> None:
        self._warden = warden
        self._pidfd: int | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """The process id of the current warden."""
        return self._warden.pid

    def start(self) -> None:
        """Start the warden and watch it; call it before the first child is started.

        Raises:
            OSError: The system has no room for another process.
        """
        self._loop = asyncio.get_running_loop()
        self._warden.start()
        self._watch()

    def close(self) -> None:
        """Stop watching; let the warden end the remaining processes and exit."""
        self._forget()
        self._warden.close()

    def _watch(self) -> None:
        pid = self._warden.pid
        try:
            self._pidfd = os.pidfd_open(pid) if pid is not None else None
        except (OSError, AttributeError):
            self._pidfd = None  # it has exited already, or this system has no pidfd; check regularly
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._look)
        else:
            self._timer = self._loop.call_later(PAUSE_SECONDS, self._look)

    def _look(self) -> None:
        self._forget()
        pid = self._warden.pid
        if not self._warden.reaped():
            self._watch()
            return
        try:
            self._warden.start()
        except OSError as error:
            log.warning("the warden is dead and cannot be replaced yet", error=str(error))
            self._timer = self._loop.call_later(PAUSE_SECONDS, self._look)
            return
        log.warning("the warden of this engine died and was replaced", pid=pid, new_pid=self._warden.pid)
        # A program that kills every warden must not make this process start endless processes.
        self._timer = self._loop.call_later(PAUSE_SECONDS, self._look)

    def _forget(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = None
