"""The pipeline as a user runs it: from a handler and a configuration to engines on Spark, and to a clean shutdown.

The order is fixed. Startup: configuration, logging, `on_startup`, validation, packing the handler, the lock of the
worker name, looking up the topic, Spark, the link, the engines. Shutdown: the engines drain, members that could not
leave the group are removed from it, then the link and Spark are closed. Spark's JVM needs a second before it can be
used, so it is launched first; a later error ends it. Nothing else starts before everything that can be checked without
it has been checked.

Signal handlers and other threads only put a wake-up into a queue; the thread that runs the pipeline waits on that queue
and acts. It never makes a blocking call, neither during startup (see `foreground`) nor while engines run.
"""

from __future__ import annotations

import functools
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.config.loading import find_source, load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.files.lock import WorkerLock
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.link.engine import RECONNECT_SECONDS
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.link.server import LinkServer
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.spark.engine.process import ABANDONED_SECONDS, DEFAULT_FACTORY, EngineJob
from tidemill.spark.foreground import LEFT_OVER, Foreground, StartStoppedError, Wake, take
from tidemill.spark.live.control_desk import ControlDesk
from tidemill.spark.live.ending import lag_fields, leave_for, log_drained, refuse_failure, refuse_uncommitted
from tidemill.spark.live.group_monitor import GroupWatch
from tidemill.spark.live.linked_engines import LinkedEngines
from tidemill.spark.live.monitoring import Monitored, serve_metrics
from tidemill.spark.live.recording import answer_open, answer_trace, record_run
from tidemill.spark.live.reloader import CodeFiles, EngineCode, Reloader
from tidemill.spark.live.shared_progress import SharedProgress
from tidemill.spark.live.status_report import build_report
from tidemill.spark.live.supervisor import JobMaker, Supervisor
from tidemill.spark.live.user_requests import Control, make_requests
from tidemill.spark.live.web_ui import Watched, WebUi, serve_web
from tidemill.spark.preflight import (
    StartUp,
    choose_engine_count,
    make_handler,
    refuse_shared_group,
    refuse_unrunnable,
    warn_without_topic,
    with_full_paths,
)
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunPhase, RunState
from tidemill.spark.session.conf import is_local
from tidemill.spark.session.packaging import list_own_folders, pack_handler
from tidemill.spark.session.session import Spark

if TYPE_CHECKING:  # imported only if something is recorded
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)

#: A shutdown takes at most its drain timeout and this time, even if systems are unreachable; the rest of 5 s is for
#: Spark.
STOP_SECONDS = 4.0
#: The share of STOP_SECONDS that an engine may take beyond its drain timeout; `pipeline.leaving` ends it a little
#: earlier.
ENGINE_END_SECONDS = 3.0
#: The maximum time for leaving the group on behalf of engines.
LEAVE_SECONDS = 10.0


