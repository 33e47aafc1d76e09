"""Hosts the triggers of deferred tasks: claims them from the store, runs them, and releases them at shutdown.

Theory of operation. Each time the host connects it begins a session in the store, in which it claims and runs triggers
(`source`, `trigger`). When the store answers that the session has ended (other processes presumed it dead, or the
process that owns the store was restarted), the host releases its triggers and begins another session.

A trigger that a user stops is cancelled, and its `on_kill` is called. If its triggerer is gone, any other one calls
`on_kill` of a new instance.

Invariants: no trigger fails because of a shutdown, a handover or an outage, and `on_kill` runs for none of them; an
error in one claim does not prevent later claims.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractContextManager
from typing import Any

import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.errors import RemoteError, TidemillError
from tidemill.core.tasks.inputs import Channel
from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.core.triggers.task_triggers import ClaimKey, TaskEnd
from tidemill.dags.attempt.current import serving
from tidemill.runtime.log.setup import throttle
from tidemill.services.sessions.beginning import begin_session
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.releasing import note_stopping, release_rest
from tidemill.services.triggerer.hosting.host import TriggerHost
from tidemill.services.triggerer.tasks.folder_code import FolderCode
from tidemill.services.triggerer.tasks.logs import TaskLogs
from tidemill.services.triggerer.tasks.source import CLAIM_COUNT, ServiceSessionEndedError, TaskSource
from tidemill.services.triggerer.tasks.starts import StartRenderer
from tidemill.services.triggerer.tasks.stuck_watch import StuckWatch
from tidemill.services.triggerer.tasks.trigger import TaskTrigger, TaskTriggerServices
from tidemill.services.triggerer.tasks.trigger_services import TriggerServices
from tidemill.store.calls.service_calls import BeginSession, EndSession, TrialKind
from tidemill.store.calls.trigger_calls import ClaimedTrigger
from tidemill.store.database import StoreAwayError, StoreClient
from tidemill.store.doorbell import SCAN_SECONDS, Doorbell

log = structlog.get_logger(__name__)

#: The shortest pause between two comparisons of running triggers with the store. Comparisons take at most a twentieth
#: of the time.
COMPARE_SECONDS = 0.25
_COMPARE_SHARE = 20
#: The pause before another session is begun, and while the store is unreachable.
PAUSE_SECONDS = 0.5
#: How long storing the end of a session may take.
END_SECONDS = 5.0
_LEASE = ServiceLease()


class TaskHost:
    """Runs the triggers of deferred tasks.

    Args:
        calls: The store.
        settings: The section `triggerer`.
        about: The request that begins a session, with queues and capacity, and the kind of a trial.
        code: The folder that may define the classes of triggers.
        log_bytes: The limit of each trigger's log.
        secrets: The secrets that this process masks; secrets given to triggers are added.
        clock: A monotonic clock, in seconds.
        on_stuck: Called on a thread when a trigger blocks the loop forever, with the session, the trigger (None:
            unknown), and its stack. None: the loop is not watched.
        grace_seconds: How long a task that a user cleared waits for the cleanup of its trigger.
        is_told: Returns, at shutdown, whether the parent requested it; None: every shutdown is intended. An unrequested
            one, such as a SIGTERM that a trigger sends to its own process, counts as a crash: the triggers stay
            claimed, and the parent decides about them.
        lease: The lease of its sessions.

    Attributes:
        host: Runs the triggers; None: no session has begun.
    """

    def __init__(
        self,
        calls: StoreClient,
        settings: TriggererSettings,
        about: BeginSession,
        code: FolderCode,
        log_bytes: int,
        secrets: KnownSecrets,
        clock: Callable[[], float] = time.monotonic,
        on_stuck: Callable[[int, ClaimedTrigger | None, str], None] | None = None,
        grace_seconds: float = 5.0,
        is_told: Callable[[], Awaitable[bool]] | None = None,
        lease: ServiceLease = _LEASE,
    ) -> None:
        self._lease = lease
        self._grace_seconds, self._is_told = grace_seconds, is_told
        self._calls, self._settings, self._about, self._code = calls, settings, about, code
        self._on_stuck = on_stuck
        self._clock, self._log_bytes, self._secrets = clock, log_bytes, secrets
        self.host: TriggerHost[TaskTrigger] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Run triggers until `stop` is set, then release them."""
        stopping = asyncio.create_task(stop.wait(), name="stop of the triggerer")
        try:
            while not stop.is_set():
                beginning = asyncio.create_task(begin_session(self._calls, self._about), name="begin a session")
                await asyncio.wait({beginning, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not beginning.done():
                    beginning.cancel()
                    await asyncio.wait({beginning})
                    return
                await self._serve(beginning.result(), stopping)
                if not stop.is_set():
                    log.warning("the store has ended this triggerer's session; beginning another one")
                    await asyncio.wait({stopping}, timeout=PAUSE_SECONDS)
        finally:
            stopping.cancel()

    async def try_out(self, session: int, seconds: float, stop: asyncio.Event) -> None:
        """Run the triggers that are reserved for a session until they have ended, but at most this long."""
        stopping = asyncio.create_task(stop.wait(), name="stop of the triggerer")
        try:
            await self._serve(session, stopping, seconds)
        finally:
            stopping.cancel()

    async def _serve(self, session: int, stopping: asyncio.Task[Any], trial_seconds: float | None = None) -> None:
        """Run triggers in one session until it ends.

        Args:
            session: The session.
            stopping: Done at shutdown.
            trial_seconds: How long to run only the triggers that are reserved for the session; None: run all triggers.
        """
        secrets = self._secrets
        logs = TaskLogs(self._calls, self._log_bytes, secrets)
        about, is_trial = self._about, trial_seconds is not None
        source = TaskSource(
            self._calls,
            session,
            about.capacity,
            about.queues,
            logs,
            reserved=is_trial,
            acknowledges=about.trial is not TrialKind.SPLIT,
            grace_seconds=self._grace_seconds,
            lease=self._lease,
            max_undelivered=self._settings.max_undelivered_events,
        )
        self.host = host = TriggerHost[TaskTrigger](source, self._settings, clock=self._clock)
        host.start()
        host.book.is_started = True
        log.info("the triggerer runs the triggers of tasks", session=session)
        answers = TriggerServices(self._calls, secrets)
        turns = _Turns(
            source, host, self._calls.doorbell, self._code, lambda: serving(answers), secrets.mask, self._clock
        )
        works = [turns.run(), source.beat(), _wait(source.ended)]
        if trial_seconds is not None:
            works.append(source.wait_over(trial_seconds))
        tasks = {asyncio.create_task(one) for one in works}
        watch = self._watch(session, host)
        done: set[asyncio.Task[Any]] = set()
        try:
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A plain thread may have cancelled the tasks; it belongs to no trigger.
            is_broken = not done or any(task.cancelled() for task in done)
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            for task in tasks:
                if not task.cancelled() and (error := task.exception()) is not None:
                    log.error("a part of the triggerer failed; this is a bug in tidemill", exc_info=error)
            if watch is not None:
                watch.close()
            is_meant = not is_broken and (not stopping.done() or self._is_told is None or await self._is_told())
            if is_meant and not source.ended.is_set():
                await note_stopping(self._calls, session)
            if not is_meant:
                by = "code that cancels its tasks" if is_broken else "a signal that tidemill did not send"
                log.error(f"{by} stopped the triggerer; this counts as a crash")
                source.keep_claims()
            await host.stop(CancelReason.HAND_OVER if source.ended.is_set() else CancelReason.SHUTDOWN)
            self.host = None
        if is_broken:
            raise asyncio.CancelledError
        if is_meant and not source.ended.is_set():
            try:
                async with asyncio.timeout(END_SECONDS):
                    await self._calls.call(EndSession(session))
                    await release_rest(self._calls)
            except (TimeoutError, TidemillError) as error:
                log.warning("cannot record in the store that the triggerer has stopped", error=str(error))

    def _watch(self, session: int, host: TriggerHost[TaskTrigger]) -> StuckWatch | None:
        """Start a watch for a trigger that blocks the loop forever."""
        on_stuck = self._on_stuck
        if on_stuck is None:
            return None

        def find(name: str | None, stack: str) -> None:
            run = host.making or (None if name is None else host.runs.get(name))
            on_stuck(session, None if run is None else run.claim, stack)

        watch = StuckWatch(self._settings.block_limit_seconds, find)
        watch.start()
        return watch


class _Turns:
    """The claims and stops of one session."""

    def __init__(
        self,
        source: TaskSource,
        host: TriggerHost[TaskTrigger],
        bell: Doorbell,
        code: FolderCode,
        serve: Callable[[], AbstractContextManager[None]],
        mask: Callable[[str], str],
        clock: Callable[[], float],
    ) -> None:
        self._source, self._host, self._bell, self._code, self._clock = source, host, bell, code, clock
        self._services = TaskTriggerServices(
            host.manager,
            host.events,
            is_stopping=lambda: host.stopping,
            note_stored=host.event_log.note,
            report_failure=source.report_failure,
            report_end=source.report_end,
            note_ended=self._note_ended,
            open_log=source.open_log,
            room=source.room,
            serve=serve,
            mask=mask,
        )
        self._renderer = StartRenderer()
        self._runs: dict[ClaimKey, TaskTrigger] = {}
        # The streams of triggers that start their tasks; the claims of the others name them.
        self._streams: dict[ClaimKey, str] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._compare_at = 0.0
        self._pause = SCAN_SECONDS

    async def run(self) -> None:
        """Claim and stop triggers whenever there may be some.

        Raises:
            ServiceSessionEndedError: The session has ended.
        """
        try:
            await self._source.wait_heard()
            while True:
                try:
                    if await self._look():
                        continue
                except ServiceSessionEndedError:
                    return
                except RemoteError as error:
                    if not isinstance(error, StoreAwayError):
                        throttle(log, 10.0).warning("cannot claim triggers from the store; retrying", error=str(error))
                    await asyncio.sleep(PAUSE_SECONDS)
                    continue
                except Exception:
                    log.exception("claiming triggers failed; this is a bug in tidemill")
                    await asyncio.sleep(SCAN_SECONDS)
                    continue
                await self._wait()
        finally:
            # They still start triggers that they have routed, so that those end properly.
            for task in self._starting:
                task.cancel()
            if self._starting:
                await asyncio.wait(self._starting)
            self._renderer.close()

    async def _look(self) -> bool:
        """Claim and stop triggers; return whether there may be more to claim at once."""
        self._source.freed.clear()
        claimed = await self._source.claim()
        self._start(claimed)
        for claim in self._source.take_kills():
            self._begin(self._call_kill(claim))
        await self._source.room.look()
        now = self._clock()
        self._pause = min(SCAN_SECONDS, max(0.0, self._compare_at - now) or SCAN_SECONDS)
        if now >= self._compare_at:
            for key, reason in await self._source.find_stops():
                if (run := self._runs.get(key)) is not None:
                    run.cancel(reason)
            for key in await self._source.choose_moves(self._list_units):
                if (run := self._runs.get(key)) is not None:
                    run.hand_over()
            after = self._clock()
            self._compare_at = after + max(COMPARE_SECONDS, _COMPARE_SHARE * (after - now))
        if claimed:
            # The rest of what waits was the share of others, which may be gone.
            self._pause = min(self._pause, COMPARE_SECONDS)
        return len(claimed) >= CLAIM_COUNT

    def _list_units(self) -> list[tuple[str | None, ClaimKey]]:
        streams = self._streams
        return [(run.claim.stream_key or streams.get(key), key) for key, run in self._runs.items()]

    async def _call_kill(self, claim: ClaimedTrigger) -> None:
        """Call `on_kill` of a trigger whose triggerer is gone, on a new instance."""
        name = _find_module(claim)
        if name not in sys.modules:
            await asyncio.to_thread(self._code.import_modules, [name])
        run = TaskTrigger(self._services, claim, self._clock)
        if claim.start is not None and claim.start.rendered:
            await run.render(self._renderer)
        run.create()
        killing = run.start_kill()
        try:
            error = await asyncio.shield(killing)
        except asyncio.CancelledError:
            # At shutdown nothing is reported, so that another triggerer calls it.
            killing.cancel()
            raise
        await self._source.report_kill(claim, error)

    async def _wait(self) -> None:
        """Wait until the doorbell rings, a slot becomes free if none was, or a comparison or scan is due."""
        pause = self._pause
        waits: list[Coroutine[Any, Any, Any]] = [self._bell.wait(Channel.TRIGGERER, pause)]
        if not self._source.triggers.room:
            waits.append(_wait(self._source.freed))
        tasks = [asyncio.create_task(one) for one in waits]
        try:
            await asyncio.wait(tasks, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                with contextlib.suppress(RemoteError):
                    task.result()

    def _start(self, claimed: Sequence[ClaimedTrigger]) -> None:
        """Run triggers. Modules that are not imported yet are imported on a thread before their triggers start."""
        if not claimed:
            return
        self._code.forget_changed()
        runs = [TaskTrigger(self._services, claim, self._clock) for claim in claimed]
        self._runs.update((run.key, run) for run in runs)
        missing = {name for run in runs if (name := _find_module(run.claim)) not in sys.modules}
        importing, ready = _split(runs, lambda run: _find_module(run.claim) in missing)
        rendering, quick = _split(ready, lambda run: run.claim.start is not None)
        self._begin(self._start_all(quick))
        self._begin(self._start_all(rendering))
        if missing:
            self._begin(self._import_first(missing, importing))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work, name="start of triggers")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _import_first(self, names: set[str], runs: Sequence[TaskTrigger]) -> None:
        await asyncio.to_thread(self._code.import_modules, sorted(names))
        await self._start_all(runs)

    async def _start_all(self, runs: Sequence[TaskTrigger]) -> None:
        for run in runs:
            if run.claim.start is not None and run.claim.start.rendered:
                await run.render(self._renderer)
        await self._host.create(runs)
        streams = [(run.claim.id, run.claim.token, key) for run in runs if (key := run.find_stream_key()) is not None]
        elsewhere = await self._source.place(streams) if streams else frozenset()
        self._streams.update((ClaimKey(number, token), stream) for number, token, stream in streams)
        for run in runs:
            if run.claim.id in elsewhere:
                run.cancel(CancelReason.HAND_OVER)
        self._host.route(runs)
        await self._host.run_all(runs)

    def _note_ended(self, key: ClaimKey, end: TaskEnd) -> None:
        self._runs.pop(key, None)
        self._streams.pop(key, None)
        self._source.note_ended(key, end)


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _split(
    runs: Sequence[TaskTrigger], is_slow: Callable[[TaskTrigger], bool]
) -> tuple[list[TaskTrigger], list[TaskTrigger]]:
    """Return the triggers that are slow to start, with all others of their streams, and the rest.

    All triggers of a stream start together: those that start later would miss what the stream has read.
    """
    slow = {run.key for run in runs if is_slow(run)}
    streams = {run.claim.stream_key for run in runs if run.key in slow} - {None}
    late = [run for run in runs if run.key in slow or run.claim.stream_key in streams]
    return late, [run for run in runs if not (run.key in slow or run.claim.stream_key in streams)]


def _find_module(claim: ClaimedTrigger) -> str:
    return claim.classpath.rpartition(".")[0]
