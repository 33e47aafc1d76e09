"""Creates the class data sharing archive of Spark's JVM, with which the JVM maps its classes instead of parsing them.

The first JVM records the classes that it loads while it starts. Some time after the start, a separate process with the
lowest priority creates the archive from that list; it runs no Spark code.

Invariants: the archive delays neither the start nor the end of this process; the separate process is killed when this
one ends, however it ends. An archive gets its name only once it is complete. One process per host at a time creates it,
and the kernel kills that process first when memory runs out.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from pathlib import Path

import structlog

from tidemill.core.errors import describe_error
from tidemill.runtime.files.lock import HeldError, lock_file
from tidemill.runtime.process.parent_pipes import keep_from_forks
from tidemill.spark.session.kept_launch import KeptLaunch

log = structlog.get_logger(__name__)

#: How long the creation may take; on a busy host, the lowest priority gets next to no CPU time.
LIMIT_SECONDS = 600.0
#: A complete start of Spark loads more classes than this.
FEWEST_CLASSES = 1_000
#: When this process exits, for whatever reason, the pipe closes and the reader kills its whole process group.
_GUARDED = (
    "exec 3<&0; "
    '(echo 1000 >/proc/self/oom_score_adj; exec nice -n 19 "$@") </dev/null >/dev/null 2>&1 3<&- & maker=$!; '
    "(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & reader=$!; exec 3<&-; "
    'wait "$maker"; code=$?; kill -KILL "$reader"; exit $code'
)


class ArchiveMaker:
    """Creates an archive in a thread, unless it is stopped first.

    Args:
        kept: The cache that the archive belongs to.
        classes: The class list that the running JVM records; it may be incomplete at its end.
        environ: The environment for the process.
    """

    def __init__(self, kept: KeptLaunch, classes: Path, environ: dict[str, str]) -> None:
        self._kept = kept
        self._classes = classes
        self._environ = environ
        self._stopping = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tidemill-archive", daemon=True)

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def stop(self) -> None:
        """Kill the process if it is running; returns at once."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread; return whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._kept.prepare()
            lock = lock_file(self._kept.folder / ".lock")
        except HeldError:
            return
        except OSError as error:
            log.debug("no class archive: cannot write to the cache folder", error=describe_error(error))
            return
        try:
            self._make()
        except OSError as error:
            log.debug("could not create the class archive", error=describe_error(error))
        finally:
            os.close(lock)

    def _make(self) -> None:
        """Create the archive under a temporary name, then rename it."""
        target = self._kept.folder / "new.jsa"
        classes = self._kept.folder / "new.classes"
        try:
            lines = self._classes.read_bytes().rpartition(b"\n")[0].splitlines(keepends=True)
            command = self._kept.dump_command(classes, target)
            if len(lines) < FEWEST_CLASSES or command is None or not self._kept.wants_archive:
                return
            classes.write_bytes(b"".join(lines) + b"\n")
            code = self._execute(command)
            if code == 0 and target.is_file():
                self._kept.keep_archive(target)
            elif not self._stopping.is_set():
                log.debug("could not create the class archive", exit_code=code)
                self._kept.note_failure()
        finally:
            for file in (target, classes):
                with contextlib.suppress(OSError):
                    file.unlink(missing_ok=True)

    def _execute(self, command: list[str]) -> int:
        with self._lock:
            if self._stopping.is_set():
                return -1
            self._process = process = subprocess.Popen(
                ["/bin/sh", "-c", _GUARDED, "sh", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._environ,
                # A new session shields it from Ctrl-C, and makes all of it killable as one group.
                start_new_session=True,
            )
        keep_from_forks(process)
        with process:
            try:
                return process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()
