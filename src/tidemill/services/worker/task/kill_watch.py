"""Calls `on_kill` when the main thread of a task cannot, because it is in C code or swallows exceptions.

Python runs signal handlers only in the main thread, between two of its instructions. A thread therefore waits for a
signal of its own, which is blocked in all other threads. The worker sends it when half of the grace period of an
interrupted attempt is over. Code that never releases the GIL blocks this thread, too.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable

from tidemill.dags.attempt.current import get_current_operator
from tidemill.dags.execution.endings import kill
from tidemill.services.worker.attempt_signals import KILL_SIGNAL


def start_kill_watch(flush: Callable[[], None]) -> None:
    """Start the thread, from the main thread.

    `flush` is called after `on_kill`, because the process will soon be killed.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {KILL_SIGNAL})
    # `threading.Thread.start` would wait for the thread; each attempt may have a process of its own.
    _thread.start_new_thread(_watch, (flush,))


def _watch(flush: Callable[[], None]) -> None:
    while True:
        signal.sigwait({KILL_SIGNAL})
        operator = get_current_operator()
        if operator is not None:
            kill(operator)
            flush()
