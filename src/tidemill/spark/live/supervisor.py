"""The slots of a running pipeline: carries out decisions of `core.supervision` on the link and on Spark.

Everything happens on the link's loop: hellos, heartbeats, the ends of jobs and timer ticks are fed to the state
machines there, and their effects are carried out in order. Only Spark's blocking calls run on other threads.

Invariant: nothing is decided here, with one exception. If Spark is lost, engines with a link keep running without it;
they are drained, and the reported end of their jobs counts only once their links are closed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import structlog

from tidemill.core.supervision import slot_events, slot_group
from tidemill.core.supervision.long_waits import LongWaits
from tidemill.core.supervision.slot_events import EngineEnding, ReportKind
from tidemill.core.supervision.slot_group import RunFinished, SlotGroup
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.frames import (
    BeginFrame,
    Command,
    DrainFrame,
    ExitFrame,
    GoFrame,
    HelloFrame,
    LinkAddress,
    PauseFrame,
    RefusedFrame,
    WelcomeFrame,
)
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, list_waits
from tidemill.runtime.link.questions import ASK_SECONDS, PROBE_END_SECONDS
from tidemill.runtime.link.server import LinkServer, TakeLive
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.live.jobs import JobOutcome, JobThread, job_group, read_outcome
from tidemill.spark.live.message_finder import CALL_SECONDS, find_message, probe_message
from tidemill.spark.live.supervised_slot import LinkedCaller, SupervisedSlot
from tidemill.spark.live.user_actions import UserActions
from tidemill.spark.progress import PartitionSums, PipelineProgress, sum_progress
from tidemill.spark.session.session import Spark

log = structlog.get_logger(__name__)

JobMaker = Callable[[int, int, LinkAddress], EngineJob]


class Supervisor:
    """Keeps the engines of a pipeline running until it is drained or fails.

    Args:
        spark: The running Spark session.
        worker: The worker name; part of the names of job groups.
        count: The number of slots.
        make_job: Creates the job of a slot from slot, job token and the link's address.
        on_finished: Called once, on the link's loop, when all slots are finished.
        limits: The time limits of the supervision.
        partitions: The number of partitions of the source topic; None: as many as slots.
        on_all_ready: Called on the link's loop when an engine of each slot is ready, once after each `start` or
            `restart`.
    """

    def __init__(
        self,
        spark: Spark,
        worker: str,
        count: int,
        make_job: JobMaker,
        on_finished: Callable[[RunFinished], None],
        limits: SlotLimits,
        partitions: int | None = None,
        on_all_ready: Callable[[], None] | None = None,
    ) -> None:
        self._spark = spark
        self._worker = worker
        self._make_job = make_job
        self._on_finished = on_finished
        self._limits = limits
        self._count = count
        self._partitions = partitions
        self._on_all_ready = on_all_ready
        self._group = SlotGroup(count, partitions)
        self._group_timer: asyncio.TimerHandle | None = None
        self._slots: Sequence[SupervisedSlot] = ()
        self._callers: dict[int, LinkedCaller] = {}
        self._partition_sums = PartitionSums()
        self._long_waits = LongWaits()
        #: The actions that users may take.
        self.actions = UserActions(self, partitions)
        self._keep_memberships = False
        self._exiting = False
        #: Whether any engine has ever connected.
        self.greeted = False
        self._canceller = ThreadPoolExecutor(1, "tidemill-cancel")

    # -- any thread ------------------------------------------------------------------------------------------

    def start(self, *, bind_host: str = "127.0.0.1", open_link: Callable[..., LinkServer] = LinkServer) -> None:
        """Listen for engines and start all slots.

        Raises:
            RemoteError: The link's address cannot be listened on.
        """
        self._server = open_link(self, bind_host=bind_host)
        self._loop = self._server.loop
        self._address = self._server.start()
        self._slots = [
            SupervisedSlot(number, self._limits, JobThread(self._spark, number, self._loop, self._on_job_ended))
            for number in range(self._count)
        ]
        self.actions.attach(self._server, self._slots)
        self._loop.call_soon_threadsafe(self._start)

    def drain(self, *, keep_memberships: bool = False) -> None:
        """Ask all engines for a clean end.

        Args:
            keep_memberships: Whether to keep their memberships in the consumer group, so that the engines after a
                `restart` get the same partitions without a rebalance.
        """
        self._soon(lambda: self._drain(keep_memberships=keep_memberships))

    def restart(self, make_job: JobMaker, limits: SlotLimits) -> None:
        """Start all slots again with other jobs; call this only once all slots are finished.

        Args:
            make_job: Creates the jobs from now on.
            limits: The time limits of the supervision from now on.
        """
        self._soon(lambda: self._restart(make_job, limits))

    def find_message(self, topic: str, partition: int, offset: int) -> OpenMessage | None:
        """Return where a message is, if it is open; see `message_finder`. Raises RemoteError if no engine responds."""
        return self._server.call(
            find_message(self._server, self._slots, topic, partition, offset), ASK_SECONDS + CALL_SECONDS
        )

    def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler of slot 0; see `message_finder.probe_message`."""
        probing = probe_message(self._server, self._slots, message, seconds)
        return self._server.call(probing, seconds + PROBE_END_SECONDS + CALL_SECONDS)

    def watch(self, take: TakeLive, seconds: float) -> None:
        """Make all engines report their running tasks for this time; see `LinkServer.watch`."""
        self._soon(lambda: self._server.watch(take, seconds))

    def exit_now(self) -> None:
        """Make every engine's process exit now, and start no new one; wardens clean up."""
        self._soon(self._exit_now)

    def close(self) -> None:
        """Close link and threads, even if not all slots are finished."""
        for slot in self._slots:
            slot.jobs.close()
        self._canceller.shutdown(wait=False, cancel_futures=True)
        self._server.close()

    def progress(self) -> PipelineProgress:
        """Return the progress of all engines, including ended ones."""
        now = time.monotonic()
        statuses = [slot.status(now) for slot in self._slots]
        past = [status.past for status in statuses if status.past is not None]
        last = [status.progress for status in statuses if status.progress is not None]
        total = sum_progress(past, last, statuses, self._partition_sums)
        total.pauses = self.actions.list_pauses()
        return total

    def find_left_behind(self) -> list[int]:
        """Return the slots whose last engine may still be a member of the consumer group."""
        return [slot.number for slot in self._slots if slot.subscribed and slot.ended is not EngineEnding.FENCED]

    def _soon(self, function: Callable[[], object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            log.debug("the slots are closed; a request came too late")

    # -- events, on the loop -----------------------------------------------------------------------------------

    def _start(self) -> None:
        # Spark starts all workers at once; the link tells each engine when to begin.
        for slot in self._slots:
            self.feed(slot, slot_events.StartSlot())

    def _drain(self, *, keep_memberships: bool) -> None:
        self._keep_memberships = keep_memberships
        self._carry_out(self._group.drain())

    def _restart(self, make_job: JobMaker, limits: SlotLimits) -> None:
        self._make_job = make_job
        self._keep_memberships = False
        if self._group_timer is not None:
            self._group_timer.cancel()
            self._group_timer = None
        self._group = SlotGroup(self._count, self._partitions)
        for slot in self._slots:
            slot.renew(limits)
        self._start()

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        """Feed a hello; the effects admit or refuse the engine."""
        self.greeted = True
        self._spark.note_running()
        if not 0 <= hello.slot < len(self._slots):
            self._server.send(link, RefusedFrame(f"there is no slot {hello.slot}"))
            self._server.close_link(link)
            return
        slot = self._slots[hello.slot]
        run_token = hello.run_token or slot.last_run_token + 1
        slot.last_run_token = max(run_token, slot.last_run_token)
        old = slot.links.get(run_token)
        if old is not None:
            # The engine noticed the broken connection before this side did.
            self._server.close_link(old)
            self.on_closed(old)
        self._callers[link] = LinkedCaller(slot, run_token, hello)
        slot.links[run_token] = link
        self.feed(slot, slot_events.EngineConnected(hello.job_token, run_token))
        if hello.ready:
            self.on_ready(link)

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        """Store the progress, log waits, and feed the heartbeat."""
        caller = self._callers.get(link)
        if caller is None:
            return
        if caller.slot.link == link:
            caller.slot.progress = progress
            caller.slot.last_seen = time.monotonic()
            waits = list_waits(progress.waits)
            for name, text in self._long_waits.feed(caller.slot.number, waits, caller.slot.last_seen):
                log.warning("the pipeline waits", slot=caller.slot.number, waits_for=name, why=text)
            if progress.partitions and self._group.holding:
                self._carry_out(self._group.note_partitions(caller.slot.number))
        self.feed(caller.slot, slot_events.Heartbeat(caller.run_token))

    def on_ready(self, link: int) -> None:
        """Let other engines begin, and this one subscribe."""
        caller = self._callers.get(link)
        if caller is None:
            return
        self.feed(caller.slot, slot_events.EngineReady(caller.run_token))
        if caller.slot.link == link:
            self._carry_out(self._group.note_ready(caller.slot.number, self._loop.time()))
            if not caller.slot.ready:
                caller.slot.ready = True
                if self._on_all_ready is not None and all(slot.ready for slot in self._slots):
                    self._on_all_ready()

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        """Store an engine's summary; it counts once its job has ended."""
        caller = self._callers.get(link)
        if caller is not None and caller.slot.link == link:
            caller.slot.summary = summary
            caller.slot.progress = summary.progress

    def on_closed(self, link: int) -> None:
        """Feed the end of a link, and the end of a job that was withheld until then."""
        caller = self._callers.pop(link, None)
        if caller is None:
            return
        slot = caller.slot
        slot.links.pop(caller.run_token, None)
        self.feed(slot, slot_events.LinkClosed(caller.run_token))
        withheld, slot.withheld = slot.withheld, None
        if withheld is not None:
            self._end_job(slot, withheld)

    def _on_job_ended(self, number: int, job_token: int, outcome: JobOutcome) -> None:
        slot = self._slots[number]
        if outcome.progress is not None:
            slot.progress = outcome.progress
        ended = slot_events.JobEnded(job_token, outcome.ending, outcome.error)
        if outcome.spark_lost:
            self._carry_out(self._group.drain())
            if slot.link is not None:
                slot.withheld = ended
                return
        self._end_job(slot, ended)

    def _end_job(self, slot: SupervisedSlot, ended: slot_events.JobEnded) -> None:
        if ended.ending is EngineEnding.CRASHED and slot.summary is not None:
            # The summary came over the link instead of as the job's result.
            outcome = read_outcome(slot.summary)
            ended = slot_events.JobEnded(ended.job_token, outcome.ending, outcome.error)
        self.feed(slot, ended)

    def _exit_now(self) -> None:
        self._exiting = True
        self._tell_all(ExitFrame())
        for caller in self._callers.values():
            # An engine whose event loop is blocked does not receive the command.
            self._spark.kill_worker(caller.hello.pid)

    def tell_pauses(self) -> None:
        """Tell all engines what is paused."""
        self._tell_all(self._pause_or_resume())

    def _pause_or_resume(self) -> Command:
        return PauseFrame() if self._group.holding else self.actions.command

    def _tell_all(self, command: Command) -> None:
        with self._server.together():
            for link in self._callers:
                self._server.send(link, command)

    # -- effects, on the loop --------------------------------------------------------------------------------

    def feed(self, slot: SupervisedSlot, event: slot_events.Input) -> None:
        """Feed an event to a slot, and carry out its effects."""
        for effect in slot.machine.feed(event, self._loop.time()):
            self._apply(slot, effect)
        slot.set_timer(self._loop, self.feed)

    def _apply(self, slot: SupervisedSlot, effect: slot_events.Effect) -> None:
        match effect:
            case slot_events.SubmitJob(job_token):
                self._submit(slot, job_token)
            case slot_events.CancelJob(job_token):
                group = job_group(self._worker, slot.number, job_token)
                self._canceller.submit(self._spark.cancel, group)
            case slot_events.AdmitEngine(run_token):
                self._admit(slot, run_token)
            case slot_events.RefuseEngine(run_token, text):
                self._send(slot, run_token, RefusedFrame(text))
            case slot_events.DrainEngine(run_token, keep_membership):
                self._send(slot, run_token, DrainFrame(self._keep_memberships or keep_membership))
            case slot_events.KillEngine(_):
                if slot.hello is not None:
                    self._spark.kill_worker(slot.hello.pid)
            case slot_events.OperatorReport(kind, text):
                level = log.info if kind is ReportKind.REFUSED else log.warning
                level(text, slot=slot.number, about=kind.value)
            case slot_events.SlotFinished(ending, error):
                slot.ended = ending
                self._carry_out(self._group.note_finished(slot.number, ending, error))

    def _submit(self, slot: SupervisedSlot, job_token: int) -> None:
        if self._exiting:
            return
        slot.retire_engine()
        slot.summary = slot.hello = None
        slot.starts += 1
        slot.jobs.submit(self._make_job(slot.number, job_token, self._address))

    def _admit(self, slot: SupervisedSlot, run_token: int) -> None:
        link = slot.links[run_token]
        hello = self._callers[link].hello
        slot.admit(run_token, hello)
        slot.last_seen = time.monotonic()
        self._server.send(link, WelcomeFrame(run_token))
        # An engine that reconnects may have missed a command to all engines.
        self._server.send(link, self._pause_or_resume())
        log.info("engine connected", slot=slot.number, pid=hello.pid, host=hello.host, run_token=run_token)
        self._carry_out(self._group.note_connected(slot.number))

    def _carry_out(self, effects: Sequence[slot_group.Effect]) -> None:
        with self._server.together():
            for effect in effects:
                self._apply_to_group(effect)
        due = self._group.due
        if due is not None and self._group_timer is None:
            self._group_timer = self._loop.call_at(due, self._tick_group)

    def _apply_to_group(self, effect: slot_group.Effect) -> None:
        match effect:
            case slot_group.PrepareSlot(number):
                self.send_to_slot(self._slots[number], BeginFrame())
            case slot_group.SubscribeSlot(number):
                self._slots[number].subscribed = True
                self.send_to_slot(self._slots[number], GoFrame())
            case slot_group.Consume():
                self.tell_pauses()
            case slot_group.DrainSlot(number):
                self.feed(self._slots[number], slot_events.DrainRequested())
            case RunFinished():
                self._on_finished(effect)

    def _tick_group(self) -> None:
        self._group_timer = None
        self._carry_out(self._group.tick(self._loop.time()))

    def send_to_slot(self, slot: SupervisedSlot, command: Command) -> None:
        """Send a command to the engine of a slot, if it is connected."""
        if slot.link is not None:
            self._server.send(slot.link, command)

    def _send(self, slot: SupervisedSlot, run_token: int, frame: Command | RefusedFrame) -> None:
        link = slot.links.get(run_token)
        if link is not None:
            self._server.send(link, frame)
