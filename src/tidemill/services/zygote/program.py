"""The zygote: a process without threads, loops and connections that forks warm processes on request.

It imports the modules of those processes once, before the first fork, and freezes its heap, so that the processes share
its memory. `client` starts it, with the owner's socket as standard input.

Invariants:
- It runs one thread, so that its forks inherit no held lock.
- Each forked process leads its own session and group, and has no descriptor of the zygote.
- When a forked process ends, the rest of its group is killed before its id can be reused, and so are descendants that
  left the group: the zygote is a subreaper, so orphaned descendants become its children.
- The end of a forked process affects no other one; when the owner's socket closes, all of them and the zygote end.
- A warden cleans up if the zygote is killed. It finds all these processes by a mark in the environment that they
  inherit from the zygote, and by a number that survives a cleared environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NoReturn

from tidemill.runtime.process.warden import ENGINE_ID_VARIABLE, Warden, carry_number, number_tree
from tidemill.services.zygote.messages import (
    MAX_DESCRIPTORS,
    MAX_PACKET_BYTES,
    Exited,
    Fork,
    Forked,
    NotForked,
    Ping,
    Pong,
    Report,
    Setup,
    Signal,
    Started,
    decode_order,
    encode,
)

#: prctl(2): orphaned descendants become children of this process.
_PR_SET_CHILD_SUBREAPER = 36
#: Only the owner decides when the zygote ends; a terminal or a service manager may send these signals to all processes.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

Target = Callable[[bytes, list[int]], "int | None"]


class Zygote:
    """The state of the program.

    Args:
        owner: The socket to the owner.
        warden: Cleans up if this process is killed; None: the zygote that forked this one has a warden.
        targets: Additional functions that forked processes may call, by name.
        about: See `Started`.
    """

    def __init__(
        self,
        owner: socket.socket,
        warden: Warden | None,
        targets: Mapping[str, Target] = MappingProxyType({}),
        about: bytes = b"",
    ) -> None:
        self._owner = owner
        self._pid = os.getpid()
        self._warden = warden
        self._children: set[int] = set()
        self._targets = targets
        self._about = about
        self._woken, self._waker = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> None:
        """Serve the owner until it exits."""
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        adopt_orphans()
        if self._warden is not None:
            self._warden.start()
        waiting = select.poll()
        waiting.register(self._owner, select.POLLIN)
        waiting.register(self._woken, select.POLLIN)
        try:
            while True:
                ready = dict(waiting.poll())
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap()
                if self._owner.fileno() in ready and not self._serve():
                    return
        except (BrokenPipeError, ConnectionResetError):
            return  # the owner has exited
        finally:
            self._kill_all()

    def _serve(self) -> bool:
        """Carry out an order; returns False if the owner has exited."""
        packet, fds, _, _ = socket.recv_fds(self._owner, MAX_PACKET_BYTES, MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        if not packet:
            return False
        try:
            match decode_order(packet):
                case Setup() as setup:
                    self._set_up(setup)
                case Fork() as fork:
                    self._fork(fork, fds)
                case Signal() as wanted if wanted.pid in self._children:
                    send_signal(wanted.pid, wanted.number, group=wanted.group)
                case Ping(number):
                    self._tell(Pong(number))
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _set_up(self, setup: Setup) -> None:
        sys.path[:0] = [folder for folder in setup.import_folders if folder not in sys.path]
        for name in setup.preload:
            importlib.import_module(name)
        problems = tuple(problem for name in setup.user_preload if (problem := _preload(name)))
        # These objects are never freed; traversing them would copy memory pages that all processes share.
        gc.collect()
        gc.freeze()
        self._tell(Started(problems, self._about))

    def _tell(self, report: Report) -> None:
        self._owner.sendall(encode(report))

    # -- forking ---------------------------------------------------------------------------------------------------

    def _fork(self, fork: Fork, fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._tell(NotForked(fork.number, str(error)))
            return
        if pid == 0:
            self._be_child(fork, fds)
        self._children.add(pid)
        self._tell(Forked(fork.number, pid))

    def _be_child(self, fork: Fork, fds: list[int]) -> NoReturn:
        """Become the requested process."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            os.setsid()
            for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._owner.close()
            if self._warden is not None:
                self._warden.disown()
            os.close(self._woken)
            os.close(self._waker)
            self._children.clear()
            # As long as this process lives, it adopts its own orphaned descendants.
            adopt_orphans()
            gc.enable()
            status = self._find(fork.target)(fork.request, fds) or 0
        except SystemExit as exit_:
            status = exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            # The user's code may have replaced or closed the streams.
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            os._exit(status & 0xFF)

    def _find(self, target: str) -> Target:
        if target in self._targets:
            return self._targets[target]
        module, _, name = target.partition(":")
        function: Target = getattr(importlib.import_module(module), name)
        return function

    # -- endings ---------------------------------------------------------------------------------------------------

    def _reap(self) -> None:
        """Reap each process that has ended, and kill its leftovers."""
        while (ended := _find_ended()) is not None:
            # The process stays a zombie until its group is killed, so that its id cannot be reused before.
            if ended in self._children:
                send_signal(ended, signal.SIGKILL, group=True)
            if self._warden is not None and ended == self._warden.pid:
                self._warden.reaped()
            else:
                self._take(ended)
            if self._warden is not None and self._warden.pid is None:
                with contextlib.suppress(OSError):  # the system cannot start another process; the next reaping retries
                    self._warden.start()

    def _take(self, pid: int) -> None:
        _, status, used = os.wait4(pid, 0)
        known = pid in self._children
        self._children.discard(pid)
        self._kill_orphans()
        if known:
            code = os.waitstatus_to_exitcode(status)
            self._tell(Exited(pid, code, int(used.ru_utime * 1e6), int(used.ru_stime * 1e6), used.ru_maxrss))

    def _kill_orphans(self) -> None:
        """Kill processes that ended processes have left outside their groups."""
        warden = None if self._warden is None else self._warden.pid
        for pid in read_children(self._pid):
            if pid not in self._children and pid != warden:
                send_signal(pid, signal.SIGKILL, group=os.getpgid(pid) == pid)

    def _kill_all(self) -> None:
        """Kill all descendants, repeatedly, because each one that ends may leave orphans to this process."""
        warden = None if self._warden is None else self._warden.pid
        for pid in self._children:
            send_signal(pid, signal.SIGKILL, group=True)
        while True:
            ended = None
            with contextlib.suppress(ChildProcessError):
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG)
            if ended is not None:
                self._children.discard(ended.si_pid)
                continue
            if not self._children and not any(pid != warden for pid in read_children(self._pid)):
                return
            self._kill_orphans()
            if select.select([self._woken], [], [], 0.05)[0]:
                os.read(self._woken, 4096)


