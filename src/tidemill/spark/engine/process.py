"""The process of a Spark Python worker: one engine, its link to the driver, and a deadline.

The engine owns the worker's main thread. SIGINT and SIGTERM are ignored here, because clean stops come over the link.
On SIGHUP (Spark's Python daemon is exiting), a lost link or a changed parent process, the engine drains and ends by a
deadline. The deadline has a thread of its own, so that it also ends a blocked loop.

Invariants: every run ends with a summary, never with an exception, and never with SystemExit, which Spark would take
for its own; once a deadline is set, the process ends, whatever hangs.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import os
import signal
import socket
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, Protocol

import msgspec
import structlog
from pyspark import cloudpickle

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError, describe_error
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.core.recorder.outgoing import OutgoingFrames
from tidemill.runtime.identity import EngineIdentity, new_engine_id
from tidemill.runtime.link.beats import Beat, whole_beat
from tidemill.runtime.link.engine import RECONNECT_SECONDS, EngineLink, EngineRefusedError
from tidemill.runtime.link.frames import (
    BeginFrame,
    Command,
    DrainFrame,
    ExitFrame,
    GoFrame,
    HelloFrame,
    LinkAddress,
    PauseFrame,
    ReleaseFrame,
    ResumeFrame,
)
from tidemill.runtime.link.live_tasks import LiveSource
from tidemill.runtime.link.probe_report import ProbeSource
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason, drop_summary_texts
from tidemill.runtime.log.setup import configure
from tidemill.runtime.log.writer import tell_repeats
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.spark.engine.environment import in_environment
from tidemill.spark.engine.process_deadline import DEADLINE_EXIT, ProcessDeadline

log = structlog.get_logger(__name__)

#: How long an unsupervised engine may outlive its drain timeout.
ABANDONED_SECONDS = 14.0
#: How long a supervised engine may outlive its drain timeout: closing sinks and consumer takes time.
SUPERVISED_SECONDS = 60.0
#: How long an engine that must exit at once may take to write its last log lines.
EXIT_SECONDS = 1.0
#: Clean stops come over the link; Spark ends the worker of a cancelled task by other means.
IGNORED = (signal.SIGINT, signal.SIGTERM)
DEFAULT_FACTORY = "tidemill.pipeline.build:build_engine"


class EngineJob(msgspec.Struct, frozen=True):
    """The job that the driver sends to an engine.

    Attributes:
        slot: The slot of the engine.
        job_token: The number of this submission.
        worker: The worker name.
        address: The driver's side of the link.
        settings: The validated configuration.
        handler: The handler, cloudpickled.
        log_context: Fields for every log line of the engine.
        factory: "module:callable" that builds the engine from settings, handler and identity.
        import_path: The driver's own folders, searched for modules if they exist on the engine's host.
        environ: The driver's environment variables; None on a cluster.
        stage: The Spark stage of a bounded run's task.
        attempt: Spark's number for the attempt of that task.
        run: The id of the bounded run.
        outcomes_id: The id of the folder of its outcomes.
    """

    slot: int
    job_token: int
    worker: str
    address: LinkAddress
    settings: Settings
    handler: bytes
    log_context: dict[str, Any]
    factory: str = DEFAULT_FACTORY
    import_path: list[str] = []
    environ: dict[str, str] | None = None
    stage: int = -1
    attempt: int = -1
    run: str = ""
    outcomes_id: str = ""

    def of_part(self, index: int) -> EngineJob:
        """Return a copy of this job for one part of a bounded run."""
        return msgspec.structs.replace(self, slot=index)


class RunnableEngine(Protocol):
    """The interface of an engine, as a factory returns it; implemented by `tidemill.pipeline.engine.Engine`."""

    @property
    def records(self) -> OutgoingFrames | None:
        """Records for the driver to store; None if nothing is recorded."""

    @property
    def live(self) -> LiveSource | None:
        """The live view of the engine's tasks; None if there is none."""

    @property
    def prober(self) -> ProbeSource | None:
        """The prober of messages; None if there is none."""

    def beat(self, *, whole: bool) -> Beat:
        """Return the progress for the driver, with all partitions, or only those changed since the last beat."""

    async def run(self, may_subscribe: Any) -> EngineSummary:
        """Work until drained or ended."""

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Return the stage of a message; None if it is not open here."""

    def drain(self, *, keep_membership: bool = False) -> None:
        """Start a clean end; with `keep_membership`, another engine takes over the membership in the group."""

    def fail(self, text: str) -> None:
        """End at once, because an indispensable part of the process is gone."""

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Take no new messages from exactly these partitions of the source topic; None: from all."""

    def resume(self) -> None:
        """Take messages from all partitions again."""

    def release(self) -> None:
        """Release the brake, if it is on."""


