"""Detects what an attempt leaves behind in its process. Attempts that share a process must each find it unchanged.

The contents of Python objects are not compared: global variables and attributes of operators stay as they are.

Invariant: the comparison has no side effects, except that ended children are reaped.
"""

from __future__ import annotations

import contextlib
import decimal
import locale
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core.wording import format_count
from tidemill.runtime.process.table import read_command
from tidemill.services.worker.task.output import list_standard

#: How long ending children may take.
_ENDING_SECONDS = 0.3
_MAX_NAMED = 3
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
_SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


@dataclass(frozen=True, slots=True)
class ProcessState:
    """The compared state."""

    threads: frozenset[int | None]
    directory: str
    environment: dict[str, str]
    handlers: list[object]
    umask: int
    standard: list[tuple[int, int]]
    timers: bool
    settings: tuple[object, ...]


def take_state() -> ProcessState:
    try:
        directory = os.getcwd()  # noqa: PTH109
    except OSError:
        directory = ""  # the folder was removed
    umask = os.umask(0o077)
    os.umask(umask)
    return ProcessState(
        frozenset(thread.ident for thread in threading.enumerate()),
        directory,
        dict(os.environ),
        [signal.getsignal(number) for number in _SIGNALS],
        umask,
        list_standard(),
        any(signal.getitimer(kind)[0] for kind in _TIMERS),
        _list_settings(),
    )


def _list_settings() -> tuple[object, ...]:
    """Return process-wide settings of modules that tasks may change."""
    context = decimal.getcontext()
    numbers = (context.prec, context.rounding, context.Emin, context.Emax, context.capitals, context.clamp)
    return (
        socket.getdefaulttimeout(),
        (*numbers, *context.traps.values()),
        tuple(sys.path),
        locale.setlocale(locale.LC_ALL),
        sys.getrecursionlimit(),
    )


def find_changes(before: ProcessState) -> tuple[str, ...]:
    """Return the changes since `before`, as text."""
    now = take_state()
    changes = {
        f"threads run: {_name_threads(before)}": not now.threads <= before.threads,
        "the current folder changed": now.directory != before.directory,
        "the environment changed": now.environment != before.environment,
        "handlers of signals changed": now.handlers != before.handlers,
        "the umask changed": now.umask != before.umask,
        "standard input or output was closed or replaced": now.standard != before.standard,
        "an alarm is set": now.timers,
        "a setting of Python changed": now.settings != before.settings,
    }
    return tuple(text for text, changed in changes.items() if changed)


@dataclass(frozen=True, slots=True)
class Unshareable:
    """The parts of this process that a fork would lack, or would share with it; for comparison."""

    threads: list[str]
    descriptors: list[str]
    children: list[int]
    handlers: list[object]
    standard: list[tuple[int, int]]


def list_unshareable() -> Unshareable:
    """Return the current state of the parts that a fork cannot share."""
    return Unshareable(
        sorted(os.listdir("/proc/self/task")),  # includes threads of C code
        _list_descriptors(),
        _list_children(),
        [signal.getsignal(number) for number in _SIGNALS],
        list_standard(),
    )


def _list_descriptors() -> list[str]:
    # The descriptor of the listing itself is closed by the time it is checked.
    return sorted(fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}"))


def explain_unshareable(before: Unshareable) -> str:
    """Describe what cannot be shared since `before`; '': nothing."""
    now = list_unshareable()
    found = []
    if threads := [thread for thread in now.threads if thread not in before.threads]:
        found.append(f"runs {format_count(len(threads), 'thread')} ({_join(_name_thread, threads)})")
    if files := [fd for fd in now.descriptors if fd not in before.descriptors]:
        found.append(f"keeps {format_count(len(files), 'file or connection')} open ({_join(_name_file, files)})")
    if now.descriptors != before.descriptors and not files:
        found.append("closes a file that was open")
    if children := [pid for pid in now.children if pid not in before.children]:
        found.append(f"runs {format_count(len(children), 'process')} ({_join(_name, children)})")
    if now.handlers != before.handlers:
        found.append("handles signals")
    if now.standard != before.standard:
        found.append("replaces its standard input or output")
    return ", ".join(found)


def _join(name: Callable[[Any], str], things: Sequence[object]) -> str:
    return ", ".join(dict.fromkeys(name(thing) for thing in things[:_MAX_NAMED]))


def _name_thread(thread: str) -> str:
    for known in threading.enumerate():
        if str(known.native_id) == thread:
            return known.name
    try:
        return Path("/proc/self/task", thread, "comm").read_text().strip()
    except OSError:
        return "?"


def _name_file(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115
    except OSError:
        return "?"


def end_children() -> str:
    """Wait for children that are ending, and ask the others to end; describe the latter ('': there are none).

    Children that continue anyway are killed when this process ends.
    """
    left = _wait_for(_list_running)
    if not left:
        return ""
    names = [_name(pid) for pid in left[:_MAX_NAMED]]
    more = f" and {len(left) - _MAX_NAMED} more" if len(left) > _MAX_NAMED else ""
    for pid in left:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGTERM)
    # Do not wait for their replacements: a pool replaces its processes.
    _wait_for(lambda: [pid for pid in _list_running() if pid in left])
    return f"{format_count(len(left), 'process')} that it had started: {', '.join(names)}{more}"


def _wait_for(list_running: Callable[[], list[int]]) -> list[int]:
    """Wait briefly until there are no such processes; return the remaining ones."""
    deadline = time.monotonic() + _ENDING_SECONDS
    while (left := list_running()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return left


def _name(pid: int) -> str:
    command = read_command(pid)
    if command == read_command(os.getpid()):
        return f"a fork of the task's own process ({pid})"
    return f"{command[:100].strip() or '?'} ({pid})"


def _list_running() -> list[int]:
    left = []
    for pid in _list_children():
        if pid in _helpers():
            continue
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                left.append(pid)
    return left


def _list_children() -> list[int]:
    """Return the children of all threads, including orphaned descendants, because this process is a subreaper."""
    found = []
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children", "rb") as stream:
            found += [int(pid) for pid in stream.read().split()]
    return found


def _helpers() -> set[int]:
    """Return Python's own helper processes, which end with this one."""
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    server = sys.modules.get("multiprocessing.forkserver")
    pids = (
        getattr(getattr(tracker, "_resource_tracker", None), "_pid", None),
        getattr(getattr(server, "_forkserver", None), "_forkserver_pid", None),
    )
    return {pid for pid in pids if pid is not None}


def _name_threads(before: ProcessState) -> str:
    new = [thread.name for thread in threading.enumerate() if thread.ident not in before.threads]
    return ", ".join(new[:_MAX_NAMED])
