"""A launch of Spark's JVM, in its own thread, using the cache of earlier launches if there is one.

Invariants: after `stop` no JVM is launched. If the JVM of a launch from the cache exits before it listens, the launch
is repeated without the cache; if Spark fails later, the cache is removed for the next start.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import structlog

from tidemill.runtime.embedded.jar_resolver import spark_home
from tidemill.runtime.embedded.java import find_java
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.spark.session.archive import ArchiveMaker
from tidemill.spark.session.jvm import (
    JvmEndedError,
    JvmOutput,
    close_stdin,
    gateway_to,
    is_given,
    launch,
    submit_arguments,
)
from tidemill.spark.session.kept_launch import OPTIONS, KeptLaunch, find_kept_launch

log = structlog.get_logger(__name__)

#: How long after the first engine has connected the class archive is created: late enough not to compete with the
#: startup for the CPU, and never in runs too short to complete it.
ARCHIVE_AFTER_SECONDS = 10.0
#: How long the process of an archive that is no longer needed may take to end.
_MAKER_END_SECONDS = 0.7


class JvmLaunch:
    """A JVM from its launch to its end.

    Args:
        conf: The complete Spark configuration.
        local: Whether the master is local; only then are launches cached.
        folder: The folder for its files; it stays locked as long as the JVM lives.

    Attributes:
        jvm: The process; None before the launch, or if another program started the JVM for this process.
        output: The standard error of the JVM.
    """

    def __init__(self, conf: Mapping[str, str], local: bool, folder: OwnedFolder) -> None:
        self._conf = dict(conf)
        self._local = local
        self._folder = folder
        # Copied now: the thread must not see changes that other code, such as the handler's module, makes later.
        self._inherited = dict(os.environ)
        self._described = _describe_launch(conf, self._inherited)
        self._result: Future[None] = Future()
        self._begun = False
        self._environ: dict[str, str] = {}
        self._kept: KeptLaunch | None = None
        self._learns = self._uses_kept = self._ran = False
        self._maker: ArchiveMaker | None = None
        self._lock = threading.Lock()
        self.jvm: subprocess.Popen[bytes] | None = None
        #: Set once nothing may be launched any more.
        self.stopping = threading.Event()
        self.output = JvmOutput()

    @property
    def listens(self) -> bool:
        """Whether the JVM listens, so that closing its standard input ends it."""
        return self._connection_file.exists()

    @property
    def _connection_file(self) -> Path:
        return self._folder.path / "connection"

    @property
    def _classes(self) -> Path:
        return self._folder.path / "classes"

    def begin(self) -> None:
        """Launch the JVM in a thread; returns at once. `open_gateway` raises its errors."""
        if not self._begun:
            self._begun = True
            threading.Thread(target=self._run, name="tidemill-launch", daemon=True).start()

    def find_changes(self, conf: Mapping[str, str]) -> list[str]:
        """Return the names of all inputs that would differ if a JVM were launched now with this configuration."""
        return self._described.find_changes(_describe_launch(conf, dict(os.environ)))

    def open_gateway(self) -> Any:
        """Return pyspark's gateway to the JVM, once the JVM listens.

        Raises:
            ConfigError: No Java runtime was found.
            JvmEndedError: The JVM exited before it listened, or was ended.
        """
        self._result.result()
        try:
            gateway = gateway_to(self.jvm, self._connection_file, self.output)
        except JvmEndedError:
            if not self._uses_kept or self.stopping.is_set():
                raise
            log.info("Spark's JVM exited at once; launching it again without the cache")
            self.forget_kept()
            if self.jvm is not None:
                close_stdin(self.jvm)
            self._launch(by_launcher=True)
            gateway = gateway_to(self.jvm, self._connection_file, self.output)
        if self._learns and self._kept is not None and self.jvm is not None:
            self._kept.learn(self.jvm.pid)
        return gateway

    def forget_kept(self) -> None:
        """Remove the cache if this launch used it, because even a JVM that listens may be broken by it."""
        if self._kept is not None and self._uses_kept:
            self._kept.forget()

    def note_running(self) -> None:
        """Record that an engine is running: the JVM has now loaded all classes that startup needs."""
        if self._kept is None or self._ran:
            return
        self._ran = True
        timer = threading.Timer(ARCHIVE_AFTER_SECONDS, self._make_archive)
        timer.daemon = True
        timer.start()

    def stop(self) -> subprocess.Popen[bytes] | None:
        """Prevent further launches and archives; return the JVM, which keeps running."""
        with self._lock:
            self.stopping.set()
            if self._maker is not None:
                self._maker.stop()
            return self.jvm

    def close(self) -> None:
        """Remove the files of the JVM, which has exited."""
        if self._maker is not None:
            self._maker.wait(_MAKER_END_SECONDS)
        self.jvm = None
        self._folder.cleanup()

    def _run(self) -> None:
        try:
            if not is_given():
                java = find_java(self._inherited, self.stopping)
                python = self._conf["spark.pyspark.python"]
                self._environ = java.environment(self._inherited) | {"PYSPARK_PYTHON": python}
                if self._local:
                    home = find_spark_home(self._inherited)
                    self._kept = find_kept_launch(java, home, self._conf, self._inherited)
                self._launch()
        except BaseException as error:
            self._result.set_exception(error)
        else:
            self._result.set_result(None)

    def _launch(self, *, by_launcher: bool = False) -> None:
        """Execute the cached command if there is one and it is wanted, or else Spark's launcher."""
        conf, home, kept = _launch_conf(self._conf), find_spark_home(self._inherited), self._kept
        arguments = functools.partial(submit_arguments, environ=self._inherited)
        command = None
        if kept is not None and not by_launcher:
            command = kept.command(arguments(conf), self._classes)
        self._learns = kept is not None and command is None
        self._uses_kept = kept is not None and (command is not None or kept.uses_archive)
        if command is None:
            if kept is not None:
                conf[OPTIONS] = f"{conf.get(OPTIONS, '')} {shlex.join(kept.sharing_options(self._classes))}".strip()
            command = [str(home / "bin" / "spark-submit"), *arguments(conf)]
        with self._lock:
            if self.stopping.is_set():
                raise JvmEndedError("it was stopped")
            self.jvm = launch(command, self._environ, home, self._connection_file, self.output, [self._folder.lock])

    def _make_archive(self) -> None:
        with self._lock:
            if self._kept is not None and self._kept.wants_archive and not self.stopping.is_set():
                self._maker = ArchiveMaker(self._kept, self._classes, self._environ)
                self._maker.start()


