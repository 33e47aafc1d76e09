"""How the process of a command goes once there is nothing left for it to do.

Python waits for threads that are not daemons, for those of executors and for what was registered to run at the exit. A
handler whose start was ended may have left any of them behind, and they must not keep the process.
"""

from __future__ import annotations

import os
import threading
import time

from tidemill.runtime.process.exitcode import ExitCode

#: How long the exit after an ended start may take; the start's end itself has `END_SECONDS` of `spark.stopping`.
LEAVE_SECONDS = 0.5


def leave_within(seconds: float, code: ExitCode) -> None:
    """Let this process end by itself, or else at the end of this time; returns at once.

    Args:
        seconds: How long Python may wait for threads and exit hooks.
        code: What the process ends with, either way.
    """
    from tidemill.runtime.log.writer import tell_repeats

    tell_repeats()

    def leave() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=leave, name="tidemill-leave", daemon=True).start()
