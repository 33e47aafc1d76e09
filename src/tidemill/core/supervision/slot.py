"""The supervision of one slot: when its Spark job is submitted, cancelled or replaced, and when it is finished.

Theory of operation. A submitted job carries a job token. Its engine connects to the driver (a link) and says hello with
that token; the link numbers engines with run tokens. Spark may start the task of a job a second time: then a second
engine connects with the same job token, and the newest wins. An engine with an older token of either kind is refused
and has to stop. A running job says nothing about its engine, which may wait for a core: only the link tells.

Invariants:
- At most one job has not ended; a new one is submitted only once every link of this slot is closed.
- The run tokens of admitted engines never fall.
- A finished slot submits nothing and admits no engine; it finishes once.
- A pause of the supervising process is not held against an engine: a late tick means that this process was suspended,
  or its host was overloaded, so the slot's clock is stopped for that time.
- Nothing is submitted after a fencing or configuration error, after a failure that an engine reported before the first
  `EngineReady`, or after several engines in a row crashed before the first `EngineReady`.

The shell feeds inputs in the order in which they occur, carries out the effects in order, and feeds `Tick` at `due`.
"""

from __future__ import annotations

from tidemill.core.supervision.slot_events import (
    AdmitEngine,
    CancelJob,
    DrainEngine,
    DrainRequested,
    Effect,
    EngineConnected,
    EngineEnding,
    EngineReady,
    Heartbeat,
    Input,
    JobEnded,
    KillEngine,
    LinkClosed,
    OperatorReport,
    RefuseEngine,
    ReportKind,
    RestartRequested,
    SlotFinished,
    StartSlot,
    SubmitJob,
    Tick,
)
from tidemill.core.supervision.slot_limits import SlotLimits, SlotState


