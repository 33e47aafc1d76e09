"""Spark's JVM as a process: launched here rather than by pyspark, so that a launch that hangs can be ended.

Invariants: the JVM alone ignores SIGTERM, SIGINT and SIGHUP (Ctrl-C in a terminal, and its end, reach the whole process
group, and the engines have to drain first), from before the first instruction of Spark's launcher; nothing is changed
in this process for that. The JVM does not outlive this process: the end of its standard input ends a JVM that listens,
and a guard, which reads that input as well, kills one that does not listen yet.
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

#: How long a stopped JVM may take to end before it is killed.
JVM_END_SECONDS = 10.0
#: For how long a killed JVM is waited for.
KILLED_WAIT_SECONDS = 0.5
#: How often to look whether the JVM says where it listens.
_LOOK_SECONDS = 0.01
#: How many lines of a JVM are kept, and how many of them an error has.
_KEPT_LINES, _SAID_LINES = 200, 5
#: For how long what a JVM that has ended wrote is waited for; what it started may keep the pipe open.
_LAST_LINES_SECONDS = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_PORT, _SECRET = "PYSPARK_GATEWAY_PORT", "PYSPARK_GATEWAY_SECRET"
#: What becomes the JVM. Signals that are ignored when a program is executed stay so. In the background, a child of the
#: JVM waits for the end of the JVM's standard input; as long as its parent is the JVM, no other process has that id.
#: A JVM that has written its address ends by itself. Only what Spark's launcher started is killed with it: below a JVM
#: are engines, whose wardens have to outlive them.
_LAUNCH = """
trap "" HUP INT TERM
end() {
    started=
    test "$(cat "/proc/$1/comm")" = java || started=$(cat "/proc/$1/task/"*/children)
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
    """The JVM ended before it wrote its address."""


class JvmOutput:
    """What a JVM and its descendants write to standard error: passed on, and its last lines kept.

    Attributes:
        quiet: Set when they can write only noise about their end.
    """

    def __init__(self) -> None:
        self.quiet = threading.Event()
        self._last: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._ended = threading.Event()

    @contextlib.contextmanager
    def pipe(self) -> Iterator[int]:
        """Yield a file descriptor whose lines a thread writes to `sys.stderr`, until all its writers are gone.

        The lines must not go past a live display into the terminal. Log entries of engines are shown as this process
        shows its own.
        """
        self._ended.clear()
        with relayed_output("tidemill-jvm-stderr", self._take, self._ended.set) as writer:
            yield writer

    def describe_end(self) -> str:
        """Return what a JVM that has ended wrote last, in one line; empty: nothing."""
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
    """Tell whether a JVM was started for this process by another one (spark-submit)."""
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
        command: What to execute.
        environ: Its environment, to which what Spark's scripts set is added.
        home: Spark's distribution.
        connection_file: Where the JVM writes its address; see `gateway_to`.
        output: Takes what it writes to standard error.
        inherited: Descriptors that the JVM holds open until it ends, such as the lock of the folder of that file.
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
    """Return pyspark's gateway to a JVM, once it listens.

    Args:
        jvm: What `launch` returned; None: the one that was started for this process.
        connection_file: The same as at its launch.
        output: The same as at its launch.

    Raises:
        JvmEndedError: It ended before, or was ended.
    """
    from pyspark.java_gateway import launch_gateway
    from pyspark.serializers import UTF8Deserializer, read_int

    if jvm is None:
        return launch_gateway()
    while not connection_file.is_file():
        if jvm.poll() is not None:
            said = output.describe_end()
            text = f"the JVM ended with exit code {jvm.returncode} before it listened"
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
    """Ask a JVM to end, if it listens already."""
    if jvm.stdin is not None:
        with contextlib.suppress(OSError):
            jvm.stdin.close()


def end(jvm: subprocess.Popen[bytes]) -> None:
    """End a JVM that ran, by closing its standard input; one that does not end in time is killed."""
    close_stdin(jvm)
    try:
        jvm.wait(JVM_END_SECONDS)
    except subprocess.TimeoutExpired:
        log.warning("the JVM did not end in time and is killed", pid=jvm.pid)
        jvm.kill()
        jvm.wait()


def kill_launch(jvm: subprocess.Popen[bytes]) -> None:
    """Kill a JVM that no engine runs below yet, with what its launcher started."""
    if jvm.poll() is None:
        kill_tree(jvm.pid)
        # Nothing it holds keeps this process: the kernel frees the rest without a wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            jvm.wait(KILLED_WAIT_SECONDS)


@contextlib.contextmanager
def keep_signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a block replaces: pyspark's would cancel all jobs at Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