def find_spark_home(environ: Mapping[str, str]) -> Path:
    """Return the folder of the Spark distribution that pyspark would use, without importing pyspark."""
    given = environ.get("SPARK_HOME")
    return Path(given) if given else spark_home()


def _launch_conf(conf: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that the JVM needs at its launch; the rest, like the cores, comes with the context."""
    launch = {name: value for name, value in conf.items() if name != "spark.app.name"}
    if launch["spark.master"].startswith("local["):
        launch["spark.master"] = "local"
    return launch


class _Description(NamedTuple):
    """The inputs of a JVM: options, environment, working directory."""

    conf: Mapping[str, str]
    environ: Mapping[str, str]
    folder: Path | None

    def find_changes(self, now: _Description) -> list[str]:
        """Return the names, never the values, of all inputs that differ now."""
        names = [
            *_find_differences(self.conf, now.conf),
            *(f"environment variable {name}" for name in _find_differences(self.environ, now.environ)),
        ]
        return names if self.folder == now.folder else [*names, "current folder"]


def _find_differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


def _describe_launch(conf: Mapping[str, str], environ: Mapping[str, str]) -> _Description:
    """Return the inputs of a JVM launched now."""
    folder: Path | None = None
    with contextlib.suppress(OSError):  # the directory has been removed
        folder = Path.cwd()
    return _Description(_launch_conf(conf), environ, folder)
