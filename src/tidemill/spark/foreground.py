"""The foreground of a process that runs a live pipeline or a backfill: signals, exit codes, log context.

Signal handlers and other threads only put a wake-up into the run's queue. The thread that runs the pipeline or backfill
waits on that queue alone. Everything that may block (a handler's `on_startup`, brokers, Spark) runs in another thread,
so a request to end is noticed at any moment.

Invariant: after a request to end, the waiting thread continues within `END_SECONDS`, wherever the other thread hangs.
The other thread is a daemon thread, so it does not keep the process alive. All steps that end a startup share one
deadline; after it, the rest of Spark is killed.
"""

from __future__ import annotations

import contextlib
import enum
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import TidemillError
from tidemill.runtime.identity import cluster_name
from tidemill.runtime.kafka.client import CALL_SECONDS
from tidemill.runtime.log.setup import configure, tell_failure
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.stop_signals import find_stop_signals, handle_signal
from tidemill.spark.preflight import has_source_topic, look_up_partitions
from tidemill.spark.run_state import RunPhase, RunStates
from tidemill.spark.session.session import Spark

log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")
WordT = TypeVar("WordT")

#: How long all steps of a startup together may take to end once they are asked to.
END_SECONDS = 1.0
#: How long the cleanup after a kill may take.
KILLED_SECONDS = 0.3
#: The maximum delay until a signal is noticed.
WAIT_SECONDS = 0.25


class Wake(enum.Enum):
    """Wake-ups of the thread that runs a pipeline or a backfill."""

    #: A step of the startup or shutdown has ended.
    STEPPED = enum.auto()
    #: A signal: the first one drains, or ends the startup; a second one stops at once.
    SIGNAL = enum.auto()
    DRAIN = enum.auto()
    STOP = enum.auto()
    SPARK_LOST = enum.auto()
    #: An event that concerns reloads of the user's code.
    RELOAD = enum.auto()
    #: The engines have ended.
    FINISHED = enum.auto()


#: Wake-ups that may be left in the queue when the engines have ended.
LEFT_OVER = (Wake.DRAIN, Wake.SPARK_LOST, Wake.RELOAD, Wake.FINISHED)


class StartStoppedError(Exception):
    """A step was ended on request.

    Attributes:
        at_once: Whether the end was requested twice.
        deadline: The `time.monotonic()` by which all other steps must have ended, too.
    """

    def __init__(self, *, at_once: bool, deadline: float) -> None:
        super().__init__("ended on request")
        self.at_once = at_once
        self.deadline = deadline


def unless_stopped(
    work: Callable[[], ResultT],
    words: queue.SimpleQueue[WordT],
    done: WordT,
    abort: Callable[[], None],
    ignored: Collection[WordT] = (),
    deadline: float | None = None,
) -> ResultT:
    """Run one step of a startup or shutdown in another thread, and return its result.

    Args:
        work: The step; it may block.
        words: The queue for requests to end: every word except `done` and the ignored ones.
        done: The word that the other thread adds when the step has ended.
        abort: Called in this thread to end the step; it must not block.
        ignored: Words that are not requests to end.
        deadline: The `time.monotonic()` at which the step is ended in any case.

    Raises:
        StartStoppedError: A request to end came before the step was done, or the deadline has passed. It is raised once
            the step has ended, `END_SECONDS` have passed, or a second request has come.
    """
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        words.put(done)

    threading.Thread(target=run, name="tidemill-start", daemon=True).start()
    try:
        # An abandoned earlier step may report only now that it has ended.
        while (word := take(words, deadline)) in ignored or (word is done and not result.done()):
            pass
    except queue.Empty:
        abort()
        raise StartStoppedError(at_once=False, deadline=time.monotonic()) from None
    if word is done:
        return result.result()
    deadline = time.monotonic() + END_SECONDS
    abort()
    try:
        at_once = take(words, deadline) is not done
    except queue.Empty:
        at_once = False
    raise StartStoppedError(at_once=at_once, deadline=deadline)


def take(words: queue.SimpleQueue[WordT], deadline: float | None = None) -> WordT:
    """Return the next word, which a signal handler of this thread may add.

    A signal that arrives just before the wait begins does not interrupt it, and its handler runs only afterwards.
    Therefore every single wait is short.

    Args:
        words: The queue.
        deadline: The `time.monotonic()` at which to give up.

    Raises:
        queue.Empty: The deadline has passed.
    """
    while True:
        left = WAIT_SECONDS if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            return words.get(timeout=min(left, WAIT_SECONDS))
        except queue.Empty:
            if left <= WAIT_SECONDS and deadline is not None:
                raise


