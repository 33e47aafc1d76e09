"""The entry point of the `tidemill` command: a signal before the command itself runs ends it without a traceback, and
with the exit code of a start that is stopped.

It imports nothing that takes time before that is arranged.
"""

from __future__ import annotations

import signal
import sys

#: How a command that runs until it is stopped ends at a first signal before it has begun: nothing was read or started,
#: so all but a backfill, which has all of its work left, have ended well. These are numbers of `ExitCode`, which takes
#: time to import.
_EARLY = {"run": 0, "demo": 0, "dev": 0, "web": 0, "broker": 0, "triggers run": 0, "backfill": 130}
_GROUPS = ("triggers",)
#: Commands that a hangup does not stop: a trigger host reloads its list, which it has not read yet.
_RELOADING = ("triggers run",)


def main() -> None:
    """Run the command line."""
    # While modules are imported and options are read; `reporting` takes Ctrl-C over. A shell that runs a script in the
    # background has it ignored, and that stays as it is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tidemill.runtime.process.stop_signals import EarlyStop

    command = " ".join(sys.argv[1 : 3 if sys.argv[1:2] and sys.argv[1] in _GROUPS else 2])
    if command not in _EARLY:
        _run()
        return
    early = EarlyStop(_EARLY[command])
    if command in _RELOADING:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # One that is ignored, as `nohup` has SIGHUP, stays so.
    untouched = [
        number
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
        if signal.getsignal(number) is signal.SIG_DFL
    ]
    for number in untouched:
        signal.signal(number, early)
    try:
        _run()
    finally:
        for number in untouched:
            if signal.getsignal(number) is early:
                signal.signal(number, signal.SIG_DFL)


def _run() -> None:
    from tidemill.cli.main import main as run

    run()
