"""The process of Spark's JVM, launched here rather than by pyspark, so that a launch that hangs can be ended.

Invariants: only the JVM ignores SIGTERM, SIGINT and SIGHUP, from before the first instruction of Spark's launcher,
because Ctrl-C and a closed terminal signal the whole process group, and the engines must drain first. This process's
own handlers stay unchanged. The JVM does not outlive this process: when its standard input closes, a JVM that listens
exits by itself, and a guard that reads the same input kills one that does not listen yet.
"""

from __future__ import annotations

import collections
import contextlib
import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from tidemill.runtime.log.relayed_output import relayed_output
from tidemill.runtime.log.setup import RELAY_VARIABLE
from tidemill.runtime.process.parent_pipes import keep_from_forks
from tidemill.spark.session.java_errors import find_cause
from tidemill.spark.session.process_tree import kill_tree

log = structlog.get_logger(__name__)

#: How long a stopped JVM may take to exit before it is killed.
JVM_END_SECONDS = 10.0
#: How long to wait for a killed JVM.
KILLED_WAIT_SECONDS = 0.5
#: The interval between checks for the JVM's address.
_LOOK_SECONDS = 0.01
#: How many lines of a JVM's output are kept, and how many of them an error quotes.
_KEPT_LINES, _SAID_LINES = 200, 5
#: How long to wait for the last output of a JVM that has exited; its descendants may keep the pipe open.
_LAST_LINES_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
#: The script that becomes the JVM. A signal that is ignored at exec stays ignored. A background child, the guard, waits
#: until the JVM's standard input closes; while the JVM is its parent, no other process can have the JVM's id. A JVM
#: that has written its address exits by itself. Below a JVM there are engines, whose wardens must outlive them; so only
#: the processes below a script are killed along with it: Spark's launcher, or a script in the place of Java. A script
#: is named after its file, but runs another program. It is stopped first, so that it starts nothing unnoticed.
_LAUNCH = """
trap "" HUP INT TERM
end() {
    started=
    kill -STOP "$1"
    case $(readlink "/proc/$1/exe") in
    */java) ;;
    *) started=$(cat "/proc/$1/task/"*/children) ;;
    esac
    kill -KILL "$1"
    set -- $started
    for pid; do
        test "$pid" = "$guard" || end "$pid"
    done
}
{
    read -r _
    read -r guard _ _ parent _ </proc/self/stat
    test -e "$_PYSPARK_DRIVER_CONN_INFO_PATH" || test "$parent" != $$ || end $$
} </proc/$$/fd/0 >/dev/null 2>&1 &
exec "$@"
"""
#: Java's warnings about options that Spark itself sets: noise, and plain text among JSON logs.
_NOISE = (b"WARNING: Using incubator modules", b"WARNING: package sun.security.action not in")


class JvmEndedError(Exception):
    """The JVM exited before it wrote its address."""


class JvmOutput:
    """The standard error of a JVM and its descendants: relayed, with the last lines kept.

    Attributes:
        quiet: Set once only noise about the end can still be written.
    """

    def __init__(self) -> None:
        self.quiet = threading.Event()
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._ended = threading.Event()

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """Yield a file descriptor whose lines a thread writes to `sys.stderr`, until all writers have closed it.

        Lines must not bypass a live display in the terminal. Log entries of engines are formatted like this process's
        own.
        """
        self._ended.clear()
        with relayed_output("tidemill-jvm-stderr", self._take, self._ended.set) as writer:
            yield writer

    def describe_end(self) -> str:
        """Return the last output of a JVM that has exited, in one line; empty if there is none."""
        self._ended.wait(_LAST_LINES_SECONDS)
        text = "\n".join(self._last)
        if "Caused by: " in text:
            return find_cause(text)
        return "; ".join([line.strip() for line in self._last if not line.startswith("\tat ")][-_SAID_LINES:])

    def _take(self, line: bytes) -> bool:
        if self.quiet.is_set() or line.startswith(_NOISE):
            return False
        if line.strip():
            self._last.append(line.decode(errors="replace").rstrip())
        return True


