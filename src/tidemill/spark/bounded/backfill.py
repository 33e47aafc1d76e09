"""Backfill: runs a handler over messages that a topic already has, as one ordinary Spark job over offset ranges.

As in a live pipeline, everything that can be checked without Spark is checked before Spark starts, and the plan is
stored before anything is processed. A backfill joins no consumer group and commits no offset, so a live pipeline of the
same group continues undisturbed.

Invariants: a range is done if and only if its outcomes have been published; running the same backfill again processes
the remaining ranges. As everywhere, finished work that was not acknowledged is reprocessed.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.ranges import Chunk, check_order, choose_piece_size, group_pieces, parse_position
from tidemill.core.wording import format_count
from tidemill.pipeline.bounded import make_bounded_settings
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.spark.bounded.letter_run import LetterRun, check_letters, letter_run
from tidemill.spark.bounded.plan import BackfillFolder, BackfillPlan, check_still_there, make_plan, refuse_unordered
from tidemill.spark.bounded.recording import BoundedRecorder, describe_backfill, record_bounded_run
from tidemill.spark.bounded.run import BoundedProgress, BoundedRun
from tidemill.spark.bounded.schema import outcomes_frame
from tidemill.spark.bounded.task import ChunkResult, run_ranges
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.foreground import Foreground, StartStoppedError, Wake, take
from tidemill.spark.preflight import StartUp, make_handler, refuse_missing_program, refuse_no_sinks, with_full_paths
from tidemill.spark.run_state import RunPhase, RunState
from tidemill.spark.session.conf import bounded_conf
from tidemill.spark.session.packaging import list_own_folders, pack_handler, ship_package
from tidemill.spark.session.session import Spark

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame, SparkSession

log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")


class _Work:
    """The work of a run, once everything has been checked."""

    def __init__(
        self, settings: Settings, packed: bytes, plan: BackfillPlan, parts: list[Chunk], letters: LetterRun
    ) -> None:
        self.letters = letters
        self.settings = settings
        self.worker = f"{find_worker_name(settings)}.backfill"
        self.packed = packed
        self.plan = plan
        self.parts = parts
        self.sizes = [sum(piece.size for piece in chunk) for chunk in parts]

    @property
    def before(self) -> int:
        """The number of offsets that earlier runs processed."""
        return self.plan.total - sum(self.sizes)


class Backfill:
    """One run of a backfill: a handler, its configuration, two positions and a folder for outcomes.

    Args:
        handler: The handler, or its class.
        config_path: The YAML file; None: the file named by TIDEMILL_CONFIG, or the defaults.
        start: The first position: `earliest`, an offset, or a time in ISO 8601 with a time zone.
        end: The end position, in the same forms; `latest` is the end of the topic at the first start.
        outcomes: A folder for the outcomes: empty, or the folder of the same backfill, which then resumes. On a
            cluster it must be shared by all hosts.
        settings: A configuration built elsewhere; no file is read then.
        range_messages: The maximum number of offsets in a range; None: a quarter of a core's share, 1,000 to 50,000.
        whole_partitions: Do not split partitions, so that each is processed in order.

    Example:
        >>> code = Backfill(MyHandler, "pipeline.yaml", start="earliest", outcomes="out").run()  # doctest: +SKIP
    """

    def __init__(
        self,
        handler: Handler[Any, Any] | type[Handler[Any, Any]],
        config_path: str | Path | None = None,
        *,
        start: str,
        end: str = "latest",
        outcomes: str | Path,
        settings: Settings | None = None,
        range_messages: int | None = None,
        whole_partitions: bool = False,
    ) -> None:
        self._handler = handler
        self._config_path = config_path
        self._settings = settings
        self._start, self._end = start, end
        self._folder = BackfillFolder(Path(outcomes).absolute())
        self._range_messages = range_messages
        self._whole_partitions = whole_partitions
        self._foreground = Foreground("backfill")
        self._run: BoundedRun | None = None
        self._stopped = False
        self._startup: StartUp | None = None
        self._last = BoundedProgress()
        #: How many of the requested offsets the broker had deleted before they were read.
        self.gap = 0

    @property
    def error(self) -> BaseException | None:
        """The error of the run; None if it has not failed or not ended."""
        return self._foreground.error

    def progress(self) -> BoundedProgress:
        """Return the sums over all engines; callable from any thread at any time."""
        run = self._run
        return self._last if run is None else run.progress()

    def state(self) -> RunState:
        """Return what the run is doing or waiting for; callable from any thread at any time."""
        return self._foreground.states.now()

    def stop(self) -> None:
        """Finish work in flight and end; a second call ends at once. Callable from any thread, for `run` only."""
        self._foreground.wakes.put(Wake.SIGNAL)

    def run(self, *, tell: bool = True) -> ExitCode:
        """Run on a new Spark session until everything is done or the run is stopped; return the exit code.

        In the main thread, a first SIGTERM or SIGINT lets work in flight finish, a second one stops at once; run the
        same backfill again to process the rest. The exit code is OK if everything is done, and STOPPED if the run was
        stopped.

        Args:
            tell: Whether to report an error at once; if False, the caller does so with `tell_failure`.
        """
        return self._foreground.run(self._run_to_end, tell=tell)

    def tell_failure(self) -> None:
        """Report the error of the run, if it failed."""
        self._foreground.tell_failure()

    def run_in(self, session: SparkSession) -> DataFrame:
        """Run in an existing session, in this thread, and return the outcomes.

        Raises:
            TidemillError: The run failed; finished ranges stay finished.
        """
        with self._prepare() as todo:
            if todo.parts:
                context = session.sparkContext
                ship_package(context)
                with (
                    self._record(todo) as recorder,
                    BoundedRun(context, todo.sizes, todo.before, recorder) as run,
                ):
                    self._run = run
                    try:
                        self._check(todo, run.results(lambda: self._collect(context, run.address, todo, None)))
                    finally:
                        self._note_end(run)
            self._report(todo)
        return outcomes_frame(session, self._folder.path)

    def _run_to_end(self) -> ExitCode:
        foreground = self._foreground
        try:
            with contextlib.ExitStack() as stack:
                todo = foreground.unless_stopped(lambda: stack.enter_context(self._prepare()), self._cancel_startup)
                if todo.parts:
                    self._run_alone(todo)
                self._report(todo)
        except StartStoppedError:
            self._stopped = True
            log.info("the backfill was stopped before it started; run it again")
        return ExitCode.STOPPED if self._stopped else ExitCode.OK

    def _cancel_startup(self) -> None:
        if self._startup is not None:
            self._startup.cancel()

    # -- before Spark -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _prepare(self) -> Iterator[_Work]:
        """Check everything, and yield the remaining work while holding the folder's lock."""
        start, end = parse_position(self._start, "the start (--from)"), parse_position(self._end, "the end (--to)")
        check_order(start, end, ("the start (--from)", "the end (--to)"))
        if self._range_messages is not None and self._range_messages < 1:
            raise ConfigError(f"a range cannot have {self._range_messages} messages; use 1 or more")
        settings = self._settings or load_settings(self._config_path)
        self._foreground.configure_logs(settings, find_worker_name(settings))
        handler = make_handler(self._handler)
        self._startup = StartUp(handler, settings)
        settings = make_bounded_settings(with_full_paths(self._startup.run()))
        self._foreground.configure_logs(settings, find_worker_name(settings))
        refuse_no_sinks(settings)
        refuse_missing_program(settings)
        check_letters(settings)
        refuse_unordered(settings, whole=self._whole_partitions)
        packed = pack_handler(handler)
        self._foreground.look_up_partitions(settings)
        with self._folder.locked():
            plan = self._folder.load(settings.kafka.source_topic, self._start, self._end)
            if plan is None:
                plan = make_plan(
                    settings, self._start, self._end, self._choose_size(settings), whole=self._whole_partitions
                )
                self._folder.save(plan)
                left = plan.pieces
            else:
                refuse_unordered(settings, whole=plan.is_whole)
                self._folder.tidy()
                left = self._folder.find_left(plan)
                log.info("resuming the backfill", left=sum(piece.size for piece in left), total=plan.total)
                check_still_there(settings, left, plan.topic_id)
            self.gap = plan.deleted
            size = self._choose_size(settings)(plan.total)
            with letter_run(settings, self._folder.path) as letters:
                yield _Work(settings, packed, plan, group_pieces(left, size), letters)

    @staticmethod
    def _count_cores(settings: Settings) -> int:
        return settings.spark.engines or len(os.sched_getaffinity(0))

    def _record(self, todo: _Work) -> AbstractContextManager[BoundedRecorder | None]:
        run = describe_backfill(
            todo.plan, todo.sizes, self._folder.path, self.progress, lambda: "stopped" if self._stopped else "done"
        )
        return record_bounded_run(todo.settings, todo.worker, run)

    def _choose_size(self, settings: Settings) -> Callable[[int], int]:
        """Return a function from the total number of messages to the maximum size of a range."""
        return lambda total: self._range_messages or choose_piece_size(total, self._count_cores(settings))

    # -- on Spark ---------------------------------------------------------------------------------------------

    def _run_alone(self, todo: _Work) -> None:
        """Start Spark and run the job in a thread, so that this thread can always react to signals."""
        settings = todo.settings
        cores = min(self._count_cores(settings), len(todo.parts))
        name = f"tidemill backfill {settings.kafka.source_topic}"
        spark = Spark(settings.spark, name, cores, bounded_conf(settings.spark, name, cores))
        log.info("starting Spark", master=settings.spark.master, ranges=len(todo.parts), offsets=todo.plan.total)
        with self._foreground.running(spark), self._record(todo) as recorder:
            with BoundedRun(spark.context, todo.sizes, todo.before, recorder) as run:
                self._run = run
                self._foreground.states.enter(RunPhase.RUNNING)
                try:
                    results = self._supervise(spark, run, todo)
                finally:
                    self._note_end(run)
                    spark.used = run.greeted
            if not self._stopped:
                self._check(todo, results)

    def _supervise(self, spark: Spark, run: BoundedRun, todo: _Work) -> list[ChunkResult]:
        from pyspark import InheritableThread

        results: list[ChunkResult] = []
        failure: list[Exception] = []
        group = f"tidemill-backfill-{uuid.uuid4().hex}"

        def work() -> None:
            try:
                spark.context.setJobGroup(group, f"tidemill backfill of {todo.plan.topic}")
                results.extend(run.results(lambda: self._collect(spark.context, run.address, todo, spark.environ)))
            except Exception as error:
                failure.append(error)
            self._foreground.wakes.put(Wake.FINISHED)

        thread = InheritableThread(target=work, name="tidemill-backfill", daemon=True)
        thread.start()
        while take(self._foreground.wakes) is Wake.SIGNAL:
            if not self._stopped:
                self._stopped = True
                log.info("stopping: finishing work in flight; a second signal stops at once")
                self._foreground.states.enter(RunPhase.DRAINING, todo.settings.executor.drain_timeout_seconds)
                run.drain(lambda: spark.cancel(group))
            else:
                run.exit_now()
                spark.cancel(group)
        if failure and not self._stopped:
            raise failure[0]
        return results

    def _collect(self, spark: SparkContext, link: LinkAddress, todo: _Work, env: dict[str, str] | None) -> list[bytes]:
        folder, context, folders = str(self._folder.path), self._foreground.log_context, list_own_folders()
        job = EngineJob(0, 0, todo.worker, link, todo.settings, todo.packed, context, import_path=folders, environ=env)
        job, topic_id = todo.letters.of(job), todo.plan.topic_id

        def work(parts: Iterator[tuple[int, Chunk]]) -> Iterator[bytes]:
            for index, chunk in parts:
                yield run_ranges(job.of_part(index), folder, chunk, topic_id)

        parts = list(enumerate(todo.parts))
        collected: list[bytes] = spark.parallelize(parts, len(parts)).mapPartitions(work).collect()
        return collected

    def _note_end(self, run: BoundedRun) -> None:
        self._last, self._run = run.progress(), None
        self.gap += self._last.gap

    # -- the end ----------------------------------------------------------------------------------------------

    def _check(self, todo: _Work, results: Sequence[ChunkResult]) -> None:
        """Check that the outcomes of the run are in this process's folder."""
        incomplete = sorted(set(range(len(todo.parts))) - {result.index for result in results if result.complete})
        if incomplete:
            raise RemoteError(f"not finished: {format_count(len(incomplete), 'range')}; run the same backfill again")
        if left := self._folder.find_left(todo.plan):
            raise ConfigError(
                f"the outcomes of {format_count(len(left), 'range')} are not in {self._folder.path}: engines on other "
                "hosts wrote them locally; put the folder on storage that all hosts share, and run the backfill again"
            )
        todo.letters.check(results)

    def _report(self, todo: _Work) -> None:
        left = sum(piece.size for piece in self._folder.find_left(todo.plan))
        done = self._last
        log.info(
            "the backfill was stopped; run it again to process the rest" if left else "the backfill is done",
            left=left,
            messages_done=done.messages_done,
            dead_lettered=done.dead_lettered,
            gap=self.gap,
            outcomes=str(self._folder.path),
        )


