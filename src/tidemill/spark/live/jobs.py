"""Runs the endless Spark jobs of the slots: one thread per slot, each job in its own job group.

Invariants: every submitted job yields exactly one `JobOutcome`, on the given loop, unless the loop is already closed.
This module restarts nothing.
"""

from __future__ import annotations

import asyncio
import queue
import re
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from tidemill.core import errors
from tidemill.core.errors import TidemillError
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.runtime.link.progress import EngineProgress, EngineSummary
from tidemill.spark.engine.process import EngineJob, run_slot
from tidemill.spark.session.java_errors import find_cause
from tidemill.spark.session.session import Spark

log = structlog.get_logger(__name__)

_RAISED = re.compile(r"Python worker:\s*\n.*?Traceback \(most recent call last\):\n(?:[ \t]+.*\n|\n)*(\S.*)", re.DOTALL)
_LOST_TASK = re.compile(r"most recent failure:.*?\): (.*)", re.DOTALL)


class JobOutcome(msgspec.Struct, frozen=True):
    """The end of a job.

    Attributes:
        ending: How its engine ended, as far as the job shows.
        error: The error, in one line.
        progress: The engine's last progress, if it was returned.
        spark_lost: Spark itself is gone; no further job can run.
    """

    ending: EngineEnding
    error: str | None = None
    progress: EngineProgress | None = None
    spark_lost: bool = False


def read_outcome(summary: EngineSummary) -> JobOutcome:
    """Return the outcome for an engine's own summary."""
    return JobOutcome(EngineEnding(summary.reason.value), summary.error, summary.progress)


class JobThread:
    """The thread that submits the jobs of one slot and waits for them.

    Args:
        spark: The Spark session.
        slot: The slot.
        loop: The loop on which `on_ended` is called.
        on_ended: Called with slot, job token and outcome.
    """

    def __init__(
        self,
        spark: Spark,
        slot: int,
        loop: asyncio.AbstractEventLoop,
        on_ended: Callable[[int, int, JobOutcome], None],
    ) -> None:
        """Start the thread; it waits for a job."""
        from pyspark import InheritableThread

        self._spark = spark
        self._slot = slot
        self._loop = loop
        self._on_ended = on_ended
        self._queue: queue.SimpleQueue[EngineJob | None] = queue.SimpleQueue()
        # The thread has its own JVM thread, so job group and pool apply to its jobs only and disappear with it.
        thread = InheritableThread(target=self._run, name=f"tidemill-slot-{slot}", daemon=True)
        thread.start()

    def submit(self, job: EngineJob) -> None:
        """Run a job; it must be the only one of this slot."""
        self._queue.put(job)

    def close(self) -> None:
        """End the thread, after its current job if there is one."""
        self._queue.put(None)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            outcome = self._run_job(job)
            try:
                self._loop.call_soon_threadsafe(self._on_ended, self._slot, job.job_token, outcome)
            except RuntimeError:
                return  # the loop is closed: the pipeline has ended

    def _run_job(self, job: EngineJob) -> JobOutcome:
        try:
            (encoded,) = self._collect(job)
            return read_outcome(msgspec.msgpack.decode(encoded, type=EngineSummary))
        except Exception as error:
            return JobOutcome(EngineEnding.CRASHED, describe_failure(error), spark_lost=not self._spark.is_alive())

    def _collect(self, job: EngineJob) -> list[bytes]:
        context = self._spark.context
        # Each slot has its own pool, so a restarted slot does not queue behind the tasks of other jobs.
        context.setLocalProperty("spark.scheduler.pool", f"tidemill-slot-{self._slot}")
        context.setJobGroup(job_group(job.worker, self._slot, job.job_token), f"tidemill engine of slot {self._slot}")
        result: list[bytes] = context.parallelize([self._slot], 1).mapPartitions(lambda _: run_slot(job)).collect()
        return result


def job_group(worker: str, slot: int, job_token: int) -> str:
    """Return the name of the job group of one submission."""
    return f"tidemill-{worker}-{slot}-{job_token}"


def make_engine_error(what: str, said: str) -> TidemillError:
    """Return an engine's error as an error of this process, of the type that the engine named.

    Args:
        what: The name of the engine.
        said: The error that it reported, "TypeOfError: text" if possible.

    Example:
        >>> make_engine_error("the engine of slot 0", "ConfigError: no such folder")
        ConfigError('the engine of slot 0 failed: no such folder')
    """
    name, _, text = said.partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, TidemillError):
        return kind(f"{what} failed: {text}")
    return TidemillError(f"{what} failed: {said}")


def describe_failure(error: Any) -> str:
    """Describe in one line why a job failed; Spark's texts are pages of Java and Python traces.

    Example:
        >>> describe_failure(RuntimeError("... org.apache.spark.SparkException: Python worker exited unexpectedly"))
        'its Python process died (killed, or crashed)'
    """
    try:
        text = str(error)  # for a JVM error, this calls the JVM
    except Exception:
        text = "Spark is gone"
    if "Python worker exited unexpectedly" in text:
        return "its Python process died (killed, or crashed)"
    if raised := _RAISED.search(text):
        # Take the last line of the Python traceback; the lines after it are Java's.
        return f"its Python process raised {raised.group(1).strip()}"[:500]
    if lost := _LOST_TASK.search(text):
        return lost.group(1).strip().splitlines()[0].strip()[:500]
    return find_cause(text)[:500] or type(error).__name__