def is_given() -> bool:
    """Return whether another program (spark-submit) has started a JVM for this process."""
    return _PORT in os.environ


def submit_arguments(conf: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """Return the arguments of Spark's main class."""
    options = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    return [*options, *shlex.split(environ.get("PYSPARK_SUBMIT_ARGS", "pyspark-shell"))]


def launch(
    command: Sequence[str],
    environ: Mapping[str, str],
    home: Path,
    connection_file: Path,
    output: JvmOutput,
    inherited: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a JVM, or the launcher that becomes one; returns at once.

    Args:
        command: The command to execute.
        environ: The environment; the variables that Spark's scripts set are added.
        home: The folder of the Spark distribution.
        connection_file: The file to which the JVM writes its address; see `gateway_to`.
        output: Receives the standard error.
        inherited: Descriptors that the JVM holds open until it exits, such as the lock of the folder of that file.
    """
    environ = {
        "SPARK_HOME": str(home),
        "SPARK_CONF_DIR": str(home / "conf"),
        **environ,
        "PYTHONHASHSEED": "0",
        "SPARK_CONNECT_MODE": "0",
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(connection_file),
        RELAY_VARIABLE: "1",
    }
    with output.pipe() as standard_error:
        jvm = subprocess.Popen(
            ["sh", "-c", _LAUNCH, "sh", *command],
            stdin=subprocess.PIPE,
            stderr=standard_error,
            env=environ,
            pass_fds=inherited,
        )
    keep_from_forks(jvm)
    return jvm


def gateway_to(jvm: subprocess.Popen[bytes] | None, connection_file: Path, output: JvmOutput) -> Any:
    """Return pyspark's gateway to a JVM, once the JVM listens.

    Args:
        jvm: The process from `launch`; None: the JVM that another program started for this process.
        connection_file: The file that was passed to `launch`.
        output: The output that was passed to `launch`.

    Raises:
        JvmEndedError: The JVM exited before it listened, or was ended.
    """
    from pyspark.java_gateway import launch_gateway
    from pyspark.serializers import UTF8Deserializer, read_int

    if jvm is None:
        return launch_gateway()
    while not connection_file.is_file():
        if jvm.poll() is not None:
            said = output.describe_end()
            text = f"the JVM exited with code {jvm.returncode} before it was ready"
            raise JvmEndedError(f"{text}: {said}" if said else text)
        time.sleep(_LOOK_SECONDS)
    with connection_file.open("rb") as info:
        told = {_PORT: str(read_int(info)), _SECRET: UTF8Deserializer().loads(info)}
    os.environ.update(told)
    try:
        gateway = launch_gateway()
    finally:
        for name in told:
            del os.environ[name]
    gateway.proc = jvm
    return gateway


def close_stdin(jvm: subprocess.Popen[bytes]) -> None:
    """Ask a JVM to exit; this has an effect once it listens."""
    if jvm.stdin is not None:
        with contextlib.suppress(OSError):
            jvm.stdin.close()


def end(jvm: subprocess.Popen[bytes]) -> None:
    """End a JVM that was running by closing its standard input; kill it if it does not exit in time."""
    close_stdin(jvm)
    try:
        jvm.wait(JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("killing the JVM because it did not exit in time", pid=jvm.pid)
        jvm.kill()
        jvm.wait()


def kill_launch(jvm: subprocess.Popen[bytes]) -> None:
    """Kill a JVM below which no engine runs yet, with everything that its launcher started."""
    if jvm.poll() is None:
        kill_tree(jvm.pid)
        # Do not wait for long: it holds nothing that this process needs, and the kernel frees the rest.
        with contextlib.suppress(subprocess.TimeoutExpired):
            jvm.wait(KILLED_WAIT_SECONDS)


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a block replaces: pyspark's handler would cancel all jobs at Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
