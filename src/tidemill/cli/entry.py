"""The entry point of the `tidemill` command: Ctrl-C while its modules are imported ends it without a traceback.

It imports nothing that takes time before that is arranged.
"""

from __future__ import annotations

import signal


def main() -> None:
    """Run the command line."""
    interrupt = signal.getsignal(signal.SIGINT)
    # A shell that runs a script in the background has it ignored, and that stays as it is.
    if interrupt is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        from tidemill.cli.main import main as run
    finally:
        signal.signal(signal.SIGINT, interrupt)
    run()
