"""A template: a process that has imported a DAG file, and forks task processes, which need not import it again.

The zygote forks it, and from then on it is a zygote itself. If the import leaves something that a fork cannot share (a
thread, a connection, an open file), the template exits, and task processes import the file themselves.

Invariant: no code of the user runs in it once it forks.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from pathlib import Path

import msgspec

from tidemill.services.worker.messages import TASK_TARGET, ForkedTask
from tidemill.services.worker.task.process import ReadFile, read_file
from tidemill.services.worker.task.process import main as be_task_process
from tidemill.services.worker.task.residue import list_unshareable
from tidemill.services.zygote.messages import Started, encode
from tidemill.services.zygote.program import Zygote


def main(request: bytes, fds: list[int]) -> int:
    """Run a template; the zygote calls this in a fork.

    Args:
        request: The encoded `ForkedTask` of its processes.
        fds: The socket of the worker.
    """
    task = msgspec.msgpack.decode(request, type=ForkedTask)
    owner = socket.socket(fileno=fds[0])
    # Output during the import belongs to no attempt.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    os.close(null)
    before = list_unshareable()
    read = read_file(Path(task.folder), task.file)
    if list_unshareable() != before:
        owner.sendall(encode(Started()))  # without the imported files: it forks nothing
        return 0
    target = functools.partial(_run, read)
    Zygote(owner, None, {TASK_TARGET: target}, msgspec.msgpack.encode(read.told)).run()
    return 0


def _run(read: ReadFile, request: bytes, fds: list[int]) -> int:
    """Run a task process that this template forked."""
    # Python reseeds its random numbers in each fork; numpy's would be the same in all.
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        numpy.seed()
    return be_task_process(request, fds, read)
