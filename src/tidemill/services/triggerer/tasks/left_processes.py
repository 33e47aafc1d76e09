"""Ends what triggers have started with the process that they run in, however that ends.

A trigger may start programs. While the triggerer runs they are the trigger's business; a warden ends them when the
triggerer is gone, whatever they did to their environments, sessions and parents.

Invariant: programs get no settings, and with them secrets, in their environment, as those of tasks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.runtime.process.warden import Warden, carry_number, number_tree, read_number
from tidemill.services.zygote.client import build_mark, clean_environment


@contextlib.contextmanager
def end_left_processes() -> Iterator[None]:
    """Have all that is started in this block end with it; call it on the loop, once the settings are read."""
    mark, before = build_mark(os.environ), read_number(os.getpid())
    warden = KeptWarden(Warden(mark))
    warden.start()
    environ = clean_environment(os.environ, mark)
    for name in os.environ.keys() - environ.keys():
        del os.environ[name]
    os.environ.update(environ)
    carry_number(number_tree(mark))
    try:
        yield
    finally:
        carry_number(before)  # the warden ends everything that carries the tree's
        warden.close()
