"""The entry point of the `tidemill` command.

A signal that arrives before the command runs ends the process without a traceback, with the exit code of a stopped
start. Slow modules are imported only after that is set up.
"""

from __future__ import annotations

import signal
import sys

#: Exit codes of long-running commands at a signal before they have started: success for all but a backfill, which has
#: all its work left. These are numbers of `ExitCode`, whose import takes time.
_EARLY = {"run": 0, "demo": 0, "dev": 0, "web": 0, "broker": 0, "triggers run": 0, "backfill": 130}
_GROUPS = ("triggers",)
#: Commands that ignore a hangup: a trigger host would reload its list, which it has not read yet.
_RELOADING = ("triggers run",)


def main() -> None:
    # Ctrl-C ends the process while modules are imported and options are parsed; `reporting` handles it later. A shell
    # that runs a script in the background ignores SIGINT; keep that.
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
    # Keep ignored signals ignored, as `nohup` does with SIGHUP.
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
