"""Starts and stops the SparkContext that the engines run on.

`launching` launches the JVM before all other steps of a startup: it needs a second, during which this process imports,
checks and queries the brokers. `start` continues from there.

Invariants: afterwards the process has its previous signal handlers; a startup ends by itself after
`spark.start_timeout_seconds`, and at once when it is aborted. A JVM that was launched early is used only if it would be
launched the same way now. Importing this module does not import pyspark.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Self

import structlog

from tidemill.config.settings import SparkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.spark.engine.environment import list_environment
from tidemill.spark.session.conf import is_local, redirect_sockets, spark_conf
from tidemill.spark.session.java_errors import find_cause
from tidemill.spark.session.jvm import JvmEndedError, close_stdin, end, keep_signal_handlers, kill_launch
from tidemill.spark.session.launching import JvmLaunch
from tidemill.spark.session.process_tree import Descendants, kill_below

if TYPE_CHECKING:
    from pyspark import SparkContext

log = structlog.get_logger(__name__)

#: How long an aborted start may take to clean up.
ABORT_SECONDS = 0.7
#: How long a context may take to stop before its JVM is ended anyway.
CONTEXT_STOP_SECONDS = 10.0
#: The same time limit for a context without engines, which would wait for Python processes that are still importing.
UNUSED_STOP_SECONDS = 0.3
#: How long the Python processes below a JVM may outlive it.
WORKERS_END_SECONDS = 5.0


class Spark:
    """A SparkContext and its JVM, from start to end.

    Args:
        settings: The `spark` section.
        app_name: The name of the Spark application.
        engines: The number of engines.
        conf: The complete Spark configuration; None: the result of `spark_conf`.
    """

    def __init__(
        self, settings: SparkSettings, app_name: str, engines: int, conf: Mapping[str, str] | None = None
    ) -> None:
        self._settings = settings
        self._conf = spark_conf(settings, app_name, engines) if conf is None else dict(conf)
        self._folder = OwnedFolder("tidemill-spark-")
        self._context: SparkContext | None = None
        self._launch = JvmLaunch(self._conf, is_local(settings), self._folder)
        self._begun = self._started = self._given_up = False
        #: The environment for engines on this host, from before Spark set its own variables; None on a cluster.
        self.environ: dict[str, str] | None = None
        #: Whether an engine may be running below the JVM; if not, a shutdown need not wait for Spark's cleanup.
        self.used = True
        #: Held only briefly, unlike `_ending`.
        self._lock = threading.Lock()
        self._ending = threading.Lock()

    @property
    def context(self) -> SparkContext:
        """The running context."""
        if self._context is None:
            raise RemoteError("Spark is not running", retryable=False)
        return self._context

    @property
    def _jvm(self) -> subprocess.Popen[bytes] | None:
        return self._launch.jvm

    @property
    def jvm_pid(self) -> int | None:
        """The process id of the JVM; None if another program started it."""
        return self._jvm.pid if self._jvm is not None else None

    @property
    def driver_host(self) -> str:
        """The address at which executors reach this process."""
        return str(self.context.getConf().get("spark.driver.host"))

    @contextlib.contextmanager
    def launching(self) -> Iterator[Self]:
        """Launch the JVM for a block, which may start it; if it does not, the JVM is ended."""
        self._launch.begin()
        try:
            yield self
        finally:
            self.abandon()

    def configure(self, settings: SparkSettings, app_name: str, engines: int) -> list[str]:
        """Use another configuration from `start` on, if the launched JVM supports it; does not block.

        Returns:
            The names of options, environment variables or "current folder" that a JVM launched now would get
                differently; in
            this case nothing changes here. Empty if the launched JVM supports the configuration.
        """
        conf = spark_conf(settings, app_name, engines)
        if not (changes := self._launch.find_changes(conf)):
            self._settings, self._conf = settings, conf
        return changes

    def abandon(self) -> None:
        """End a JVM that was launched but not started; after `start` this does nothing."""
        if not self._begun:
            self.kill()
            self.stop()

    def start(self) -> None:
        """Start the JVM, unless it is already launched, and the context; another thread can end the startup with
        `abort`.

        Raises:
            ConfigError: No Java runtime was found.
            RemoteError: Spark does not start, or not in time, or its master does not respond.
        """
        limit = threading.Timer(self._settings.start_timeout_seconds, self._give_up)
        limit.daemon = True
        limit.start()
        self._begun = True
        try:
            self._start()
        except Exception as error:
            failure = self._describe_failure(error)  # asks the JVM, so call it before the JVM is ended
            if self._given_up or not self._launch.stopping.is_set():
                self._launch.forget_kept()
            self.stop()
            if isinstance(error, ConfigError) and not self._given_up:
                raise
            raise RemoteError(failure) from error
        finally:
            limit.cancel()
        if not is_local(self._settings):
            from tidemill.spark.session.packaging import ship_package

            ship_package(self.context, self._folder.path)

    def _start(self) -> None:
        self._launch.begin()
        self.environ = list_environment(self._settings.conf) if is_local(self._settings) else None
        # This import takes about as long as the JVM's start.
        from pyspark import SparkConf, SparkContext

        os.environ["PYSPARK_PYTHON"] = self._conf["spark.pyspark.python"]
        # Give each Python thread its own JVM thread, with its own job group and pool.
        os.environ["PYSPARK_PIN_THREAD"] = "true"
        conf = SparkConf(loadDefaults=False)
        for key, value in (self._conf | redirect_sockets(self._conf, self._folder.path)).items():
            conf.set(key, value)
        gateway = self._launch.open_gateway()
        with keep_signal_handlers():
            context = SparkContext(conf=conf, gateway=gateway)
        keep_accumulators_quiet(context)
        with self._lock:
            if not self._launch.stopping.is_set():
                self._context = context
                self._started = True
                return
        raise JvmEndedError("it was stopped")

    def note_running(self) -> None:
        """Record that an engine is running; does not block."""
        self._launch.note_running()

    def _describe_failure(self, error: Exception) -> str:
        master = self._conf["spark.master"]
        if self._given_up:
            return (
                f"Spark did not start with master {master!r} within {self._settings.start_timeout_seconds:g} s "
                "(spark.start_timeout_seconds); check that `java -version` and the master respond, how busy this "
                "host is and how much memory it has left, and run `tidemill doctor`"
            )
        return (
            f"Spark does not start with master {master!r}: {_describe(error) or self._launch.output.describe_end()}; "
            "check spark.master and spark.conf, and run `tidemill doctor`"
        )

    def abort(self) -> None:
        """Abort a startup that runs in another thread, which then raises an error there; does not block."""
        threading.Thread(target=self._end_start, args=(ABORT_SECONDS,), name="tidemill-abort", daemon=True).start()

    def kill(self) -> None:
        """End the JVM at once, if there is one."""
        self._end_start(0.0)

    def kill_launch(self) -> None:
        """Kill the JVM, if there is one; safe in a signal handler, because it waits for no lock."""
        if self._jvm is not None:
            kill_launch(self._jvm)

    def _give_up(self) -> None:
        self._given_up = True
        self._end_start(ABORT_SECONDS)

    def _end_start(self, seconds: float) -> None:
        """End a startup; a JVM that already listens gets these seconds to clean up and exit by itself."""
        self._launch.output.quiet.set()
        with self._lock:
            jvm, started = self._launch.stop(), self._started
        if jvm is None:
            return
        if self._launch.listens:
            close_stdin(jvm)
            with contextlib.suppress(subprocess.TimeoutExpired):
                jvm.wait(seconds)
        if jvm.poll() is None:
            # Below a started Spark there are engines, whose wardens must outlive the JVM, so kill only the JVM itself.
            jvm.kill() if started else kill_launch(jvm)
        close_stdin(jvm)  # only now: until here the guard of a launch must not kill some of its processes, too

    def watch(self, on_dead: Callable[[], None]) -> None:
        """Call a function, in another thread, when the JVM exits without having been stopped."""
        jvm = self._jvm
        if jvm is None:
            return

        def wait() -> None:
            jvm.wait()
            if not self._launch.stopping.is_set():
                on_dead()

        threading.Thread(target=wait, name="tidemill-jvm", daemon=True).start()

    def is_alive(self) -> bool:
        """Return whether the JVM still accepts jobs; asks the JVM itself, because its process may be about to exit."""
        if self._context is None or self._launch.stopping.is_set() or (self._jvm and self._jvm.poll() is not None):
            return False
        try:
            return not self._context._jsc.sc().isStopped()
        except Exception:
            return False  # py4j signals a JVM that has exited in many ways

    def cancel(self, job_group: str) -> None:
        """Cancel the jobs of a job group, if Spark is running."""
        if not self.is_alive():
            return
        try:
            self.context.cancelJobGroup(job_group)
        except Exception as error:
            # A Spark that is being stopped refuses the call, but ends the job anyway.
            if not self._launch.stopping.is_set():
                log.warning(
                    "could not cancel a Spark job", job_group=job_group, error=_describe(error) or type(error).__name__
                )

    def kill_worker(self, pid: int) -> None:
        """Kill a Python worker if it runs below this process's JVM; its warden ends its child processes."""
        if self._jvm is not None and kill_below(self._jvm.pid, pid):
            log.warning("killed a Python worker", pid=pid)

    def stop(self) -> None:
        """Stop the context and the JVM; kill what does not end in time. Afterwards local engines have ended, too."""
        with self._lock:
            jvm = self._launch.stop()
        with self._ending:
            if jvm is None:
                self._stop()
                return
            with Descendants(jvm.pid) as local:
                self._stop(local)
                if left := local.wait(WORKERS_END_SECONDS):
                    log.warning("processes that Spark started are still running", pids=left)

    def _stop(self, local: Descendants | None = None) -> None:
        if self._context is not None:
            # All engines have ended, and Python workers without a JVM would print pages of traces.
            self._launch.output.quiet.set()
            if self._jvm is None or self._jvm.poll() is None:
                self._stop_context(self._context, CONTEXT_STOP_SECONDS if self.used else UNUSED_STOP_SECONDS)
            self._context = None
        if self._jvm is not None:
            if local is not None:
                local.look(self._jvm.pid)
            if not self.used:
                kill_launch(self._jvm)
            _forget_gateway(self._jvm)
            end(self._jvm)
        self._launch.close()

    def _stop_context(self, context: SparkContext, seconds: float) -> None:
        def stop() -> None:
            try:
                with warnings.catch_warnings():
                    if not self.used:  # its JVM is being killed
                        warnings.simplefilter("ignore", RuntimeWarning)
                    context.stop()
            except Exception as error:
                if self.used:
                    log.warning("the Spark context did not stop", error=_describe(error) or type(error).__name__)

        # In a thread, because a hung JVM would never respond.
        thread = threading.Thread(target=stop, name="tidemill-stop", daemon=True)
        thread.start()
        thread.join(seconds)
        if thread.is_alive() and self.used:
            log.warning("the Spark context did not stop in time", seconds=seconds)


def _forget_gateway(jvm: subprocess.Popen[bytes]) -> None:
    """Make a later context in this process start a new JVM instead of using this one."""
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    if context is None or getattr(context._gateway, "proc", None) is not jvm:
        return
    with contextlib.suppress(Exception):  # it is ending in any case
        context._gateway.shutdown()
    context._gateway = context._jvm = context._active_spark_context = None


def _describe(error: BaseException) -> str:
    """Return the cause of an error; empty if only a JVM that has exited knew it."""
    try:
        return find_cause(str(error)) or type(error).__name__
    except Exception:  # py4j signals a JVM that has exited in many ways
        return ""


def keep_accumulators_quiet(context: SparkContext) -> None:
    """Keep PySpark's accumulator server from printing a traceback when the JVM exits first, as at a second Ctrl-C.

    Args:
        context: A context that has just been created.
    """
    from pyspark.errors import PySparkRuntimeError

    def note(request: object, address: object) -> None:
        error = sys.exc_info()[1]
        if not isinstance(error, (EOFError, OSError, PySparkRuntimeError)):
            log.error("PySpark's accumulator server failed", exc_info=error)

    context._accumulatorServer.handle_error = note
