"""How the process of a trigger host ends, even if tasks or threads of triggers do not."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from tidemill.runtime.log.writer import tell_repeats
from tidemill.runtime.process.exitcode import ExitCode

#: How long tasks and threads that triggers leave behind may take to end.
_END_SECONDS = 5.0


def end_anyway(code: ExitCode) -> threading.Timer:
    """End the process in some seconds, unless the timer is cancelled.

    For when everything is stored, and only tasks and threads of triggers are left, which may never end.
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
