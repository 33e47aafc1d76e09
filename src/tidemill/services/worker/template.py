"""A template: a process that has imported a DAG file, and forks task processes which need not import it any more.

It is forked by the zygote, and is one itself from then on. Where the file leaves something that a fork cannot share, a
thread, a connection, an open file, there is no template: it ends, and task processes import the file themselves.

Invariant: nothing of the user's code runs in it once it forks.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

import msgspec

from tidemill.services.worker.messages import TASK_TARGET, ForkedTask
from tidemill.services.worker.residue import list_unshareable
from tidemill.services.worker.task_process import ReadFile, read_file
from tidemill.services.worker.task_process import main as be_task_process
from tidemill.services.zygote.messages import Started, encode
from tidemill.services.zygote.program import Zygote


def main(request: bytes, fds: list[int]) -> int:
    """Be a template; the zygote calls this in a fork.

    Args:
        request: The `ForkedTask` that its processes are for.
        fds: The socket of the worker.
    """
    task = msgspec.msgpack.decode(request, type=ForkedTask)
    owner = socket.socket(fileno=fds[0])
    # What a file prints while it is imported belongs to no attempt.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    before = list_unshareable()
    read = read_file(Path(task.folder), task.file)
    if list_unshareable() != before:
        owner.sendall(encode(Started()))  # without what it has read: it forks nothing
        return 0
    target = functools.partial(_run, read)
    Zygote(owner, None, {TASK_TARGET: target}, msgspec.msgpack.encode(read.told)).run()
    return 0


def _run(read: ReadFile, request: bytes, fds: list[int]) -> int:
    """Be a task process that was forked by this one."""
    # Python's own random numbers differ in each fork; those of numpy would be the same in all.
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    return be_task_process(request, fds, read)
