"""Signals, and what blocks while a run starts or stops: a wish to end is heard at every moment.

Signal handlers and other threads only put a word into the run's queue. The thread that runs a pipeline or a backfill
waits on that queue alone; whatever can block (a handler's `on_startup`, brokers, Spark) runs in a thread beside it.

Invariant: after a wish to end, the waiting thread goes on within `END_SECONDS`, whatever the other one hangs in. That
one is a daemon: it does not keep the process alive.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from tidemill.spark.session.session import Spark

ResultT = TypeVar("ResultT")
WordT = TypeVar("WordT")

#: How long a step of the start may take to end after it was told to.
END_SECONDS = 1.0
NUMBERS = (signal.SIGTERM, signal.SIGINT)


class StartStoppedError(Exception):
    """A step was ended on request.

    Attributes:
        at_once: Whether it was asked for twice.
    """

    def __init__(self, *, at_once: bool) -> None:
        """Say how."""
        super().__init__("ended on request")
        self.at_once = at_once


def unless_stopped(
    work: Callable[[], ResultT],
    words: queue.SimpleQueue[WordT],
    done: WordT,
    abort: Callable[[], None],
    ignored: Collection[WordT] = (),
) -> ResultT:
    """Run one step of a start or a stop in another thread and return its result.

    Args:
        work: What may block.
        words: Where wishes to end arrive; every other word than `done` and those ignored is one.
        done: What the other thread puts there when it has ended.
        abort: Called in this thread when the step is to end; must not block.
        ignored: Words that may arrive and are no wish to end.

    Raises:
        StartStoppedError: A wish to end came first; the step has ended, was given `END_SECONDS`, or a second wish came.
    """
    result: Future[ResultT] = Future()

    def run() -> None:
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        words.put(done)

    threading.Thread(target=run, name="tidemill-start", daemon=True).start()
    # An earlier step that was given up may say only now that it has ended.
    while (word := words.get()) in ignored or (word is done and not result.done()):
        pass
    if word is done:
        return result.result()
    abort()
    with contextlib.suppress(queue.Empty):
        raise StartStoppedError(at_once=words.get(timeout=END_SECONDS) is not done)
    raise StartStoppedError(at_once=False)


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
    try:
        unless_stopped(spark.start, words, done, spark.abort)
        yield
    except StartStoppedError as stopped:
        if stopped.at_once:
            spark.kill()
        raise
    finally:
        with contextlib.suppress(StartStoppedError):
            unless_stopped(spark.stop, words, done, spark.kill, ignored)


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
