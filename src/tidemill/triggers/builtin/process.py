"""Waits for a process to end.

The process is distinguished from a later one with the same id by the time when it started, counted from the boot of its
host. It has to be on the host where the trigger runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

from tidemill.triggers.base import BaseTrigger, TriggerEvent

_PROC = "/proc"
#: The `started` of a process that did not exist when its trigger was created.
GONE: Final = "gone"


class ProcessExitTrigger(BaseTrigger):
    """Fires once, when a process has ended; at once if there is none.

    What is fired holds `pid` and `found`: whether the process still existed when the wait began. Only its parent
    knows how it ended.

    Args:
        pid: The process.
        started: Distinguishes it from a later one with the same id; None: take the process that has it now.
        poll_seconds: How often to check where the system does not notify (Linux does).

    Raises:
        TypeError: The id is not a number.
        ValueError: A number is not positive.
    """

    def __init__(self, pid: int, *, started: str | None = None, poll_seconds: float = 1.0) -> None:
        """Find the process."""
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
        """Return the arguments of this trigger, including when the process started."""
        return (
            "tidemill.triggers.builtin.process.ProcessExitTrigger",
            {"pid": self.pid, "started": self.started, "poll_seconds": self.poll_seconds},
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait, and fire."""
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
            # Not on this system, or too many files are open.
            await self._poll()
            return
        try:
            # The descriptor refers to the process that had the id when it was opened: was it still the right one?
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
    """Return the boot and the time at which a process started; 'gone' if there is none, or it has ended.

    Where that cannot be read, the id itself has to do.
    """
    try:
        stat = Path(_PROC, str(pid), "stat").read_text(errors="replace")
    except OSError:
        return _check_alive(pid)
    # The name, in parentheses, may hold anything.
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
