"""Ends the programs that triggers have started when the triggerer ends, for whatever reason.

While the triggerer runs, a trigger manages its own programs. When the triggerer has exited, a warden ends them,
whatever they did to their environments, sessions and parents.

Invariant: as with tasks, the environment of programs contains no settings of tidemill, and thus no secrets.
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
    """End all programs started in this block when it ends. Call it on the loop, after reading the settings."""
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
        carry_number(before)  # the warden ends everything that carries the tree's number
        warden.close()
