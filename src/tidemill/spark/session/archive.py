"""Creates the class data sharing archive of Spark's JVM: with it, the JVM maps its classes instead of parsing them.

The classes are those that a first JVM recorded while it started. A process of its own creates the archive from that
list, at the lowest priority, some time after the start; nothing of Spark runs in it.

Invariants: the archive delays neither a start nor an end; its process is killed when this one ends, however it ends. An
archive has its name only once it is complete. Only one process of a host creates it at a time, and the kernel kills it
before anything else when memory runs out.
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

#: How long it may take; a busy host gives the lowest priority next to nothing.
LIMIT_SECONDS = 600.0
#: A start of Spark loads more classes than this.
FEWEST_CLASSES = 1_000
#: The reader kills all of its process group when this process is gone: the pipe is closed then, whatever ended it.
_GUARDED = (
    "exec 3<&0; "
    '(echo 1000 >/proc/self/oom_score_adj; exec nice -n 19 "$@") </dev/null >/dev/null 2>&1 3<&- & maker=$!; '
    "(read -r _ <&3; kill -KILL 0) >/dev/null 2>&1 & reader=$!; exec 3<&-; "
    'wait "$maker"; code=$?; kill -KILL "$reader"; exit $code'
)


class ArchiveMaker:
    """Creates an archive in a thread, unless it is stopped first.

    Args:
        kept: Where it belongs.
        classes: The list that the running JVM records; may be incomplete at its end.
        environ: The environment for the process.
    """

    def __init__(self, kept: KeptLaunch, classes: Path, environ: dict[str, str]) -> None:
        """Start nothing; `start` does."""
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
        """Kill the process, if it runs; returns at once."""
        with self._lock:
            self._stopping.set()
            process = self._process
        if process is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def wait(self, seconds: float) -> bool:
        """Wait for the thread; tell whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._kept.prepare()
            lock = lock_file(self._kept.folder / ".lock")
        except HeldError:
            return
        except OSError as error:
            log.debug("no class archive: the cache folder cannot be written", error=describe_error(error))
            return
        try:
            self._make()
        except OSError as error:
            log.debug("could not create the class archive", error=describe_error(error))
        finally:
            os.close(lock)

    def _make(self) -> None:
        """Create the archive under another name, and rename it."""
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
                # Ctrl-C is not for it, and all of it can be killed together.
                start_new_session=True,
            )
        keep_from_forks(process)
        with process:
            try:
                return process.wait(LIMIT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return process.wait()
