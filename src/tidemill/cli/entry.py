"""The entry point of the `tidemill` command: Ctrl-C before the command itself runs ends it without a traceback,
and SIGTERM with the exit code of a start that is stopped.

It imports nothing that takes time before that is arranged.
"""

from __future__ import annotations

import signal
import sys

#: How a command ends at a first SIGTERM before it has begun: nothing was read or started, so a pipeline and `dev` have
#: ended well, while a backfill has all of its work left. These are numbers of `ExitCode`, which takes time to import.
_EARLY = {"run": 0, "dev": 0, "backfill": 130}


def main() -> None:
    """Run the command line."""
    # While modules are imported and options are read; `reporting` takes Ctrl-C over. A shell that runs a script in the
    # background has it ignored, and that stays as it is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tidemill.runtime.stop_signals import EarlyStop

    command = next(iter(sys.argv[1:]), "")
    if command not in _EARLY or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        _run()
        return
    early = EarlyStop(_EARLY[command])
    signal.signal(signal.SIGTERM, early)
    try:
        _run()
    finally:
        if signal.getsignal(signal.SIGTERM) is early:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _run() -> None:
    from tidemill.cli.main import main as run

    run()
