"""Signals, and what blocks while a run starts or stops: a wish to end is heard at every moment.

Signal handlers and other threads only put a word into the run's queue. The thread that runs a pipeline or a backfill
waits on that queue alone; whatever can block (a handler's `on_startup`, brokers, Spark) runs in a thread beside it.

Invariant: after a wish to end, the waiting thread goes on within `END_SECONDS`, whatever the other one hangs in. That
one is a daemon: it does not keep the process alive. The end of a start has that one deadline for all its steps; what
is left of Spark then is killed.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tidemill.spark.session.session import Spark

ResultT = TypeVar("ResultT")
WordT = TypeVar("WordT")

#: How long a start may take to end after it was told to, all its steps together.
END_SECONDS = 1.0
#: How long it may take to tidy up what was killed.
KILLED_SECONDS = 0.3
NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StartStoppedError(Exception):
    """A step was ended on request.

    Attributes:
        at_once: Whether it was asked for twice.
        deadline: The `time.monotonic()` at which everything else has to have ended, too.
    """

    def __init__(self, *, at_once: bool, deadline: float) -> None:
        """Say how."""
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
    """Run one step of a start or a stop in another thread and return its result.

    Args:
        work: What may block.
        words: Where wishes to end arrive; every other word than `done` and those ignored is one.
        done: What the other thread puts there when it has ended.
        abort: Called in this thread when the step is to end; must not block.
        ignored: Words that may arrive and are no wish to end.
        deadline: The `time.monotonic()` at which the step is ended unasked, and not waited for.

    Raises:
        StartStoppedError: A wish to end came first; the step has ended, was given `END_SECONDS`, or a second wish came.
            Or the deadline has passed.
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
        # An earlier step that was given up may say only now that it has ended.
        while (word := words.get(timeout=_until(deadline))) in ignored or (word is done and not result.done()):
            pass
    except queue.Empty:
        abort()
        raise StartStoppedError(at_once=False, deadline=time.monotonic()) from None
    if word is done:
        return result.result()
    deadline = time.monotonic() + END_SECONDS
    abort()
    try:
        at_once = words.get(timeout=_until(deadline)) is not done
    except queue.Empty:
        at_once = False
    raise StartStoppedError(at_once=at_once, deadline=deadline)


def _until(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


@contextlib.contextmanager
def running(spark: Spark, words: queue.SimpleQueue[WordT], done: WordT, ignored: Collection[WordT]) -> Iterator[None]:
    """Start Spark for a block and stop it after that; a wish to end is heard meanwhile.

    Args:
        spark: What is started.
        words: See `unless_stopped`.
        done: The same.
        ignored: Words that may be left when Spark is stopped.

    Raises:
        StartStoppedError: The start was ended.
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
def signals_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call a function at every SIGTERM and SIGINT while the block runs, if this is the main thread.

    Args:
        note: Must do no more than a `SimpleQueue.put`, the one call that is safe wherever a signal arrives.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        note()

    before = {number: signal.signal(number, handle) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def signals_kept() -> Iterator[None]:
    """Undo the handlers that a block sets: pyspark's would cancel all jobs at Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
