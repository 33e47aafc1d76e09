"""Ends what the zygotes of a process that has died have forked, and what that has started.

The zygote does so when its owner ends, and its warden when both do. Whoever gives the work of the dead process to
another one waits for it here, and does not rely on either of them: the zygote may have been stopped.
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

#: How long to go on with what does not die: it waits in the kernel for a disk, say.
STUBBORN_SECONDS = 10.0
_PAUSE_SECONDS = 0.02
#: A process may be between fork and exec, where its environment cannot be read, while it is looked for.
_CLEAN_SCANS = 2


def end_forked(owner: str) -> None:
    """Kill all processes below the zygotes of a process, and return when they are gone; blocks the thread.

    Args:
        owner: What `OWNER_VARIABLE` told that process, which has ended; or the number of a `dev` that has: all that its
            services and it have forked.
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
            log.warning("processes of tasks cannot be killed; they may run beside their next attempt", pids=found)
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
