"""Ends the process of a trigger host even if tasks or threads of triggers do not end."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from tidemill.runtime.log.writer import tell_repeats
from tidemill.runtime.process.exitcode import ExitCode

#: How long leftover tasks and threads of triggers may take to end.
_END_SECONDS = 5.0


def end_anyway(code: ExitCode) -> threading.Timer:
    """Start a timer that exits the process after some seconds; cancel it if the process ends by itself.

    Call it when everything is stored and only tasks and threads of triggers are left, which may never end.
    """

    def end() -> None:
        tell_repeats()
        with contextlib.suppress(OSError, ValueError):
            print(
                "a task or thread of a trigger does not end; the process exits without waiting for it",
                file=sys.stderr,
                flush=True,
            )
        os._exit(code)

    timer = threading.Timer(_END_SECONDS, end)
    timer.daemon = True
    timer.start()
    return timer