EngineMaker = Callable[[Settings, Any, EngineIdentity], RunnableEngine]


def run_slot(job: EngineJob) -> Iterator[bytes]:
    """Run one engine to its end and yield its summary as msgpack; the function of the slot's Spark task."""
    summary = _run_to_summary(job)
    try:
        yield msgspec.msgpack.encode(summary)
    except UnicodeEncodeError:
        yield msgspec.msgpack.encode(drop_summary_texts(summary))


def _run_to_summary(job: EngineJob) -> EngineSummary:
    for number in IGNORED:
        # Not SIG_IGN, which child processes would inherit; a handler is not inherited.
        signal.signal(number, lambda *_: None)
    outlive_stderr()
    try:
        configure(job.settings.logging, relayed=True, engine=job.slot, **job.log_context)
        with asyncio.Runner() as runner:
            return runner.run(EngineProcess(job).run())
    except BaseException as error:
        # This includes SystemExit: a handler that calls sys.exit() is a failed engine.
        log.exception("the engine failed")
        return make_failed_summary(job, error)
    finally:
        tell_repeats()


def make_failed_summary(job: EngineJob, error: BaseException, reason: StopReason = StopReason.FAILED) -> EngineSummary:
    """Return the summary of an engine that ended with an error."""
    return EngineSummary(job.slot, reason, describe_error(error))


def _imported(factory: str) -> EngineMaker:
    module, _, name = factory.partition(":")
    found: EngineMaker = getattr(importlib.import_module(module), name)
    return found


def outlive_stderr() -> None:
    """Discard log lines once the JVM that reads them has exited, because the engine still has to drain."""

    class Lasting(io.FileIO):
        def write(self, data: Any) -> int:
            try:
                return super().write(data) or 0
            except OSError:
                null = os.open(os.devnull, os.O_WRONLY)
                os.dup2(null, 2)
                os.close(null)
                return len(data)

    raw = Lasting(2, "w", closefd=False)
    sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
    )


