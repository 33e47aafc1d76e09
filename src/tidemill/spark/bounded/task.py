"""The task of a bounded run: runs one engine over its part of the run until all of it is processed.

Spark restarts a task, elsewhere if necessary, when its process or its host dies. Unlike an engine of a slot, the task
leaves the worker process as it found it, because in a user's own session Spark runs other tasks in it afterwards.

Invariants: a task that returns `complete` has published its outcomes; a task whose engine failed raises, so that Spark
retries it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tidemill.config.settings import Settings
from tidemill.core.ranges import Chunk
from tidemill.deadletters.files import LettersTarget
from tidemill.pipeline.bounded import BoundedEngine
from tidemill.pipeline.build import build_history
from tidemill.pipeline.delivery.file_letters import FileDeadLetters
from tidemill.pipeline.reports.outcomes import Outcomes
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.progress import EngineProgress, StopReason, without_texts
from tidemill.runtime.log.setup import configure
from tidemill.runtime.log.writer import tell_repeats
from tidemill.sources.base import TopicPartition
from tidemill.sources.bounded import BoundedSource
from tidemill.sources.ranges import RangeReader
from tidemill.sources.rows import RowReader
from tidemill.spark.engine.process import IGNORED, EngineJob, EngineProcess, outlive_stderr

PartsMaker = Callable[[Settings, EngineIdentity], tuple[BoundedSource, Outcomes]]


class ChunkFailedError(Exception):
    """An engine of a bounded run failed; raised in the task so that Spark retries it."""


class ChunkResult(msgspec.Struct, frozen=True):
    """The result of a task.

    Attributes:
        index: The number of the part.
        complete: Whether everything was processed; False if the engine was stopped.
        progress: The last progress of the engine.
        letters: The names of the files with its dead letters, if they go to files.
    """

    index: int
    complete: bool
    progress: EngineProgress
    letters: list[str] = []


def run_bounded(job: EngineJob, make: PartsMaker) -> bytes:
    """Run one engine over one part of a run, in a Spark task.

    Args:
        job: The job from the driver; its slot is the number of the part.
        make: Creates source and outcomes.

    Returns:
        A `ChunkResult`, as msgpack.

    Raises:
        ChunkFailedError: The engine failed, or lost its driver.
    """
    engines: list[BoundedEngine] = []
    abandoned = False

    def build(settings: Settings, handler: Any, identity: EngineIdentity) -> BoundedEngine:
        engines.append(BoundedEngine(settings, handler, identity, *make(settings, identity)))
        return engines[0]

    def abandon() -> None:
        nonlocal abandoned
        abandoned = True
        for engine in engines:
            engine.abandon()

    process = EngineProcess(_of_this_task(job), build, abandon)
    with _keep_process():
        configure(job.settings.logging, relayed=True, engine=job.slot, **job.log_context)
        try:
            with asyncio.Runner() as runner:
                summary = runner.run(process.run())
        finally:
            process.release()
            tell_repeats()
    complete = bool(engines) and engines[0].complete
    if summary.reason is not StopReason.DRAINED:
        raise ChunkFailedError(summary.error or summary.reason.value)
    if abandoned and not complete:
        raise ChunkFailedError("lost the connection to the driver")
    letters = engines[0].letters if engines else []
    try:
        return msgspec.msgpack.encode(ChunkResult(job.slot, complete, summary.progress, letters))
    except UnicodeEncodeError:
        return msgspec.msgpack.encode(ChunkResult(job.slot, complete, without_texts(summary.progress), letters))


def _of_this_task(job: EngineJob) -> EngineJob:
    """Return the job with the stage and attempt that the driver needs to kill this task."""
    from pyspark import TaskContext

    context = TaskContext.get()
    if context is None:
        return job
    return msgspec.structs.replace(job, stage=context.stageId(), attempt=context.taskAttemptId())


def _open_letters(
    job: EngineJob, folder: str, identity: EngineIdentity, partitions: Iterable[TopicPartition] = ()
) -> FileDeadLetters | None:
    """Return the dead-letter writer of this engine, if letters go to files."""
    path = job.settings.dlq.path
    if not path:
        return None
    return FileDeadLetters(LettersTarget(path, job.run, folder, job.outcomes_id), identity.engine_id, partitions)


def run_ranges(job: EngineJob, folder: str, chunk: Chunk, topic_id: str | None = None) -> bytes:
    """Run one engine over ranges of the source topic; see `run_bounded`.

    Args:
        job: The job from the driver.
        folder: The folder for outcomes.
        chunk: The ranges.
        topic_id: The id of the topic at the time of planning; None if unknown.
    """

    def make(settings: Settings, identity: EngineIdentity) -> tuple[BoundedSource, Outcomes]:
        source = BoundedSource(RangeReader(settings.kafka, chunk, topic_id), settings.executor.max_queued_bytes)
        ranges = {(settings.kafka.source_topic, part.partition): part for part in chunk}
        letters, history = _open_letters(job, folder, identity, ranges), build_history(settings, identity)
        return source, Outcomes(Path(folder), identity, history, ranges=ranges, letters=letters)

    return run_bounded(job, make)


def run_rows(
    job: EngineJob, folder: str, names: Sequence[str], index: int, rows: Iterator[Sequence[Any]]
) -> Iterator[bytes]:
    """Run one engine over the rows of a Spark partition, if it has any; see `run_bounded`.

    Args:
        job: The job from the driver.
        folder: The folder for outcomes.
        names: The columns; see `RowReader`.
        index: The number of the Spark partition.
        rows: The rows of the partition.
    """
    first = next(rows, None)
    if first is None:
        return

    def make(settings: Settings, identity: EngineIdentity) -> tuple[BoundedSource, Outcomes]:
        reader = RowReader(itertools.chain((first,), rows), names, index)
        name = f"part-{index:05d}.parquet"
        letters, history = _open_letters(job, folder, identity), build_history(settings, identity)
        outcomes = Outcomes(Path(folder), identity, history, name=name, letters=letters)
        return BoundedSource(reader, settings.executor.max_queued_bytes), outcomes

    yield run_bounded(job.of_part(index), make)


@contextlib.contextmanager
def _keep_process() -> Iterator[None]:
    """Restore the process's signal handlers and standard error after the block."""
    handlers = {number: signal.getsignal(number) for number in (*IGNORED, signal.SIGHUP)}
    stderr = sys.stderr
    for number in IGNORED:
        # Not SIG_IGN, which child processes would inherit; a handler is not inherited.
        signal.signal(number, lambda *_: None)
    outlive_stderr()
    try:
        yield
    finally:
        sys.stderr = stderr
        for number, handler in handlers.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
