"""The signals by which a worker interrupts the attempt of a task process; no program uses them by chance.

This module imports nothing else, because the worker must not import what tasks need.
"""

from __future__ import annotations

import signal

#: The attempt has exceeded its time limit.
TIMEOUT_SIGNAL = signal.SIGRTMIN + 5
#: The attempt is to end for any other reason.
END_SIGNAL = signal.SIGRTMIN + 6
#: Half of the grace period has passed: `on_kill` runs on a thread of its own.
KILL_SIGNAL = signal.SIGRTMIN + 7
