"""The entry point of the `tidemill` command: Ctrl-C before the command itself runs ends it without a traceback.

It imports nothing that takes time before that is arranged.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    # While modules are imported and options are read; `reporting` takes Ctrl-C over. A shell that runs a script in the
    # background has it ignored, and that stays as it is.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tidemill.cli.main import main as run

    run()
