"""Relays standard error of other processes on this host, shown like this process's own entries.

Their lines must not bypass a live display on the terminal.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator

from tidemill.runtime.log.setup import relay


@contextlib.contextmanager
def relayed_output(
    name: str, is_shown: Callable[[bytes], bool] = bool, on_end: Callable[[], object] = bool
) -> Iterator[int]:
    """Yield a file descriptor whose lines a thread writes to `sys.stderr`, until all its writers have closed it.

    Args:
        name: The name of the thread.
        is_shown: Returns whether a line is passed on.
        on_end: Called after the last line, when all writers have closed the descriptor.
    """
    reader, writer = os.pipe()
    threading.Thread(target=_pass_on, args=(reader, is_shown, on_end), name=name, daemon=True).start()
    try:
        yield writer
    finally:
        os.close(writer)


def _pass_on(reader: int, is_shown: Callable[[bytes], bool], on_end: Callable[[], object]) -> None:
    with open(reader, "rb") as lines:
        for line in lines:
            # The writers must not block forever because a line cannot be shown.
            with contextlib.suppress(Exception):
                if is_shown(line):
                    text = line.decode(errors="replace")
                    if not relay(text):
                        sys.stderr.write(text)
                        sys.stderr.flush()
    on_end()
