"""Processes of Python that need not import what the command line needs: forks of one interpreter that has done so.

Most of the processor time of a short command goes into its imports. A fork is a process of its own in everything that
tests look at (streams, folder, environment, signals, exit code); only `/proc/PID/environ` and `/proc/PID/cmdline` are
those of the interpreter that was forked. Tests of the start itself use a process that starts from nothing.

Invariants: the interpreter that is forked has one thread and ends with this process; nothing but `tidemill` and what
it imports is in it.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

#: What most commands import, each with all that it imports itself.
_MODULES = (
    *("tidemill.cli.main", "tidemill.cli.terminal.tables", "tidemill.config.loading", "tidemill.runtime.log.setup"),
    *(
        "tidemill.services.triggerer.process",
        "tidemill.store.engines.opening",
        "tidemill.store.migrate",
        "alembic.command",
    ),
    *("sqlalchemy.dialects.sqlite", "sqlalchemy.dialects.postgresql.asyncpg", "asyncpg"),
    *(
        "tidemill.deadletters.redrive.run",
        "tidemill.sinks.build",
        "tidemill.runtime.kafka.topic_reader",
        "confluent_kafka.admin",
    ),
    *(
        "tidemill.cli.doctor.checks",
        "tidemill.cli.dlq.redrive",
        "tidemill.cli.triggers.triggers_view",
        "tidemill.spark.preflight",
    ),
    *("pydantic.type_adapter", "pyspark.sql", "rich.console", "rich.table", "rich.live"),
)
#: Code, arguments, folder, environment, and the process whose network it is to have.
Request = tuple[str, list[str], str, dict[str, str], int | None]
_LARGEST_REQUEST = 150_000
TIDEMILL = "from tidemill.cli.main import main; main()"
#: What `python -m` does, with the module as the first argument.
MODULE = "import runpy, sys; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"


class Forked:
    """A process that was forked; has what tests use of `subprocess.Popen`.

    Attributes:
        pid: Its number.
        returncode: As `subprocess` has it; None while it runs.
    """

    #: What all of them took whose end this process has seen, with the processes whose end those saw.
    cpu_seconds = 0.0

    def __init__(self, told: socket.socket) -> None:
        """Read its number, which is told first."""
        self._told = told
        self.pid = int(told.recv(32))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, as `subprocess` has it; None while it runs."""
        return self._read(0)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: It runs longer.
        """
        code = self._read(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return code

    def _read(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            self._told.settimeout(timeout)
            try:
                status, cpu_seconds = self._told.recv(64).split()
            except (BlockingIOError, TimeoutError):
                return None
            self._told.close()
            self.returncode = int(status)
            Forked.cpu_seconds += float(cpu_seconds)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def start(
    arguments: Sequence[object],
    *,
    cwd: Path,
    env: Mapping[str, str],
    code: str = TIDEMILL,
    stdin: Any = None,
    stdout: Any = None,
    stderr: Any = None,
    network_of: int | None = None,
) -> Forked:
    """Do what `subprocess.Popen([sys.executable, "-c", code, *arguments])` does.

    Args:
        arguments: Of the command.
        cwd: Its folder.
        env: Its whole environment.
        code: What it runs.
        stdin: An open file; None: the null device, here and below.
        stdout: An open file.
        stderr: An open file.
        network_of: The process or thread whose network it has; None: that of the interpreter that is forked.
    """
    with open(os.devnull, "r+b") as null:
        files = [(null if file is None else file).fileno() for file in (stdin, stdout, stderr)]
        return _start(_server(), (code, [str(each) for each in arguments], str(cwd), dict(env), network_of), files)


def _start(server: socket.socket, request: Request, files: Sequence[int]) -> Forked:
    text = json.dumps(request).encode()
    assert len(text) < _LARGEST_REQUEST
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(server, [text], [*files, theirs.fileno()])
    return Forked(ours)


def run(
    arguments: Sequence[object],
    *,
    cwd: Path,
    env: Mapping[str, str],
    code: str = TIDEMILL,
    timeout: float = 60.0,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[bytes]:
    """Run a command to its end and return what it wrote."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin)
        given.seek(0)
        process = start(arguments, cwd=cwd, env=env, code=code, stdin=given, stdout=out, stderr=err)
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess([code, *arguments], process.wait(), out.read(), err.read())