class Pipeline:
    """One run of a pipeline: a handler and its configuration.

    Args:
        handler: The handler, or its class.
        config_path: The YAML file; None: the file named by TIDEMILL_CONFIG, or the defaults.
        settings: A configuration built elsewhere; no file is read then, and `config_path` is only shown to users.
        factory: "module:callable" that builds engines; for tests of the supervision.
        limits: The time limits of the supervision; for tests.
        spark: A Spark session that was launched for these settings; None: `run` launches one.
        files: The files of the handler's code; if given, engines are replaced whenever one is saved.

    Example:
        >>> raise SystemExit(Pipeline(MyHandler, "pipeline.yaml").run())  # doctest: +SKIP
    """

    def __init__(
        self,
        handler: Handler[Any, Any] | type[Handler[Any, Any]],
        config_path: str | Path | None = None,
        *,
        settings: Settings | None = None,
        factory: str = DEFAULT_FACTORY,
        limits: SlotLimits | None = None,
        spark: Spark | None = None,
        files: CodeFiles | None = None,
    ) -> None:
        self._files = files
        self._reloader: Reloader | None = None
        self._handler = handler
        self._config_path = config_path
        self._settings = settings
        self._factory = factory
        self._limits = limits
        self._spark = spark
        self._foreground = Foreground("pipeline")
        self._live: Supervisor | None = None
        self._linked = LinkedEngines(lambda: self._code.settings.kafka.source_topic if self._code is not None else "")
        self._control = Control(lambda: self._linked.actions)
        self._group_watch: GroupWatch | None = None
        self._metrics_address: str | None = None
        self._recorder: RunRecorder | None = None
        self._web: WebUi | None = None
        #: The code that the engines run; with `--dev`, new code may replace it.
        self._code: EngineCode | None = None
        self._finished: RunFinished | None = None
        self._drained_at: float | None = None

    @property
    def metrics_address(self) -> str | None:
        """The URL of metrics and health; None while there are none."""
        return self._metrics_address

    @property
    def web_address(self) -> str | None:
        """The URL of the web UI, with its key if one is needed; None while there is none."""
        return self._web.address if self._web is not None else None

    @property
    def error(self) -> BaseException | None:
        """The error of the run; None if it has not failed or not ended."""
        return self._foreground.error

    def run(self, *, tell: bool = True) -> ExitCode:
        """Run until drained, stopped or failed; return the exit code.

        In the main thread, SIGTERM, SIGINT and SIGHUP (unless it is ignored) are handled: the first signal ends the
        startup, or drains; a second one stops at once. Errors are logged, and available as `error` afterwards.

        Args:
            tell: Whether to report an error at once; if False, the caller does so with `tell_failure`.

        Returns:
            OK after a drain; otherwise the reason, see `ExitCode`.
        """
        return self._foreground.run(self._run, tell=tell)

    def tell_failure(self) -> None:
        """Report the error of the run, if it failed."""
        self._foreground.tell_failure()

    def drain(self) -> None:
        """Request a clean end; returns at once, callable from any thread."""
        self._foreground.wakes.put(Wake.DRAIN)

    def stop_now(self) -> None:
        """Request an immediate end, which kills running tasks; the next run reprocesses them. Safe from any thread."""
        self._foreground.wakes.put(Wake.STOP)

    def progress(self) -> PipelineProgress:
        """Return the sums over all engines, and the status of each; callable from any thread at any time."""
        if self._live is None:
            return PipelineProgress()
        progress, recorder = self._live.progress(), self._recorder
        return progress if recorder is None else recorder.count_losses(progress)

    def state(self) -> RunState:
        """Return what the run is doing or waiting for; callable from any thread at any time."""
        return self._foreground.states.now()

    # -- start -----------------------------------------------------------------------------------------------

    def _run(self) -> ExitCode:
        try:
            return self._start_and_run()
        except StartStoppedError as stopped:
            log.info("stopped before the engines started; no messages were read")
            return ExitCode.STOPPED if stopped.at_once else ExitCode.OK

    def _start_and_run(self) -> ExitCode:
        settings = self._settings or load_settings(self._config_path)
        # `on_startup` may change these settings, but other processes find this run by the configured ones.
        self._found_by = settings.kafka
        worker = find_worker_name(settings)
        self._foreground.configure_logs(settings, worker)
        spark = self._spark or Spark(settings.spark, _name_app(settings), 1)
        with spark.launching():
            return self._check_and_run(spark, settings, worker)

    def _check_and_run(self, spark: Spark, configured: Settings, worker: str) -> ExitCode:
        foreground = self._foreground
        handler = make_handler(self._handler)
        startup = StartUp(handler, configured)
        with foreground.states.step(f"{type(handler).__name__}.on_startup is running"):
            settings = with_full_paths(foreground.unless_stopped(startup.run, startup.cancel))
        foreground.configure_logs(settings, worker)
        # Reject what no engine could run before starting anything.
        refuse_unrunnable(settings)
        warn_without_topic(configured, settings)
        packed = pack_handler(handler)
        kafka, monitored, engines = settings.kafka, self._monitored(settings), self._linked
        with (
            WorkerLock(
                kafka.consumer_group,
                worker,
                brokers=kafka.brokers,
                topic=kafka.source_topic,
                name_env=settings.worker_name_env,
            ),
            self._open_desk(settings, worker),
            serve_metrics(configured.metrics, settings, worker, monitored) as self._metrics_address,
            record_run(settings, worker, self.progress) as self._recorder,
            serve_web(
                Watched(
                    monitored,
                    settings,
                    configured,
                    worker,
                    self._control,
                    engines,
                    self.drain,
                    self._metrics_address,
                    self._find_config(),
                ),
                self._recorder,
            ) as self._web,
        ):
            partitions = foreground.unless_stopped(lambda: foreground.look_up_partitions(settings))
            with foreground.wait_for_brokers(kafka.brokers):
                foreground.unless_stopped(lambda: refuse_shared_group(settings, worker))
            return self._run_on_spark(spark, settings, worker, packed, partitions)

    def _find_config(self) -> Path | None:
        if self._settings is not None and self._config_path is None:
            return None
        return find_source(self._config_path)

    def _monitored(self, first: Settings) -> Monitored:
        def find_orphans() -> list[int]:
            return self._group_watch.orphans if self._group_watch is not None else []

        def find_max_executors() -> int:
            return (self._code.settings if self._code is not None else first).executor.max_executors

        return Monitored(SharedProgress(self.progress), self.state, find_orphans, find_max_executors)

    def _note_action(self, action: str, by: str) -> None:
        log.info("carried out an action for a user", action=action, by=by)
        if self._recorder is not None:
            self._recorder.note_action(action, by)

    def _open_desk(self, settings: Settings, worker: str) -> ControlDesk:
        def report(progress: PipelineProgress, rate: float) -> dict[str, Any]:
            addresses = {"metrics": self._metrics_address, "web": self.web_address}
            return build_report(settings, worker, self.state(), progress, rate, addresses)

        def trace(request: dict[str, Any]) -> dict[str, Any]:
            known = answer_trace(self._recorder, settings.kafka.consumer_group, worker, request)
            return known | answer_open(self._linked.find_message, request)

        table = make_requests(self._control, self._note_action, trace)
        return ControlDesk(self._found_by, worker, self.progress, report, table)

    def _run_on_spark(self, spark: Spark, settings: Settings, worker: str, packed: bytes, partitions: int) -> ExitCode:
        count = choose_engine_count(settings.spark, partitions)
        if changed := spark.configure(settings.spark, _name_app(settings), count):
            text = "the handler's import or on_startup changed the environment of Spark's JVM; restarting the JVM"
            log.info(text, changed=changed)
            spark.abandon()
            spark = Spark(settings.spark, _name_app(settings), count)
        log.info("starting Spark", master=settings.spark.master, engines=count, partitions=partitions)
        with self._foreground.running(spark):
            return self._run_live(spark, settings, worker, packed, count, partitions)

    def _run_live(
        self, spark: Spark, settings: Settings, worker: str, packed: bytes, count: int, partitions: int
    ) -> ExitCode:
        first, on_all_ready = EngineCode(settings, packed), None
        if self._files is not None:
            wake = functools.partial(self._foreground.wakes.put, Wake.RELOAD)
            restart = functools.partial(self._restart, spark, worker)
            self._reloader = Reloader(self._files, self._files.imported, first, wake, restart)
            on_all_ready = self._reloader.on_all_ready
        make_job, limits = self._job_maker(spark, worker, first), self._choose_limits(settings)
        live = Supervisor(spark, worker, count, make_job, self._on_finished, limits, partitions, on_all_ready)
        host = "127.0.0.1" if is_local(settings.spark) else spark.driver_host
        spark.watch(lambda: self._foreground.wakes.put(Wake.SPARK_LOST))
        self._live = live
        if self._recorder is not None:
            live.actions.on_pause = functools.partial(self._recorder.note_pause, settings.kafka.source_topic)
        try:
            live.start(bind_host=host, open_link=self._recorder.open_link if self._recorder else LinkServer)
            self._linked.live = live
            if self._web is not None:
                self._web.begin()
            self._foreground.states.enter(RunPhase.RUNNING)
            self._group_watch = GroupWatch(settings)
            with self._group_watch, self._reloader.attach(live) if self._reloader else nullcontext():
                code = self._supervise(live, settings.executor.drain_timeout_seconds)
        finally:
            self._linked.live = None
            live.close()
            if self._recorder is not None:
                self._recorder.note_link_closed()
            spark.used = live.greeted
        if code is not ExitCode.STOPPED:
            done = live.progress()
            if not done.uncommitted:  # otherwise the brokers are unreachable
                self._leave_for(settings, worker, live.find_left_behind())
            self._raise_failure(settings, worker)
            refuse_uncommitted(done)
            log_drained(done)
        return code

    def _job_maker(self, spark: Spark, worker: str, code: EngineCode) -> JobMaker:
        self._code = code
        folders, context, factory = list_own_folders(), self._foreground.log_context, self._factory

        def make_job(slot: int, job_token: int, address: LinkAddress) -> EngineJob:
            code_of_job = code.settings, code.packed
            return EngineJob(slot, job_token, worker, address, *code_of_job, context, factory, folders, spark.environ)

        return make_job

    def _restart(self, spark: Spark, worker: str, live: Supervisor, code: EngineCode) -> None:
        live.restart(self._job_maker(spark, worker, code), self._choose_limits(code.settings))

    def _choose_limits(self, settings: Settings) -> SlotLimits:
        if self._limits is not None:
            return self._limits
        lost = RECONNECT_SECONDS + ABANDONED_SECONDS + settings.executor.drain_timeout_seconds
        return SlotLimits(lost_seconds=lost, drain_seconds=settings.executor.drain_timeout_seconds + ENGINE_END_SECONDS)

    # -- while engines run -----------------------------------------------------------------------------------

    def _supervise(self, live: Supervisor, drain_seconds: float) -> ExitCode:
        signals = 0
        while True:
            wake = take(self._foreground.wakes)
            if wake is Wake.SIGNAL:
                signals += 1
                wake = Wake.DRAIN if signals == 1 else Wake.STOP
            match wake:
                case Wake.RELOAD if self._reloader is not None:
                    self._reloader.step()
                case Wake.DRAIN:
                    self._stop_reloads()
                    self._drained_at = self._drained_at or time.monotonic()
                    now = live.progress()
                    text = "draining: reading no more messages; a second signal stops at once"
                    log.info(text, **lag_fields(now), in_flight=now.in_flight)
                    self._foreground.states.enter(RunPhase.DRAINING, drain_seconds)
                    live.drain()
                case Wake.STOP:
                    log.warning("stopping at once; the next run reprocesses uncommitted messages")
                    live.exit_now()
                    return ExitCode.STOPPED
                case Wake.SPARK_LOST:
                    self._foreground.error = RemoteError(
                        "Spark's JVM exited unexpectedly (out of memory, or killed?); the engines were drained: start "
                        "the pipeline again"
                    )
                    log.error("Spark's JVM has exited; draining the engines")
                    self._foreground.states.enter(RunPhase.DRAINING, drain_seconds)
                    self._stop_reloads()
                    live.drain()
                case Wake.FINISHED if self._reloader is None or self._reloader.ended(self._finished):
                    return ExitCode.OK

    def _stop_reloads(self) -> None:
        if self._reloader is not None:
            self._reloader.stop()

    def _compute_left(self, settings: Settings) -> float:
        """Return how many seconds the shutdown may still take."""
        if self._drained_at is None:
            return LEAVE_SECONDS
        left = self._drained_at + settings.executor.drain_timeout_seconds + STOP_SECONDS - time.monotonic()
        return min(LEAVE_SECONDS, max(left, 1.0))

    def _on_finished(self, finished: RunFinished) -> None:
        self._finished = finished
        self._foreground.wakes.put(Wake.FINISHED)

    # -- stop ------------------------------------------------------------------------------------------------

    def _leave_for(self, settings: Settings, worker: str, slots: list[int]) -> None:
        def leave() -> None:
            leave_for(settings, worker, slots, self._compute_left(settings))

        try:
            self._foreground.unless_stopped(leave, ignored=LEFT_OVER)
        except StartStoppedError:
            log.warning("not waiting for the brokers; partitions may stay reserved for the session timeout")

    def _raise_failure(self, settings: Settings, worker: str) -> None:
        """Raise the error of the run, unless it was drained."""
        if self._foreground.error is not None:
            raise self._foreground.error
        if self._finished is not None:
            refuse_failure(self._finished, settings, worker)


def _name_app(settings: Settings) -> str:
    return f"tidemill {settings.kafka.consumer_group}"
