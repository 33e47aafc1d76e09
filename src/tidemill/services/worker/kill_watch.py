"""Calls `on_kill` where the main thread of a task process cannot: it sits in C code, or its code swallows exceptions.

Signal handlers written in Python run in the main thread alone, and between two instructions of it. So a thread waits
for a signal of its own, which is blocked everywhere else; the worker sends it when half of the grace of an attempt that
it has interrupted is over. Code that keeps the GIL keeps this thread from running, too.
"""

from __future__ import annotations

import _thread
import signal
from collections.abc import Callable

from tidemill.dags.current import get_current_operator
from tidemill.dags.running import kill
from tidemill.services.worker.attempt_signals import KILL_SIGNAL


def start_kill_watch(flush: Callable[[], None]) -> None:
    """Start the thread, in the main thread. `flush`: called afterwards, since the process is killed soon."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {KILL_SIGNAL})
    # Not `threading.Thread`, whose start waits for the thread: each attempt may have a process of its own.
    _thread.start_new_thread(_watch, (flush,))


def _watch(flush: Callable[[], None]) -> None:
    while True:
        signal.sigwait({KILL_SIGNAL})
        operator = get_current_operator()
        if operator is not None:
            kill(operator)
            flush()
