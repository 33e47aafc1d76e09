"""Waits for a process to exit.

The start time, counted from the boot of the host, distinguishes the process from a later one with the same id. The
process must be on the triggerer's host.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tidemill.triggers.base import BaseTrigger, TriggerEvent

_PROC = "/proc"
#: The `started` value of a process that did not exist when its trigger was created.
GONE: Final = "gone"


class ProcessExitTrigger(BaseTrigger):
    """Fires once, when a process has exited; at once if it does not exist.

    The payload has `pid` and `found`: whether the process still existed when the wait began. The exit code is not
    included, because only the parent process can read it.

    Args:
        pid: The process id.
        started: Distinguishes the process from a later one with the same id; None: use the current process.
        poll_seconds: The time between two checks on systems that do not notify (Linux does).

    Raises:
        TypeError: The id is not a number.
        ValueError: A number is not positive.
    """

    def __init__(self, pid: int, *, started: str | None = None, poll_seconds: float = 1.0) -> None:
        """Read the start time of the process."""
        super().__init__()
        if isinstance(pid, bool) or not isinstance(pid, int):
            raise TypeError(f"pid must be the id of a process, got {pid!r}")
        if pid <= 0:
            raise ValueError(f"pid must be positive, got {pid}")
        if poll_seconds <= 0:
            raise ValueError(f"poll_seconds must be positive, got {poll_seconds}")
        self.pid = pid
        self.started = _read_start(pid) if started is None else started
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger, including the process's start time."""
        return (
            "tidemill.triggers.builtin.process.ProcessExitTrigger",
            {"pid": self.pid, "started": self.started, "poll_seconds": self.poll_seconds},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, then fire."""
        found = self._is_there()
        if found:
            await self._wait()
        yield TriggerEvent({"pid": self.pid, "found": found}, identity=f"{self.pid}@{self.started}")

    def _is_there(self) -> bool:
        return self.started != GONE and _read_start(self.pid) == self.started

    async def _wait(self) -> None:
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        except (AttributeError, OSError):
            # The system has no pidfd, or too many files are open.
            await self._poll()
            return
        try:
            # The descriptor refers to the process that had the id when it was opened; check that it was still the right
            # one.
            if self._is_there():
                await _wait_readable(fd)
        finally:
            os.close(fd)

    async def _poll(self) -> None:
        while self._is_there():  # noqa: ASYNC110 - what is waited for is in the system, not in this process
            await asyncio.sleep(self.poll_seconds)


async def _wait_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = loop.create_future()
    loop.add_reader(fd, _resolve, readable)
    try:
        await readable
    finally:
        loop.remove_reader(fd)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _read_start(pid: int) -> str:
    """Return the boot id and the start time of a process; 'gone' if it does not exist or has exited.

    If /proc cannot be read, fall back to the process id.
    """
    try:
        stat = Path(_PROC, str(pid), "stat").read_text(errors="replace")
    except OSError:
        return _check_alive(pid)
    # The program name, in parentheses, may contain spaces and parentheses.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in "ZX":
        return GONE
    return f"{Path(_PROC, 'sys/kernel/random/boot_id').read_text().strip()}/{fields[19]}"


def _check_alive(pid: int) -> str:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return GONE
    except PermissionError:
        pass
    return str(pid)
