"""The signals that ask a command to end, the same for all commands.

Invariant: SIGHUP counts only where nobody ignores it: with `nohup`, a command outlives its terminal.
"""

from __future__ import annotations

import signal


def find_stop_signals() -> tuple[signal.Signals, ...]:
    """Return the signals that ask this process to end: SIGTERM, SIGINT and, unless it is ignored, SIGHUP."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
