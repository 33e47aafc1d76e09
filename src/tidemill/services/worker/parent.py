"""Ends a worker with its parent, which holds the other end of its standard input.

With the parent the store is gone: nothing can be reported, and whoever has the store next knows that all that ran is
lost.
"""

from __future__ import annotations

import asyncio
import os
import stat

import structlog

from tidemill.runtime.exitcode import ExitCode

log = structlog.get_logger(__name__)


def watch_parent() -> None:
    """End this process at once when the parent is gone; its zygote and that one's warden end everything else.

    Nothing is watched if the standard input is neither a pipe nor a socket.
    """
    mode = os.fstat(0).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        asyncio.get_running_loop().add_reader(0, _look)


def _look() -> None:
    if not os.read(0, 4096):
        log.warning("the process that started this worker is gone; the worker ends")
        os._exit(ExitCode.STOPPED)