def backfill(
    handler: Handler[Any, Any] | type[Handler[Any, Any]],
    config: Settings | str | Path | None = None,
    *,
    start: str,
    end: str = "latest",
    outcomes: str | Path,
    session: SparkSession | None = None,
    range_messages: int | None = None,
    whole_partitions: bool = False,
) -> DataFrame:
    """Run a handler over messages that a topic already has, and return the outcomes: one row per message.

    Args:
        handler: The handler, or its class.
        config: Settings or a YAML file; None: the file named by TIDEMILL_CONFIG, or the defaults.
        start: The first position: `earliest`, an offset, or a time in ISO 8601 with a time zone.
        end: The end position, in the same forms, or `latest`.
        outcomes: A folder for the outcomes: empty, or the folder of the same backfill, which then resumes.
        session: The session to run in; None: the active one.
        range_messages: The maximum number of offsets in a range.
        whole_partitions: Do not split partitions, so that each is processed in order.

    Returns:
        The outcomes of all runs of this backfill, read from the folder; reading them does not deliver anything again.

    Raises:
        ConfigError: An argument is invalid, or there is no session.
        TidemillError: The run failed; finished ranges stay finished, and the same call processes the rest.
    """
    run = Backfill(
        handler,
        None if isinstance(config, Settings) else config,
        start=start,
        end=end,
        outcomes=outcomes,
        settings=config if isinstance(config, Settings) else None,
        range_messages=range_messages,
        whole_partitions=whole_partitions,
    )
    return run.run_in(find_session(session))


def find_session(session: SparkSession | None) -> SparkSession:
    """Return the given session, or else the active one.

    Raises:
        ConfigError: There is no session.
    """
    from pyspark.sql import SparkSession

    found = session or SparkSession.getActiveSession()
    if found is None:
        raise ConfigError(
            "there is no Spark session to run in; create one first, for example with "
            "SparkSession.builder.master('local[2]').getOrCreate()"
        )
    return found