@contextlib.contextmanager
def running(spark: Spark, words: queue.SimpleQueue[WordT], done: WordT, ignored: Collection[WordT]) -> Iterator[None]:
    """Start Spark for a block and stop it afterwards, reacting to requests to end in both phases.

    Args:
        spark: The Spark session.
        words: See `unless_stopped`.
        done: See `unless_stopped`.
        ignored: Words that may be left in the queue when Spark is stopped.

    Raises:
        StartStoppedError: The startup was ended on request.
        TidemillError: Spark does not start.
    """
    deadline: float | None = None
    try:
        unless_stopped(spark.start, words, done, spark.abort)
        yield
    except StartStoppedError as stopped:
        deadline = stopped.deadline
        if stopped.at_once or deadline <= time.monotonic():
            spark.kill()
            deadline = time.monotonic() + KILLED_SECONDS
        raise
    finally:
        with contextlib.suppress(StartStoppedError):
            unless_stopped(spark.stop, words, done, spark.kill, ignored, deadline)


@contextlib.contextmanager
def note_signals(note: Callable[[], None]) -> Iterator[None]:
    """Call a function on every stop signal during the block, if this is the main thread.

    Args:
        note: Must only call `SimpleQueue.put`, which is safe wherever a signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    hangups = 0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal hangups
        hangups += number == signal.SIGHUP
        # Closing a terminal may send SIGHUP twice: from the system and from the shell.
        if number != signal.SIGHUP or hangups == 1:
            note()

    before = {number: handle_signal(number, handle) for number in find_stop_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _do_nothing() -> None:
    pass


class Foreground:
    """A run in the foreground of its process.

    Args:
        what: The name of the run in log messages.

    Attributes:
        wakes: The queue in which signals and other threads wake the running thread.
        error: The error of the run; None if it has not failed or not ended.
        log_context: Fields for every log line of this process; engines receive them, too.
        states: What the run is doing at each moment.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        # `put` may be called from a signal handler, unlike `Event.set`.
        self.wakes: queue.SimpleQueue[Wake] = queue.SimpleQueue()
        self.error: BaseException | None = None
        self.log_context: dict[str, Any] = {}
        self.states = RunStates()

    def run(self, work: Callable[[], ExitCode], *, tell: bool = True) -> ExitCode:
        """Run in this thread, handle signals, report errors, store them in `error`, and return the exit code.

        Args:
            work: The run; returns the exit code if there is no error.
            tell: Whether to report an error here; if False, the caller does so with `tell_failure`.
        """
        try:
            with note_signals(lambda: self.wakes.put(Wake.SIGNAL)):
                return work()
        except TidemillError as error:
            self.error = error
            if tell:
                self.tell_failure()
        except KeyboardInterrupt as error:
            self.error = error
        except Exception as error:
            self.error = error
            log.exception(f"the {self._what} failed; this is a bug in tidemill, please report it")
        return find_exit_code(self.error)

    def tell_failure(self) -> None:
        """Report the error of the run, unless it was a bug, which has already been logged with its traceback."""
        if isinstance(self.error, TidemillError):
            tell_failure(f"the {self._what} failed", self.error)

    def configure_logs(self, settings: Settings, worker: str) -> None:
        """Configure this process's logging according to the settings, with context fields for every line."""
        self.log_context = {
            "worker_id": worker,
            "consumer_group": settings.kafka.consumer_group,
            "cluster": cluster_name(settings) or None,
        }
        configure(settings.logging, **self.log_context)

    def unless_stopped(
        self,
        work: Callable[[], ResultT],
        abort: Callable[[], None] = _do_nothing,
        ignored: Collection[Wake] = (),
    ) -> ResultT:
        """Run one step of the startup or shutdown; see `unless_stopped`."""
        return unless_stopped(work, self.wakes, Wake.STEPPED, abort, ignored)

    def wait_for_brokers(self, brokers: str) -> contextlib.AbstractContextManager[None]:
        """During the block, show that the brokers are being waited for; after a second, also log it."""

        def warn() -> None:
            log.warning("no response from the brokers yet; retrying", brokers=brokers, for_up_to_seconds=CALL_SECONDS)

        return self.states.step(f"connecting to {brokers}", f"no broker at {brokers} yet", warn)

    def look_up_partitions(self, settings: Settings) -> int:
        """Return the number of partitions of the source topic, and show what is being waited for; blocks.

        Raises:
            ConfigError: The brokers do not let this client see the topic.
            RemoteError: The brokers do not respond, or the topic does not exist.
        """
        with self.wait_for_brokers(settings.kafka.brokers):
            known = has_source_topic(settings)
        missing = f"topic {settings.kafka.source_topic} does not exist yet"
        with self.wait_for_brokers(settings.kafka.brokers) if known else self.states.step(missing):
            return look_up_partitions(settings)

    @contextlib.contextmanager
    def running(self, spark: Spark) -> Iterator[None]:
        """Start Spark for a block and stop it afterwards; see `running`."""
        with contextlib.ExitStack() as starting:
            starting.enter_context(self.states.step("Spark is starting"))
            with running(spark, self.wakes, Wake.STEPPED, LEFT_OVER):
                starting.close()
                try:
                    yield
                finally:
                    self.states.enter(RunPhase.STOPPING)
                    starting.enter_context(self.states.step("Spark is stopping"))