def _preload(name: str) -> str:
    """Import a module of the user; returns a description of the problem, or ''."""
    threads = threading.active_count()
    try:
        importlib.import_module(name)
    except BaseException as error:  # a module may raise any exception, including `SystemExit`
        return f"worker.preload: {name} cannot be imported: {type(error).__name__}: {error}"
    if threading.active_count() > threads:
        return f"worker.preload: {name} starts threads, which forked task processes would lack; remove it from the list"
    return ""


def _find_ended() -> int | None:
    """Return a child that has ended, without reaping it."""
    try:
        found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return None if found is None else found.si_pid


def send_signal(pid: int, number: int, *, group: bool) -> None:
    """Send a signal to an unreaped child, and to its group if it leads one."""
    if group:
        with contextlib.suppress(OSError):
            os.killpg(pid, number)
    if not group or number == signal.SIGKILL:  # it may not lead its group yet
        with contextlib.suppress(OSError):
            os.kill(pid, number)


def read_children(pid: int) -> list[int]:
    """Return the children of a single-threaded process."""
    try:
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as stream:
            return [int(child) for child in stream.read().split()]
    except OSError:
        return []


def adopt_orphans() -> None:
    """Make this process the new parent of its orphaned descendants."""
    # If the kernel refuses this, wardens and process groups remain.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def main() -> None:
    """Run a zygote for the owner at standard input."""
    # Close descriptors that the owner inherited from its own parent.
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    owner = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0, inheritable=False)
    os.close(null)
    gc.disable()
    mark = os.environ[ENGINE_ID_VARIABLE]
    carry_number(number_tree(mark))
    Zygote(owner, Warden(mark)).run()
