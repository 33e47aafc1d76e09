"""Ends a service when its parent exits; the parent holds the other end of its standard input.

Without its parent a service has no store to report to; the next owner of the store marks its work as lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from typing import Final

from tidemill.runtime.process.exitcode import ExitCode

#: Written by a parent before it sends SIGTERM.
STOP_WORD: Final = b"stop\n"


def watch_parent(
    on_gone: Callable[[], object], grace_seconds: float, on_word: Callable[[], object] | None = None
) -> bool:
    """End this process when its parent exits, even if the event loop is blocked.

    Does nothing if the standard input is neither a pipe nor a socket.

    Args:
        on_gone: Called on a thread when the parent has exited.
        grace_seconds: How long the process may then take to end by itself.
        on_word: Called on a thread when the parent asks this process to stop.

    Returns:
        Whether the parent is watched.
    """
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                if on_word is not None:
                    on_word()
        # The loop may be closed, or the log may have no reader; this process must end anyway.
        with contextlib.suppress(Exception):
            on_gone()
        if not grace_seconds:
            os._exit(ExitCode.STOPPED)
        timer = threading.Timer(grace_seconds, os._exit, [ExitCode.STOPPED])
        timer.daemon = True
        timer.start()

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()
    return True