def run_text(
    arguments: Sequence[object], *, cwd: Path, env: Mapping[str, str], code: str = TIDEMILL, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return what it wrote as text."""
    done = run(arguments, cwd=cwd, env=env, code=code, timeout=timeout)
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def write_stand_in(folder: Path) -> int:
    """Write a program `tidemill` for shells, a small one whose work a fork does; return the file that it inherits.

    It is that fork in its output, folder, environment, network, signals, and in how it ends.
    """
    server = os.dup(_server().fileno())
    program = folder / "tidemill"
    program.write_text(
        f"#!{sys.executable} -IS\nimport sys\nsys.path.append({str(Path(__file__).parent.parent)!r})\n"
        f"from tests import prepared\nprepared.stand_in({server})\n"
    )
    program.chmod(0o755)
    return server


def stand_in(server: int) -> NoReturn:
    """Be the command `tidemill` with the arguments of this process."""
    with socket.socket(fileno=server) as prepared:
        forked = _start(prepared, (TIDEMILL, sys.argv[1:], os.getcwd(), dict(os.environ), os.getpid()), [0, 1, 2])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: forked.send_signal(number))
    code = forked.wait()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


def start_server() -> None:
    """Start the interpreter that is forked now, for this process and its forks."""
    _server()


@functools.cache
def _server() -> socket.socket:
    """Start the interpreter that is forked; it ends when this process does, however it does."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TIDEMILL_")}
    process = subprocess.Popen(
        [sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()], env=clean, cwd="/"
    )
    theirs.close()

    def end() -> None:
        ours.close()
        process.wait()

    atexit.register(end)
    return ours


def _serve(requests: socket.socket) -> str | None:
    """Fork for each request; return the code in the fork, and None at the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # tests that are interrupted still end what they began
    for module in _MODULES:
        importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has only the thread that forks"
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # what forks allocate until they end is hardly ever garbage
    selector = selectors.DefaultSelector()
    selector.register(requests, selectors.EVENT_READ)
    told: dict[int, tuple[int, socket.socket]] = {}
    while True:
        for key, _ in selector.select():
            if key.fd in told:
                pid, reply = told.pop(key.fd)
                _, status, used = os.wait4(pid, 0)
                selector.unregister(key.fd)
                os.close(key.fd)
                with reply:
                    _tell(reply, f"{os.waitstatus_to_exitcode(status)} {used.ru_utime + used.ru_stime}")
                continue
            request, files, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 4)
            if not request:
                return None
            reply = socket.socket(fileno=files.pop())
            if not (pid := os.fork()):
                selector.close()
                for opened in (requests, reply, *(other for _, other in told.values())):
                    opened.close()
                for fd in told:
                    os.close(fd)
                return _become(json.loads(request), files)
            _tell(reply, str(pid))
            for fd in files:
                os.close(fd)
            watch = os.pidfd_open(pid)
            told[watch] = pid, reply
            selector.register(watch, selectors.EVENT_READ)


def _tell(reply: socket.socket, text: str) -> None:
    try:
        reply.send(text.encode())
    except OSError:
        pass  # the test has ended


def _become(request: Request, files: list[int]) -> str:
    """Make this fork the process that was asked for."""
    code, arguments, folder, environment, network_of = request
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if network_of is not None:
        _enter_network(network_of)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    time.tzset()
    for number, fd in enumerate(files):
        os.dup2(fd, number)
        os.close(fd)
    # Never closed, as those of Python itself.
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False, buffering=1)  # noqa: SIM115
    sys.argv[:] = ["-c", *arguments]
    return code


def _enter_network(pid: int) -> None:
    own, its = "/proc/self/ns/net", f"/proc/{pid}/ns/net"
    if os.stat(own).st_ino == os.stat(its).st_ino:
        return  # entering it takes rights that not everybody has
    with open(its) as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "the network of the caller cannot be entered")


if __name__ == "__main__":
    sys.path[0] = ""  # as with `python -c`: the folder it is in, whichever that is
    sys.path.append(str(Path(__file__).parent.parent))  # for modules of the tests
    if (_code := _serve(socket.socket(fileno=int(sys.argv[1])))) is not None:
        exec(_code, {"__name__": "__main__"})
