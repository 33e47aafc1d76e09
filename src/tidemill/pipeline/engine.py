"""One pipeline worker: moves messages from its source through windows until they are resolved, and commits offsets.

Theory of operation. The source buffers messages per partition. The intake takes as many as backpressure allows, opens a
ledger entry for each, and closes windows. A window arranges, runs and delivers, and resolves its entries in any order.
The ledger yields the contiguous resolved prefix of each partition; that prefix is committed, one commit per partition
in flight. Everything happens on one loop; the decisions are made in core.

Invariants: no message is forgotten. Each is resolved exactly once: after its work is delivered, after a hook skips it,
or after its dead letter is confirmed. A partition that is given up is closed first, and nothing changes it afterwards.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, HandlerError, describe_error, escape_surrogates, find_unexpected
from tidemill.core.pipeline.backpressure import Backpressure
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.core.recorder.outgoing import OutgoingFrames
from tidemill.core.retry import Backoff
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.brake import EngineBrake
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.context import EngineContext
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.hooks import HookRunner, call_hook
from tidemill.pipeline.inspection.message_locator import MessageLocator
from tidemill.pipeline.inspection.standstill import StandstillReport
from tidemill.pipeline.inspection.waits import Waits
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.leaving import Stopping, hand_over
from tidemill.pipeline.reports.collector import FinishedMessages
from tidemill.pipeline.reports.counters import Counters, Overridden, Slowest
from tidemill.pipeline.reports.report import Report as Report
from tidemill.pipeline.reports.snapshots import ReportingParts, Snapshots
from tidemill.pipeline.services import Services
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.pipeline.tasks.process import TaskExecutor
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.link.beats import Beat
from tidemill.runtime.link.live_tasks import LiveSource
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason, name_stalled_partition
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.runtime.process.kept_warden import KeptWarden
from tidemill.sources.base import CommitStatus, Fatal, Source, TopicPartition, name_partitions

if TYPE_CHECKING:  # imported lazily: only engines that record load it
    from tidemill.pipeline.probing.prober import Prober
    from tidemill.pipeline.recording.recorder import EngineRecorder

log = structlog.get_logger(__name__)

#: Results per engine that may wait for sinks; beyond it the engine reads no more. It is several times the size of a
#: sink's batch: more would not be faster, and results would leave the CPU caches before they are confirmed.
MAX_UNDELIVERED = 4_000
#: Stall reasons are cut to this length, because they are reported four times a second.
MAX_WAIT_CHARS = 2_000


class Engine:
    """One engine over the given parts.

    Args:
        settings: The validated configuration.
        handler: The user's handler, as unpickled in this process.
        identity: The engine's identity.
        source: The source of an engine's messages.
        outbox: Where results go.
        letters: Where dead letters go.
        executor: Runs processes.
        report: Where finished messages are reported, if anywhere.
        warden: Cleans up after this process if it is killed.
        recorder: The flight recorder; None: recording is off.
    """

    def __init__(
        self,
        settings: Settings,
        handler: Handler[Any, Any],
        identity: EngineIdentity,
        source: Source,
        outbox: Outbox,
        letters: DeadLetters,
        executor: TaskExecutor,
        report: Report | None = None,
        warden: KeptWarden | None = None,
        recorder: EngineRecorder | None = None,
    ) -> None:
        """Wire the parts; nothing is connected before `run`."""
        self.settings = settings
        self.identity = identity
        self.source = source
        self.outbox = outbox
        self.letters = letters
        self.executor = executor
        self._warden = warden
        self.tasks = outbox.tasks = EngineTasks(self.fail)
        hooks = HookRunner(self.tasks)
        outbox.calls = hooks.calls
        reports: list[Report] = [each for each in (report, recorder) if each is not None]
        for each in reports:
            each.tasks = self.tasks
        self._idle = asyncio.Event()
        #: Called whenever a partition has no more work in flight.
        self.on_idle: Callable[[], None] = _do_nothing
        self.intake = Intake(settings.executor, source, self._idle)
        self.recorder = recorder
        self.context = self._build_context(handler, hooks, reports)
        self.intake.attach(self.context)
        self.services = Services(settings, handler, identity, self.tasks, hooks.calls)
        if recorder is not None:
            assert self.context.finished is not None
            recorder.attach(self.context.pool, self.context.finished, self.context.commits, self.services)
        outbox.mode.attach(self._charge, self.context.commits.send_soon)
        self._waits = Waits(identity.slot, self.context, self.services, source, letters, executor)
        self._locator = MessageLocator(self.context, self.intake, source, self._waits.describe)
        self._standstill = StandstillReport(self.context, self.intake, source, self._locator)
        #: Reports what the executors do while a web page is watching; None: the web UI is off.
        self.live = self._build_live_feed() if recorder is not None else None
        self._snapshots = Snapshots(self._list_parts(), self._find_waits, self._standstill.list_heads)
        self._subscribed = False
        self._stop = asyncio.Event()
        #: Runs test messages through the handler without side effects; None: the web UI or probes are off.
        self.prober = self._build_prober() if recorder is not None and settings.debug.probe_enabled else None
        self._keep_membership = False
        self._fatal: tuple[StopReason, str] | None = None

    def _build_live_feed(self) -> LiveSource:
        from tidemill.pipeline.inspection.live_feed import LiveFeed

        return LiveFeed(self.context.pool, self.executor.capacity, self.intake.partitions, self.settings.debug)

    def _build_prober(self) -> Prober:
        from tidemill.pipeline.probing.prober import Prober

        return Prober(self.context, self.identity, self.outbox.router, lambda: self._subscribed, self._stop)

    def _build_context(self, handler: Handler[Any, Any], hooks: HookRunner, reports: Sequence[Report]) -> EngineContext:
        settings, limits, outbox = self.settings, self.settings.executor, self.outbox
        bound, overridden = log.bind(engine=self.identity.slot), Overridden(handler)
        load: Backpressure[TopicPartition] = Backpressure(
            limits.max_executors * limits.backpressure_high_multiplier,
            limits.max_executors * limits.backpressure_low_multiplier,
            limits.window_size,
            limits.max_queued_bytes,
            limits.max_uncommitted,
            MAX_UNDELIVERED,
        )
        backoff = limits.retry_backoff
        return EngineContext(
            settings=settings,
            handler=handler,
            overridden=overridden,
            hooks=hooks,
            pool=TaskPool(self.executor, limits, self.tasks),
            outbox=outbox,
            mode=outbox.mode,
            letters=self.letters,
            commits=Commits(self.source, self.intake.committed, outbox.mode),
            load=load,
            brake=self._build_brake(bound, overridden),
            counters=Counters(),
            slowest=Slowest(),
            recorder=self.recorder,
            finished=FinishedMessages(reports) if reports else None,
            backoff=Backoff(backoff.initial_seconds, backoff.max_seconds, backoff.multiplier),
            log=bound,
            holds_windows=limits.commit == "window" or (outbox.mode.binds_windows and overridden.on_window_complete),
            room_freed=self.intake.refill,
            became_idle=self._became_idle,
        )

    def _became_idle(self) -> None:
        self._idle.set()
        self.on_idle()

    def _build_brake(self, bound: Any, overridden: Overridden) -> EngineBrake | None:
        max_ratio = self.settings.executor.max_failure_ratio
        if max_ratio is None:
            return None
        intake, has_hook = self.intake, overridden.on_window_complete
        return EngineBrake(max_ratio, bound, intake.brake, intake.take_one, self.fail, has_window_hook=has_hook)

    def _list_parts(self) -> ReportingParts:
        context = self.context
        return ReportingParts(
            self.source,
            self.intake,
            context.pool,
            self.outbox,
            self.letters,
            context.commits,
            self.services,
            context.brake,
            context.counters,
            context.slowest,
            self.recorder,
        )

    @property
    def commits(self) -> Commits:
        """The ledger and its commits."""
        return self.context.commits

    @property
    def counters(self) -> Counters:
        return self.context.counters

    @property
    def records(self) -> OutgoingFrames | None:
        """The frames for the driver to store; None: recording is off."""
        return self.recorder.frames if self.recorder is not None else None

    @property
    def brake(self) -> EngineBrake | None:
        """The brake; None if no brake is configured."""
        return self.context.brake

    # -- life cycle -------------------------------------------------------------------------------------------

    async def run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        """Connect, work until drained or failed, and clean up. Failures are returned in the summary, not raised.

        Args:
            may_subscribe: Awaited after `on_ready`; returns when this engine may take partitions.
        """
        self._loop = asyncio.get_running_loop()
        self.tasks.watch()
        try:
            return await self._run(may_subscribe)
        finally:
            self.tasks.close()

    async def _run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        if self._warden is not None:
            self._warden.start()
        self.executor.open()
        # Both futures are done, or cancelled, when this method returns.
        starting = asyncio.ensure_future(self._start(may_subscribe))
        stopped = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if not starting.cancelled() and (error := starting.exception()) is not None:
            reason = StopReason.CONFIG if isinstance(error, ConfigError) else StopReason.FAILED
            self._fatal = (reason, describe_error(error))
            unexpected = find_unexpected(error)
            self.context.log.error("the engine cannot start", error=describe_error(error), exc_info=unexpected)
        elif self._subscribed:
            await stopped
        stopped.cancel()
        stopping = Stopping(
            self.context,
            self.intake,
            self.source,
            self.services,
            self._warden,
            lambda: self._fatal is not None,
            subscribed=self._subscribed,
            keep_membership=self._keep_membership,
        )
        await stopping.run()
        if self.prober is not None:
            await self.prober.close()
        reason, text = self._fatal or (StopReason.DRAINED, None)
        return EngineSummary(self.identity.slot, reason, text, self.progress())

    async def _start(self, may_subscribe: Callable[[], Awaitable[None]]) -> None:
        await self.outbox.connect()
        await self.letters.open()
        await self.services.open()
        try:
            hook = self.context.handler.on_ready(self.settings, self.outbox.name_sinks())
            await call_hook(hook, self.context.hooks.calls, "on_ready")
        except Exception as error:
            raise HandlerError(f"on_ready raised {describe_error(error)}") from error
        await may_subscribe()
        self._subscribed = True
        self.intake.start()
        self.source.start(self)
        self.services.start_periodic()

    def fail(self, text: str) -> None:
        """Stop at once, without a drain, because a part of the engine failed."""
        self.on_fatal(Fatal.FAILED, text)

    def drain(self, *, keep_membership: bool = False) -> None:
        """Start a clean stop: fetch nothing more, finish what is in flight, commit, leave the group.

        Args:
            keep_membership: Stay a member of the group, because another engine is about to take over the partitions.
        """
        if not self._stop.is_set():
            self._keep_membership = keep_membership
        self._stop.set()

    def pause(self, partitions: Collection[int] | None = None) -> None:
        """Stop taking new messages until `resume`; messages in flight are finished.

        Args:
            partitions: Pause only these partitions of the source topic; None: pause all.
        """
        self.intake.pause(partitions)

    def resume(self) -> None:
        """Take messages of all partitions again."""
        self.intake.resume()

    def release(self) -> None:
        """Release the brake at a user's request: the held messages are dead-lettered."""
        if self.brake is not None:
            self.brake.release()

    # -- called by the source ---------------------------------------------------------------------------------

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        """Take the messages that arrived."""
        self.intake.arrived(partitions)

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Take ownership of partitions."""
        if partitions:
            self.context.log.info("partitions assigned", partitions=name_partitions(partitions))
            self.context.record_partitions("assigned", partitions)
        for partition in partitions:
            self.intake.assign(partition)
        self.context.hooks.submit(self.context.call_partition_hook, "on_assign", partitions)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Finish the running tasks of the partitions; return the offsets to commit."""
        return await hand_over(self.context, self.intake, partitions)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Abort the work on partitions that already belong to another engine."""
        names = name_partitions(partitions)
        self.context.log.error("partitions lost to another member; their work here is dropped", partitions=names)
        self.context.record_partitions("revoked", partitions, "lost to the group")
        for partition in partitions:
            if partition in self.intake.partitions:
                self.intake.forget(self.intake.partitions[partition])
        self.context.hooks.submit(self.context.call_partition_hook, "on_revoke", partitions)

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """Handle the result of a commit."""
        self.context.commits.ended(offsets, status)

    def _charge(self, partition: TopicPartition, size_bytes: int) -> None:
        """Adjust the bytes that a partition has staged for its next transaction; negative: fewer."""
        owned = self.intake.partitions.get(partition)
        if owned is not None:
            owned.charge(size_bytes)

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        """Stop at once: the engine lost its membership of the group, or a part of it failed."""
        if self._fatal is None:
            fenced = fatal is Fatal.FENCED
            self._fatal = (StopReason.FENCED if fenced else StopReason.FAILED, escape_surrogates(text))
            self.context.log.error("the engine stops", reason=fatal.value, error=text)
            for owned in list(self.intake.partitions.values()):
                self.intake.forget(owned)
        self._stop.set()

    # -- reports ----------------------------------------------------------------------------------------------

    def progress(self) -> EngineProgress:
        """Return a complete snapshot."""
        return self._snapshots.take_whole()

    def beat(self, *, whole: bool) -> Beat:
        """Return the next beat for the driver; see `Snapshots.take_beat`."""
        beat = self._snapshots.take_beat(whole=whole)
        if self.recorder is not None:
            self.recorder.look(beat.counts.sinks, self.intake.statistics().paused)
        return beat

    def _find_waits(self) -> dict[str, str]:
        """Return what the engine is waiting for, and which partitions are stalled, with the reasons."""
        partitions = self._standstill.describe()
        waits = self._waits.describe() | {name_stalled_partition(name): text for name, text in partitions.items()}
        return {name: text[:MAX_WAIT_CHARS] for name, text in waits.items()}

    def find_message(self, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Return the stage of a message; None: it is not in flight here."""
        return self._locator.find((topic, partition), offset, time.monotonic())


def _do_nothing() -> None:
    pass