class EngineProcess:
    """The worker process while an engine runs in it.

    Args:
        job: The job from the driver.
        build: Creates the engine; None: the factory named in the job.
        on_abandoned: Called once when the engine is no longer supervised, before it drains.
    """

    def __init__(
        self,
        job: EngineJob,
        build: EngineMaker | None = None,
        on_abandoned: Callable[[], None] | None = None,
    ) -> None:
        self._job = job
        self._build = build
        self._on_abandoned = on_abandoned
        self._engine: RunnableEngine | None = None
        self._beat_lost = False
        self._begin = asyncio.Event()
        self._go = asyncio.Event()
        self._draining = False
        self._paused: PauseFrame | None = None
        self._is_abandoned = False
        self._fault: str | None = None
        self._tasks = EngineTasks(self._on_fault)
        self._connecting: asyncio.Task[int] | None = None
        self._drain_seconds = job.settings.executor.drain_timeout_seconds

    async def run(self) -> EngineSummary:
        """Connect, wait for `BeginFrame`, run the engine, and report its end."""
        self._loop = asyncio.get_running_loop()
        self._deadline = ProcessDeadline(self._on_orphaned)
        self._deadline.start()
        self._loop.add_signal_handler(signal.SIGHUP, self._abandoned, "Spark's Python daemon is exiting")
        with in_environment(self._job.environ):
            return await self._run_to_end()

    async def _run_to_end(self) -> EngineSummary:
        # Import before connecting: a connected engine that is silent, as during imports, would count as dead.
        loaded = self._load()
        engine_id = new_engine_id()
        self._link = EngineLink(
            self._job.address,
            HelloFrame(
                self._job.slot,
                self._job.job_token,
                0,
                engine_id,
                os.getpid(),
                socket.gethostname(),
                stage=self._job.stage,
                attempt=self._job.attempt,
            ),
            self._beat,
            self._on_command,
            self._on_lost,
            self._tasks,
        )
        self._connecting = asyncio.create_task(self._link.connect())
        try:
            run_token = await self._connecting
        except asyncio.CancelledError:
            if not self._is_abandoned:
                raise
            return make_failed_summary(self._job, RemoteError("this engine is no longer supervised"))
        except EngineRefusedError as error:
            log.info("this engine is no longer needed; it does not start", reason=str(error))
            return make_failed_summary(self._job, error)
        except RemoteError as error:
            log.error("cannot connect to the driver; this engine does not start", error=str(error))  # noqa: TRY400
            return make_failed_summary(self._job, error)
        group = self._job.settings.kafka.consumer_group
        identity = EngineIdentity(self._job.worker, self._job.slot, engine_id, group, run_token)
        try:
            summary = await self._run_engine(identity, loaded)
        except BaseException as error:
            log.exception("the engine failed")
            summary = make_failed_summary(self._job, error)
        # From here on, only the interpreter and threads have to end.
        self._deadline.within(SUPERVISED_SECONDS)
        await self._link.close(summary)
        return summary

    def release(self) -> None:
        """Cancel the deadline, so that the process can do other work."""
        self._deadline.cancel()

    def _load(self) -> tuple[EngineMaker, Any] | EngineSummary:
        """Import the code; return the factory of the engine and the handler, or a summary of the failure."""
        sys.path.extend(folder for folder in self._job.import_path if folder not in sys.path)
        try:
            handler = cloudpickle.loads(self._job.handler)
            return self._build or _imported(self._job.factory), handler
        except (Exception, SystemExit) as error:
            log.exception("cannot load the handler in the engine")
            return make_failed_summary(self._job, error, StopReason.CONFIG)

    async def _run_engine(
        self, identity: EngineIdentity, loaded: tuple[EngineMaker, Any] | EngineSummary
    ) -> EngineSummary:
        if isinstance(loaded, EngineSummary):
            return loaded
        build, handler = loaded
        await self._begin.wait()
        if self._fault is not None:
            return EngineSummary(self._job.slot, StopReason.FAILED, self._fault)
        if self._draining:
            return EngineSummary(self._job.slot, StopReason.DRAINED)
        engine: RunnableEngine = build(self._job.settings, handler, identity)
        self._engine = engine
        self._link.answers.find = engine.find_message
        self._link.answers.prober = engine.prober
        self._link.live = engine.live
        if engine.records is not None:
            self._link.carry(engine.records)
        if self._paused is not None:
            engine.pause(self._paused.partitions)
        return await engine.run(self._may_subscribe)

    async def _may_subscribe(self) -> None:
        self._link.ready()
        await self._go.wait()

    def _beat(self, whole: bool) -> Beat:
        if self._engine is None:
            return whole_beat(EngineProgress())
        try:
            beat = self._engine.beat(whole=whole or self._beat_lost)
            self._beat_lost = False
        except Exception:
            # The engine is alive, and silence would count as its death.
            log.exception("cannot collect the progress of the engine")
            self._beat_lost = True
            return whole_beat(EngineProgress())
        return beat

    def _on_command(self, command: Command) -> None:
        match command:
            case BeginFrame():
                self._begin.set()
            case GoFrame():
                self._go.set()
            case DrainFrame(keep_membership):
                self._deadline.within(self._drain_seconds + SUPERVISED_SECONDS)
                self._drain(keep_membership=keep_membership)
            case PauseFrame(partitions):
                self._paused = command
                if self._engine is not None:
                    self._engine.pause(partitions)
            case ResumeFrame():
                self._paused = None
                if self._engine is not None:
                    self._engine.resume()
            case ReleaseFrame():
                if self._engine is not None:
                    self._engine.release()
            case ExitFrame():
                # Standard error may be blocked.
                self._deadline.within(EXIT_SECONDS)
                tell_repeats()
                os._exit(DEADLINE_EXIT)

    def _drain(self, *, keep_membership: bool = False) -> None:
        if not self._draining:
            self._draining = True
            self._begin.set()
            if self._engine is not None:
                self._engine.drain(keep_membership=keep_membership)

    def _on_fault(self, text: str) -> None:
        """End the engine, because it can no longer be supervised."""
        self._deadline.within(self._drain_seconds + SUPERVISED_SECONDS)
        self._fault = text
        self._begin.set()
        if self._engine is not None:
            self._engine.fail(text)

    def _on_lost(self, reason: str) -> None:
        self._abandoned(reason, ABANDONED_SECONDS - RECONNECT_SECONDS)

    def _on_orphaned(self) -> None:
        """Called by the deadline's thread, so that the deadline is set even if the loop is blocked."""
        self._deadline.within(self._drain_seconds + ABANDONED_SECONDS)
        self._loop.call_soon_threadsafe(self._abandoned, "the parent process has exited")

    def _abandoned(self, reason: str, seconds: float = ABANDONED_SECONDS) -> None:
        self._deadline.within(self._drain_seconds + seconds)
        if not self._is_abandoned:
            self._is_abandoned = True
            if self._on_abandoned is not None:
                self._on_abandoned()
            log.warning("this engine is no longer supervised; draining", reason=reason)
        if self._connecting is not None:
            self._connecting.cancel()  # no effect once connected
        self._drain()