class Slot:
    """One slot of a pipeline.

    Args:
        number: The number of the slot, for messages.
        limits: The times of the slot.
    """

    def __init__(self, number: int, limits: SlotLimits | None = None) -> None:
        self.number = number
        self._limits = limits or SlotLimits()
        self._last_job = 0
        #: When to submit a job; None: a job is running, or none is needed.
        self._start_at: float | None = None
        #: The job that has not ended, and the state of its newest engine.
        self._job: int | None = None
        self._run: int | None = None
        self._newest = 0
        self._engines_of_job = 0
        self._ready_at: float | None = None
        self._heard_at = 0.0
        self._cancelled_at: float | None = None
        self._cancelled_why = ""
        #: The run tokens whose links are open, whether admitted or refused.
        self._open: set[int] = set()
        #: When the slot lost its last engine, and when the missing engine was last reported.
        self._alone_since = 0.0
        self._reported_at = 0.0
        self._failures = 0
        self._was_ready = False
        self._had_engine = False
        self._drained_at: float | None = None
        #: When a user requested a restart of the engine.
        self._restarted_at: float | None = None
        self._finished = False
        #: The total time for which this process was suspended. All other times are by a clock that stopped meanwhile.
        self._stood_seconds = 0.0
        self._fed_at = 0.0

    def renew(self, limits: SlotLimits) -> Slot:
        """Return a slot that replaces this one, once this one is finished, to run other code.

        The new slot has seen no failures, but continues the numbering, so that engines of the old one are refused. It
        submits nothing before their links are closed.
        """
        new = Slot(self.number, limits)
        new._last_job = self._last_job
        new._newest = self._newest
        new._open = set(self._open)
        return new

    @property
    def state(self) -> SlotState:
        if self._finished:
            return SlotState.FINISHED
        if self._job is None:
            return SlotState.IDLE if self._start_at is None else SlotState.WAITING
        if self._cancelled_at is not None:
            return SlotState.CANCELLED
        if self._connected:
            return SlotState.RUNNING if self._restarted_at is None else SlotState.RESTARTING
        return SlotState.STARTING if self._run is None else SlotState.LINK_LOST

    @property
    def run_token(self) -> int | None:
        """The run token of the admitted engine, or None."""
        return self._run

    @property
    def _connected(self) -> bool:
        return self._run in self._open

    @property
    def due(self) -> float | None:
        """The time of the next `Tick` without further input; None: never."""
        times = self._list_times()
        return min(times) + self._stood_seconds if times else None

    def _list_times(self) -> list[float]:
        """Return the times at which a step is due, by the clock that stopped with this process."""
        if self._finished or (self._job is None and self._start_at is None):
            return []
        limits = self._limits
        times = [self._fed_at + limits.look_seconds]
        if self._start_at is not None and not self._open:
            times.append(self._start_at)
        if self._cancelled_at is not None:
            times.append(self._cancelled_at + limits.silent_seconds)
        elif self._connected:
            times.append(self._heard_at + limits.silent_seconds)
        elif self._run is not None:
            times.append(self._alone_since + limits.lost_seconds)
        if not self._connected:
            times.append(self._reported_at + limits.hello_seconds)
        if self._drained_at is not None:
            times.append(self._drained_at + limits.drain_seconds)
        elif self._restarted_at is not None:
            times.append(self._restarted_at + limits.drain_seconds)
        return times

    def feed(self, event: Input, now: float) -> list[Effect]:
        """Process one input and return the effects, in order.

        Args:
            event: The input.
            now: Seconds of a monotonic clock.
        """
        times, due = self._list_times(), self.due
        if due is not None and now > due + self._limits.late_seconds:
            self._stood_seconds += now - due
            if self._connected:
                # The engine may have been suspended as well, and needs time until its next heartbeat.
                self._heard_at = now - self._stood_seconds
        self._fed_at = now - self._stood_seconds
        if due is not None and due <= now <= due + self._limits.late_seconds:
            # A rounding error must not miss a due step: the next tick would be due at once, again and again.
            self._fed_at = max(self._fed_at, *(time for time in times if time + self._stood_seconds <= now))
        return self._process(event, self._fed_at)

    def _process(self, event: Input, now: float) -> list[Effect]:
        if self._finished:
            return self._process_finished(event)
        match event:
            case StartSlot():
                return self._start(now)
            case EngineConnected(job_token, run_token):
                return self._process_hello(job_token, run_token, now)
            case EngineReady(run_token):
                return self._note_ready(run_token, now)
            case Heartbeat(run_token):
                if run_token == self._run:
                    self._heard_at = now
                return []
            case LinkClosed(run_token):
                return self._process_link_closed(run_token, now)
            case JobEnded(job_token, ending, error):
                return self._process_job_ended(job_token, ending, error, now)
            case DrainRequested():
                return self._drain(now)
            case RestartRequested():
                return self._restart(now)
            case Tick():  # pragma: no branch - mypy proves that no other case is left
                return self._tick(now)

    # -- inputs -------------------------------------------------------------------------------------------------------

    def _process_finished(self, event: Input) -> list[Effect]:
        """Track only the open links: the slot that replaces this one waits until they are closed."""
        match event:
            case EngineConnected(_, run_token):
                self._open.add(run_token)
                return [RefuseEngine(run_token, self._format("is finished"))]
            case LinkClosed(run_token):
                self._open.discard(run_token)
        return []

    def _start(self, now: float) -> list[Effect]:
        if self._job is not None or self._start_at is not None:
            return []
        self._start_at = now
        self._note_alone(now)
        return self._tick(now)

    def _process_hello(self, job_token: int, run_token: int, now: float) -> list[Effect]:
        self._open.add(run_token)
        if job_token != self._job or self._cancelled_at is not None or run_token < self._newest:
            text = self._format(f"refuses engine {run_token}: it was replaced or cancelled")
            return [RefuseEngine(run_token, text), OperatorReport(ReportKind.REFUSED, text)]
        effects: list[Effect] = []
        if run_token != self._run:
            if self._run is not None and self._connected:
                text = self._format(f"refuses engine {self._run}: engine {run_token} is newer")
                effects = [RefuseEngine(self._run, text), OperatorReport(ReportKind.REFUSED, text)]
            self._run = self._newest = run_token
            self._engines_of_job += 1
            self._ready_at = self._restarted_at = None
            self._had_engine = True
        self._heard_at = now
        effects.append(AdmitEngine(run_token))
        if self._drained_at is not None:
            effects.append(DrainEngine(run_token))
        elif self._restarted_at is not None:
            effects.append(DrainEngine(run_token, keep_membership=True))
        return effects

    def _note_ready(self, run_token: int, now: float) -> list[Effect]:
        if run_token == self._run:
            self._heard_at = now
            self._was_ready = True
            if self._ready_at is None:
                self._ready_at = now
        return []

    def _process_link_closed(self, run_token: int, now: float) -> list[Effect]:
        self._open.discard(run_token)
        if run_token == self._run:
            self._note_alone(now)
        return self._tick(now)

    def _process_job_ended(self, job_token: int, ending: EngineEnding, error: str | None, now: float) -> list[Effect]:
        if job_token != self._job:
            return []
        if self._cancelled_at is not None and ending is EngineEnding.CRASHED:
            error = self._cancelled_why
        fenced_by_own = ending is EngineEnding.FENCED and self._engines_of_job > 1
        hopeless = not self._was_ready and (
            ending is EngineEnding.FAILED
            or (ending is EngineEnding.CRASHED and self._failures + 1 >= self._limits.first_crashes)
        )
        final = ending is EngineEnding.CONFIG or (ending is EngineEnding.FENCED and not fenced_by_own)
        if hopeless and ending is EngineEnding.CRASHED:
            error = f"{self._failures + 1} times in a row before it was ready; the last time: {error}"
        if self._drained_at is not None or hopeless or final:
            return self._finish(ending, error)
        if self._restarted_at is not None and ending is EngineEnding.DRAINED:
            self._start_at = now
            self._forget_job(now)
            return self._tick(now)
        if self._ready_at is not None and now >= self._ready_at + self._limits.healthy_seconds:
            self._failures = 0
        self._failures += 1
        delay_seconds = self._limits.backoff.compute_bound(self._failures)
        self._start_at = now + delay_seconds
        self._forget_job(now)
        details = f": {error}" if error else ""
        text = self._format(f"lost its engine ({ending}{details}); the next one starts in {delay_seconds:g} s")
        return [OperatorReport(ReportKind.RESTART, text), *self._tick(now)]

    def _drain(self, now: float) -> list[Effect]:
        if self._drained_at is not None:
            return []
        self._drained_at, self._restarted_at = now, None
        ending = EngineEnding.ABSENT if self._had_engine else EngineEnding.DRAINED
        if self._job is None:
            return self._finish(ending, None)
        if self._run is None:
            # The job waits for a core, or its engine is starting. It cannot have subscribed, and its hello will be
            # refused.
            return [CancelJob(self._job), *self._finish(ending, None)]
        return [DrainEngine(self._run)] if self._connected else []  # an engine that reconnects gets it with its hello

    def _restart(self, now: float) -> list[Effect]:
        if self._run is None or self.state is not SlotState.RUNNING or self._drained_at is not None:
            return []  # no engine runs, the next one is already starting, or none will start
        self._restarted_at = now
        return [DrainEngine(self._run, keep_membership=True)]

    def _tick(self, now: float) -> list[Effect]:
        limits = self._limits
        effects: list[Effect] = []
        if self._drained_at is not None and self._job is not None and now >= self._drained_at + limits.drain_seconds:
            return self._kill(self._job)
        if self._job is None:
            if self._start_at is not None and now >= self._start_at and not self._open:
                return [self._submit(now)]
        elif self._cancelled_at is not None:
            if now >= self._cancelled_at + limits.silent_seconds:
                self._cancelled_at = now
                text = self._format(
                    f"was cancelled {limits.silent_seconds:g} s ago and has not ended; it is cancelled again"
                )
                effects += [CancelJob(self._job), OperatorReport(ReportKind.CANCELLED, text)]
        elif self._restarted_at is not None and now >= self._restarted_at + limits.drain_seconds:
            why = f"an engine that did not end within {limits.drain_seconds:g} s after the request to restart"
            assert self._run is not None
            effects += [KillEngine(self._run), *self._cancel(self._job, ReportKind.CANCELLED, why, now)]
        elif self._connected:
            if now >= self._heard_at + limits.silent_seconds:
                why = f"an engine that was silent for {limits.silent_seconds:g} s"
                effects += self._cancel(self._job, ReportKind.SILENT, why, now)
        elif self._run is not None and now >= self._alone_since + limits.lost_seconds:
            why = f"an engine that lost its link and did not end within {limits.lost_seconds:g} s"
            effects += self._cancel(self._job, ReportKind.LINK_LOST, why, now)
        return effects + self._report_alone(now)

    # -- steps --------------------------------------------------------------------------------------------------------

    def _submit(self, now: float) -> SubmitJob:
        self._last_job += 1
        self._job = self._last_job
        self._start_at = None
        self._note_alone(now)
        return SubmitJob(self._job)

    def _cancel(self, job: int, kind: ReportKind, why: str, now: float) -> list[Effect]:
        self._cancelled_at, self._restarted_at = now, None
        self._cancelled_why = f"its job was cancelled: {why} is considered dead"
        return [CancelJob(job), OperatorReport(kind, self._format(f"has {why}; it is considered dead and replaced"))]

    def _kill(self, job: int) -> list[Effect]:
        """Stop waiting for an engine that was asked to drain: a shutdown has one deadline."""
        why = f"an engine that did not end within {self._limits.drain_seconds:g} s after the request to drain"
        kill = [KillEngine(self._run)] if self._run is not None else []
        report = OperatorReport(ReportKind.CANCELLED, self._format(f"has {why}; it is killed"))
        return [*kill, CancelJob(job), report, *self._finish(EngineEnding.OVERDUE, why)]

    def _forget_job(self, now: float) -> None:
        if self._connected:
            self._note_alone(now)
        self._job = self._run = None
        self._cancelled_at = self._ready_at = self._restarted_at = None
        self._engines_of_job = 0

    def _finish(self, ending: EngineEnding, error: str | None) -> list[Effect]:
        self._finished = True
        self._run = None
        return [SlotFinished(ending, error)]

    def _note_alone(self, now: float) -> None:
        self._alone_since = self._reported_at = now

    def _report_alone(self, now: float) -> list[Effect]:
        if self._connected or now < self._reported_at + self._limits.hello_seconds:
            return []
        if self._job is None and self._start_at is None:
            return []
        self._reported_at = now
        if self._job is None:
            why = "the old engine's link is still open" if self._open else "it waits for its next start"
        elif self._run is None:
            why = "its Spark job waits for a core, or the worker cannot start or cannot reach the driver"
        else:
            why = "its engine lost the link and has neither reconnected nor ended"
        text = self._format(f"has had no engine for {now - self._alone_since:.0f} s: {why}")
        return [OperatorReport(ReportKind.NO_HELLO, text)]

    def _format(self, what: str) -> str:
        return f"slot {self.number} {what}"
