"""What the processes in these tests run."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

from tidemill.services.zygote.program import adopt_orphans


def answer(request: bytes, fds: list[int]) -> int:
    """Write what a test wants to know about the process, and end with 3."""
    pid = os.getpid()
    lines = [request.decode(), str(os.getsid(0) == pid == os.getpgrp()), " ".join(sorted(os.environ))]
    os.write(fds[0], "\n".join(lines).encode())
    return 3


def list_fds(request: bytes, fds: list[int]) -> None:
    names = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            names.append(os.readlink(f"/proc/self/fd/{name}"))
    os.write(fds[0], "\n".join(names).encode())


def describe_signals(request: bytes, fds: list[int]) -> None:
    numbers = (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGINT)
    os.write(fds[0], " ".join(str(signal.getsignal(number) is signal.SIG_DFL) for number in numbers).encode())


def sleep(request: bytes, fds: list[int]) -> None:
    if fds:
        os.write(fds[0], str(os.getpid()).encode())
    time.sleep(600)


def start_children(request: bytes, fds: list[int]) -> None:
    """Start one child in the group, one with a session of its own and no mark, and one that is nobody's child."""
    pids = [subprocess.Popen(["sleep", "600"]).pid]
    pids.append(subprocess.Popen(["sleep", "600"], start_new_session=True, env={}).pid)
    shell = subprocess.run(
        ["sh", "-c", "setsid sleep 600 >/dev/null 2>&1 & echo $!"],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
    )
    pids.append(int(shell.stdout))
    os.write(fds[0], " ".join(map(str, pids)).encode())
    if request == b"stay":
        time.sleep(600)


def start_grandchildren(request: bytes, fds: list[int]) -> None:
    """Start what starts children, in a session of its own, as a template starts a task process."""
    if os.fork() == 0:
        os.setsid()
        adopt_orphans()
        start_children(b"stay", fds)
    time.sleep(600)


def end_as_told(request: bytes, fds: list[int]) -> int:
    match request:
        case b"exit":
            sys.exit(7)
        case b"exit text":
            sys.exit("no")
        case b"raise":
            raise ValueError("wrong")
        case b"_exit":
            os._exit(9)
        case b"kill":
            os.kill(os.getpid(), signal.SIGKILL)
    return 0


def use_cpu(request: bytes, fds: list[int]) -> None:
    until = time.process_time() + 0.05
    while time.process_time() < until:
        pass
