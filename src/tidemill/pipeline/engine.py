"""One pipeline worker: takes messages from its source through windows to resolved, and says what may be committed.

Theory of operation. The source buffers messages per partition; the pump takes as many as backpressure leaves room for,
opens an entry in the ledger for each, and closes windows. A window arranges, runs and delivers (`windowrun`) and
resolves its entries in any order; the ledger yields the contiguous resolved prefix per partition, and that is what is
committed, one commit at a time per partition. Everything happens on one loop; nothing here decides what core decides.

Invariants: no message is forgotten: each is resolved exactly once, after its work is delivered, skipped by a hook, or
its dead letter confirmed. A partition that was given up is closed first, and nothing changes it afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, HandlerError, RemoteError, describe_error, sound
from tidemill.core.ledger import LedgerEntry
from tidemill.core.retry import Backoff
from tidemill.deadletters.letter import Letter, LetterKind
from tidemill.deadletters.writer import DeadLetters
from tidemill.pipeline.brake import brake_of
from tidemill.pipeline.checks import check_collect_result
from tidemill.pipeline.commits import Commits
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Routed, encode_payloads
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorError
from tidemill.pipeline.handover import hand_over
from tidemill.pipeline.hooks import HookRunner, call_hook
from tidemill.pipeline.intake import Intake
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.reports.counters import Counters, Overridden, Slowest
from tidemill.pipeline.reports.report import Report as Report
from tidemill.pipeline.reports.snapshots import Snapshots
from tidemill.pipeline.services import Services
from tidemill.pipeline.stopping import Stopping
from tidemill.pipeline.tasks.pool import TaskPool, TaskRun
from tidemill.pipeline.tasks.process import TaskExecutor
from tidemill.pipeline.window import WindowRun
from tidemill.runtime.beats import Beat
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.identity import Identity
from tidemill.runtime.kept_warden import KeptWarden
from tidemill.runtime.log import limited
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.progress import EngineProgress, EngineSummary, StopReason
from tidemill.sinks.payloads import CollectResult
from tidemill.sources.base import CommitStatus, Fatal, Source, TopicPartition, name_of

log = structlog.get_logger(__name__)

#: How many partitions a log line names.
MAX_NAMES = 20


class Engine:
    """One engine over the parts it is given.

    Args:
        settings: The validated configuration.
        handler: The user's handler, as it arrived in this process.
        identity: Who this engine is.
        source: Where messages come from.
        outbox: Where results go.
        letters: Where dead letters go.
        executor: What runs processes.
        report: Where finished messages are reported, if anywhere.
        warden: Cleans up after this process if it is killed.
    """

    def __init__(
        self,
        settings: Settings,
        handler: Handler[Any, Any],
        identity: Identity,
        source: Source,
        outbox: Outbox,
        letters: DeadLetters,
        executor: TaskExecutor,
        report: Report | None = None,
        warden: KeptWarden | None = None,
    ) -> None:
        """Prepare; nothing is connected before `run`."""
        limits = settings.executor
        self.settings = settings
        self.handler = handler
        self.identity = identity
        self.log = log.bind(engine=identity.slot)
        self.source = source
        self.outbox = outbox
        self.letters = letters
        self.has = Overridden(handler)
        self.tasks = outbox.tasks = EngineTasks(self.fail)
        self.hooks = HookRunner(self.tasks)
        outbox.calls = self.hooks.calls
        self.counters = Counters()
        self.slowest = Slowest()
        self.backoff = Backoff(
            limits.retry_backoff.initial_seconds,
            limits.retry_backoff.max_seconds,
            limits.retry_backoff.multiplier,
        )
        self.services = Services(settings, handler, identity, self.tasks, self.hooks.calls)
        # With transactions a window's own payloads go out with its messages, so those have to wait for them.
        self.holds_windows = limits.commit == "window" or (outbox.stage is not None and self.has.on_window_complete)
        self.executor = executor
        self._report = report
        if report is not None:
            report.tasks = self.tasks
        self._warden = warden
        self.commits = Commits(source, self._settled, outbox.stage)
        self.brake = brake_of(self)
        self.intake = Intake(self)
        if outbox.stage is not None:
            outbox.stage.charge = self.intake.charge
        self.pool = TaskPool(executor, limits, self.intake.is_full, self.intake.park, self.tasks)
        self._snapshots = Snapshots(self)
        self._subscribed = False
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()
        self._fatal: tuple[StopReason, str] | None = None

    # -- life -------------------------------------------------------------------------------------------------

    async def run(self, may_subscribe: Callable[[], Awaitable[None]]) -> EngineSummary:
        """Connect, work until drained or at an end, and clean up; never raises for what went wrong.

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
        # Awaited here, whatever becomes of them.
        starting = asyncio.ensure_future(self._start(may_subscribe))
        stopping = asyncio.ensure_future(self._stop.wait())
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if not starting.cancelled() and (error := starting.exception()) is not None:
            reason = StopReason.CONFIG if isinstance(error, ConfigError) else StopReason.FAILED
            self._fatal = (reason, describe_error(error))
            self.log.error("the engine cannot start", error=describe_error(error), exc_info=_unexpected(error))
        elif self._subscribed:
            await stopping
        stopping.cancel()
        await Stopping(self, self.executor, self._report, self._warden).run()
        reason, text = self._fatal or (StopReason.DRAINED, None)
        return EngineSummary(self.identity.slot, reason, text, self.progress())

    @property
    def subscribed(self) -> bool:
        """Whether it has become a member of its group."""
        return self._subscribed

    @property
    def failed(self) -> bool:
        """Whether it is at an end that nobody asked for."""
        return self._fatal is not None

    async def idle(self) -> None:
        """Wait until nothing that was taken is left to do; the caller bounds the time."""
        while self.intake.busy:
            self._changed.clear()
            await self._changed.wait()

    async def _start(self, may_subscribe: Callable[[], Awaitable[None]]) -> None:
        await self.outbox.connect()
        await self.letters.open()
        await self.services.open()
        try:
            await call_hook(self.handler.on_ready(self.settings, self.outbox.pg_pool), self.hooks.calls, "on_ready")
        except Exception as error:
            raise HandlerError(f"on_ready raised {describe_error(error)}") from error
        await may_subscribe()
        self._subscribed = True
        self.intake.start()
        self.source.start(self)
        self.services.start_periodic()

    def fail(self, text: str) -> None:
        """End at once, without a drain: a part of the engine is gone."""
        self.on_fatal(Fatal.FAILED, text)

    def drain(self) -> None:
        """Ask for a clean end: fetch nothing more, finish what is in hand, commit, leave."""
        self._stop.set()

    def pause(self) -> None:
        """Take no new messages until `resume`; what is in hand goes on."""
        self.intake.pause()

    def resume(self) -> None:
        """Take messages again."""
        self.intake.resume()

    def release(self) -> None:
        """Let the brake off by a user's word: what it holds is dead-lettered."""
        if self.brake is not None:
            self.brake.release()

    # -- what the source tells --------------------------------------------------------------------------------

    def on_messages(self, partitions: Collection[TopicPartition]) -> None:
        """Take what arrived."""
        self.intake.arrived(partitions)

    def on_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        """Take partitions on."""
        if partitions:
            self.log.info("partitions assigned", partitions=_names(partitions))
        for partition in partitions:
            if partition in self.intake.lanes:
                self.forget(self.intake.lanes[partition])
            self.intake.assign(partition)
        self.hooks.submit(self.partition_hook, "on_assign", partitions)

    async def on_revoked(self, partitions: Sequence[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Finish what runs of the partitions; return what is to be committed of them."""
        return await hand_over(self, partitions)

    def on_lost(self, partitions: Sequence[TopicPartition]) -> None:
        """Stop at once what belongs to somebody else by now."""
        self.log.error("partitions lost to the group; their work is dropped here", partitions=_names(partitions))
        for partition in partitions:
            if partition in self.intake.lanes:
                self.forget(self.intake.lanes[partition])
        self.hooks.submit(self.partition_hook, "on_revoke", partitions)

    def on_committed(self, offsets: Mapping[TopicPartition, int], status: CommitStatus) -> None:
        """Advance the watermark, or offer the same prefix again."""
        self.commits.ended(offsets, status)

    def _settled(self, partition: TopicPartition, count: int) -> None:
        self.intake.committed(partition, count)

    def on_fatal(self, fatal: Fatal, text: str) -> None:
        """End: the place in the group is lost."""
        if self._fatal is None:
            fenced = fatal is Fatal.FENCED
            self._fatal = (StopReason.FENCED if fenced else StopReason.FAILED, sound(text))
            self.log.error("the engine stops", reason=fatal.value, error=text)
            for lane in list(self.intake.lanes.values()):
                self.forget(lane)
        self._stop.set()

    def forget(self, lane: OwnedPartition) -> None:
        """Give a partition up: what runs for it is killed, and late results change nothing."""
        lane.close()
        self.intake.forget(lane)
        self.pool.abandon(lane)
        self.outbox.abandon(lane.partition)
        self.commits.abandon(lane.partition)
        if self.brake is not None:
            self.brake.abandon(lane)
        self._changed.set()

    async def partition_hook(self, hook: str, partitions: Sequence[TopicPartition]) -> None:
        """Call `on_assign` or `on_revoke`."""
        try:
            await call_hook(getattr(self.handler, hook)(partitions), self.hooks.calls, hook, _place, partitions)
        except Exception as error:
            self.log.warning("a hook raised", hook=hook, exc_info=error)

    # -- messages out -----------------------------------------------------------------------------------------

    def resolved(
        self,
        lane: OwnedPartition,
        message: SourceMessage,
        entry: LedgerEntry[TopicPartition, int],
        window: WindowRun | None,
        runs: Sequence[TaskRun],
        error: str | None = None,
    ) -> None:
        """Let a message go: its work is delivered, skipped, or its letter confirmed."""
        self.commits.resolve(entry)
        self.counters.messages_done += 1
        lane.resolved(message.offset)
        if not lane.busy:
            self._changed.set()
        self.intake.resolved(lane, message)
        if self._report is not None:
            self._report.finished(message, window.started_at if window else None, runs, error)

    def window_done(self, lane: OwnedPartition) -> None:
        """Count a window out whose own hook has run, and whose payloads or letter are confirmed."""
        lane.window_done()
        if not lane.busy:
            self._changed.set()

    def count_stuck(self, lane: OwnedPartition) -> None:
        """Look again for how much of a partition a stop need not wait."""
        lane.count_stuck()
        self._changed.set()

    def reject(
        self,
        lane: OwnedPartition,
        message: SourceMessage,
        entry: LedgerEntry[TopicPartition, int],
        kind: LetterKind,
        text: str,
    ) -> None:
        """Dead-letter a message before any task; it is resolved when the broker has the letter."""

        def confirmed() -> None:
            if not lane.closed:
                self.resolved(lane, message, entry, None, (), text)

        self.intake.finished(lane)
        self.dead_letter(kind, text, (message,), confirmed, None, None)

    def dead_letter(
        self,
        kind: LetterKind,
        text: str,
        messages: Sequence[SourceMessage],
        done: Callable[[], None],
        run: TaskRun | None,
        error: ExecutorError | None,
        refused: object = None,
    ) -> None:
        """Write one letter; `done` is called when the broker has it.

        Args:
            kind: What went wrong.
            text: In words.
            messages: The messages concerned.
            done: Called on the loop, later.
            run: The task concerned, if there is one.
            error: How it failed, if it did.
            refused: What a hook returned that is not delivered, if that is why.
        """
        payloads = encode_payloads(refused) if isinstance(refused, CollectResult) else ()
        letter = Letter.about(
            messages,
            kind,
            text,
            payloads=payloads,
            attempts=max(1, run.attempts) if run is not None else 1,
            task_id=run.task.task_id if run is not None else None,
            args=run.task.args if run is not None else (),
            exit_code=error.exit_code if error is not None else None,
            stderr=error.stderr if error is not None else "",
        )
        self.letters.put(letter, done)

    def route(self, value: Any) -> list[Routed]:
        """Resolve the sinks of what a hook returned.

        Raises:
            TypeError: The hook returned no CollectResult.
            ConfigError: A sink is ambiguous or unknown; nothing was delivered.
        """
        collect = check_collect_result(value)
        return [] if collect is None else self.outbox.route(collect)

    def warn(self, text: str, **details: object) -> None:
        """Count something wrong but harmless that the handler did, and say so now and then."""
        self.counters.warnings += 1
        limited(self.log, 10.0).warning(text, **details)

    # -- report -----------------------------------------------------------------------------------------------

    def progress(self) -> EngineProgress:
        """Return a whole snapshot."""
        return self._snapshots.whole()

    def beat(self, *, whole: bool) -> Beat:
        """Return the next beat for the driver; see `Snapshots.beat`."""
        return self._snapshots.beat(whole=whole)


def _names(partitions: Sequence[TopicPartition]) -> list[str]:
    """Return names for a log line, which must not grow with the topic."""
    names = [name_of(partition) for partition in partitions[:MAX_NAMES]]
    if len(partitions) > MAX_NAMES:
        names.append(f"and {len(partitions) - MAX_NAMES} more")
    return names


def _place(partitions: Sequence[TopicPartition]) -> tuple[str, str]:
    return ", ".join(_names(partitions[:10])), ""


def _unexpected(error: BaseException) -> BaseException | None:
    """Return an error whose traceback tells more than its text: everything but what the outside world did."""
    return None if isinstance(error, (ConfigError, RemoteError)) else error
