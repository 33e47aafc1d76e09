"""Inspects other processes of this host: their descendants, marks and states.

Processes come and go during a scan; one that disappears is left out, or counts as ended. Without a /proc (only Linux
has one) no process is found. Engines' wardens have a scan of their own, because they import nothing of this package.
"""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict

#: Longer than any /proc/PID/stat.
_STAT_BYTES = 4096
_STATE, _PARENT = 0, 1
#: States of processes that have ended.
_ENDED = ("Z", "X")


def read_stat(pid: int) -> list[str]:
    """Return the fields of a process's /proc/PID/stat, starting with its state.

    Raises:
        OSError: There is no such process.
    """
    # `os.open` instead of the much slower `Path`, because there may be thousands of processes.
    file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    try:
        stat = os.read(file, _STAT_BYTES)
    finally:
        os.close(file)
    # The program's name, in parentheses, may contain any characters.
    return stat.rpartition(b")")[2].decode().split()


def read_state(pid: int) -> str:
    """Return the state of a process, T for a stopped one; '' if there is none."""
    try:
        return read_stat(pid)[_STATE]
    except OSError:
        return ""


def is_running(pid: int) -> bool:
    """Return whether a process is running; a zombie is not."""
    return read_state(pid) not in ("", *_ENDED)


def read_parent(pid: int) -> int | None:
    """Return the id of a process's parent; None if there is no such process."""
    try:
        return int(read_stat(pid)[_PARENT])
    except OSError:
        return None


def read_command(pid: int) -> str:
    """Return the command line of a process, arguments separated by spaces; '' if there is none."""
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")


def read_arguments(pid: int) -> list[str]:
    """Return the arguments of a process, including its program; empty if there is none."""
    return _read(pid, "cmdline").decode(errors="surrogateescape").split("\0")[:-1]


def read_environment(pid: int) -> list[str]:
    """Return the environment that a process was started with, as NAME=VALUE; empty if it cannot be read."""
    return _read(pid, "environ").decode(errors="replace").split("\0")


def find_children(parent: int) -> set[int]:
    """Return the children of a process."""
    return {pid for pid in list_processes() if read_parent(pid) == parent}


def find_descendants(*roots: int) -> list[int]:
    """Return the descendants of some processes, parents before their children.

    The processes themselves are not included, unless one descends from another.
    """
    children = defaultdict(list)
    for pid in list_processes():
        if (parent := read_parent(pid)) is not None:
            children[parent].append(pid)
    found: list[int] = []
    unvisited = [*roots]
    while unvisited:
        below = children.pop(unvisited.pop(), [])
        found += below
        unvisited += below
    return found


def find_marked(mark: str) -> dict[int, str]:
    """Return the command lines of the processes that were started with a mark in their environment, by process id.

    Args:
        mark: A variable and its whole value, NAME=VALUE.
    """
    return {pid: read_command(pid) for pid in list_processes() if mark in read_environment(pid)}


def is_pid_free(pid: int) -> bool:
    """Return whether no other process of this machine has a pid."""
    # In a restarted container, this process may have the pid of its predecessor.
    return pid == os.getpid() or not os.path.exists(f"/proc/{pid}")  # noqa: PTH110


def list_processes() -> list[int]:
    """Return the ids of all visible processes of this host."""
    try:
        return [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except FileNotFoundError:
        return []


def _read(pid: int, file: str) -> bytes:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as stream:  # see above
        return stream.read()
    return b""
