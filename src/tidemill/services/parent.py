"""Ends a service with its parent, which holds the other end of its standard input.

With the parent the store is gone: nothing can be reported, and who has the store next knows that all that ran is lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable
from typing import Final

from tidemill.runtime.process.exitcode import ExitCode

#: What a parent writes to a service before it sends SIGTERM.
STOP_WORD: Final = b"stop\n"


def watch_parent(
    on_gone: Callable[[], object], grace_seconds: float, on_word: Callable[[], object] | None = None
) -> bool:
    """End this process when the parent is gone, even if its event loop is blocked.

    Nothing is watched if the standard input is neither a pipe nor a socket.

    Args:
        on_gone: Called then, on a thread.
        grace_seconds: How long after that the process may end by itself.
        on_word: Called, on a thread, when the parent says that this process is to stop.

    Returns:
        Whether it is watched.
    """
    mode = os.fstat(0).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                if on_word is not None:
                    on_word()
        # The loop is closed, say, or nobody reads the log any more: it ends all the same.
        with contextlib.suppress(Exception):
            on_gone()
        if not grace_seconds:
            os._exit(ExitCode.STOPPED)
        timer = threading.Timer(grace_seconds, os._exit, [ExitCode.STOPPED])
        timer.daemon = True
        timer.start()

    threading.Thread(target=watch, name="watch of the parent", daemon=True).start()
    return True
