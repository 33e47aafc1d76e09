"""Kills the processes that a dead process's zygotes have forked, and their descendants.

The zygote does this when its owner exits, and its warden when both exit. Code that reassigns the dead process's work
must wait here instead, because the zygote may be suspended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

import structlog

from tidemill.runtime.process.table import find_descendants
from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, find_carriers, number_owner

log = structlog.get_logger(__name__)

#: How long to wait for processes that do not die, for example because they wait in the kernel for a disk.
STUBBORN_SECONDS = 10.0
_PAUSE_SECONDS = 0.02
#: One scan may miss a process between fork and exec, whose environment cannot be read.
_CLEAN_SCANS = 2


def end_forked(owner: str) -> None:
    """Kill all processes below the zygotes of an exited process, and return when they have ended; blocks the thread.

    Args:
        owner: The value of the process's `OWNER_VARIABLE`; or the pid of an exited `dev`, for all processes forked by
            it and its services.
    """
    deadline = time.monotonic() + STUBBORN_SECONDS
    clean = 0
    while clean < _CLEAN_SCANS:
        found = _find_forked(owner)
        if found:
            found += find_descendants(*found)
        clean = 0 if found else clean + 1
        for pid in found:
            _kill(pid)
        if time.monotonic() > deadline:
            log.warning("task processes cannot be killed; they may overlap with the next attempt", pids=found)
            return
        time.sleep(_PAUSE_SECONDS)


def _find_forked(owner: str) -> list[int]:
    return find_carriers(f"{ENGINE_ID_VARIABLE}=tree-{owner}-".encode(), number_owner(owner))


def _kill(pid: int) -> None:
    with contextlib.suppress(OSError):
        group = os.getpgid(pid)
        if group != os.getpgrp():
            os.killpg(group, signal.SIGKILL)
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
