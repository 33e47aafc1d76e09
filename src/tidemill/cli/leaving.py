"""Ends the process of a command that has finished.

At exit Python waits for non-daemon threads, for threads of executors and for exit hooks. A handler whose start was
interrupted may have left any of these, and they must not keep the process alive.
"""

from __future__ import annotations

import os
import threading
import time

from tidemill.runtime.process.exitcode import ExitCode

#: How long the exit after an interrupted start may take, after the `END_SECONDS` of `spark.stopping` for the start
#: itself.
LEAVE_SECONDS = 0.5


def leave_within(seconds: float, code: ExitCode) -> None:
    """Let this process end by itself, or end it after a time; returns immediately.

    Args:
        seconds: How long Python may wait for threads and exit hooks.
        code: The exit code in either case.
    """
    from tidemill.runtime.log.writer import tell_repeats

    tell_repeats()

    def leave() -> None:
        time.sleep(seconds)
        os._exit(code)

    threading.Thread(target=leave, name="tidemill-leave", daemon=True).start()
