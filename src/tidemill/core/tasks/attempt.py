"""The life of a task: its state, and what each thing that happens makes of it.

`feed(task, input, now_us)` returns what the task becomes and what has to be done, in one transaction; it does nothing
itself. All services and the command line change tasks through it alone.

    none -> scheduled -> queued -> running -> success | failed | skipped
                 ^                    |
                 +---- deferred <-----+
                 +-- up_for_retry <---+          none -> skipped | upstream_failed, as the upstream tasks decide

Invariants:
1. Every change raises the epoch by one. Who speaks for a task gives the epoch that it was told; one with an old epoch
   changes nothing. It learns whether it is late (`Fenced`) or has said this before (`Already`).
2. A trigger exists exactly while its task is deferred, and a session holds a task exactly while it is running.
3. The successors are told every change of the outcome, once: what they were told last is the outcome of the task.
4. A try that was lost with its worker, or deferred, uses up no retry.
5. The deadline of a try is counted from its first start, over deferrals and queues.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.dependencies import Outcome, Readiness
from tidemill.core.tasks.inputs import (
    Admit,
    Callback,
    Cancel,
    Channel,
    Claim,
    Clear,
    ClearXComs,
    Deferred,
    Due,
    Effect,
    EndAttempt,
    Failed,
    Input,
    Lost,
    MakeTrigger,
    Mark,
    Ready,
    Ring,
    RunCallback,
    Skipped,
    Stop,
    StopTrigger,
    StoreXComs,
    Succeeded,
    TellSuccessors,
    TriggerFailed,
    TriggerFired,
    identify,
)

#: How often a try may be lost with its worker before that counts as a failure of the try.
MAX_LOST = 5


class TaskState(enum.StrEnum):
    """Where a task is."""

    NONE = "none"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    UP_FOR_RETRY = "up_for_retry"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    UPSTREAM_FAILED = "upstream_failed"


_STATES = {outcome: TaskState(outcome.value) for outcome in Outcome}
_OUTCOMES = {state: outcome for outcome, state in _STATES.items()}
_CALLBACKS = {
    Outcome.SUCCESS: Callback.SUCCESS,
    Outcome.FAILED: Callback.FAILURE,
    Outcome.UPSTREAM_FAILED: Callback.FAILURE,
    Outcome.SKIPPED: Callback.SKIPPED,
}


@dataclass(frozen=True, slots=True)
class Policy:
    """What the author of a task has decided.

    Attributes:
        retries: How many tries may follow the first one.
        retry_delay_us: The pause before a retry, in microseconds.
        exponential: Whether each pause is about twice as long as the one before, at random within a factor of two.
        max_retry_delay_us: The longest pause.
        execution_timeout_us: How long a try may take, from its first start; None: any time.
        soft_fail: A sensor that is skipped where it would fail because its trigger failed or came too late.
        is_sensor: A sensor, which fails without retries when its trigger comes too late.
    """

    retries: int = 0
    retry_delay_us: int = 300_000_000
    exponential: bool = False
    max_retry_delay_us: int = 86_400_000_000
    execution_timeout_us: int | None = None
    soft_fail: bool = False
    is_sensor: bool = False

    def compute_delay(self, tries: int, bits: int) -> int:
        """Return the pause in microseconds after a try failed, the first one being 1."""
        if not self.exponential:
            return min(self.retry_delay_us, self.max_retry_delay_us)
        bound = Backoff(self.retry_delay_us, self.max_retry_delay_us).compute_bound(tries)
        return int(bound * (0.5 + bits / (2 << JITTER_BITS)))


class Resume(NamedTuple):
    """How an attempt continues after a deferral. `payload`: the encoded event."""

    method: str
    kwargs: str
    payload: str | None = None


class TaskRow(NamedTuple):
    """A task instance, as far as its life is concerned; a tuple, because one is created with every change.

    Attributes:
        policy: What its author has decided.
        state: Where it is.
        epoch: The number of changes of its state.
        tries: How many tries have begun.
        tries_before: How many had begun when a user last cleared the task.
        max_tries: After how many tries a failure is final.
        session: The worker's session that runs it.
        lost: How often this try was lost with its worker.
        deadline_us: When this try has taken too long.
        due_us: When a retry begins, or when a trigger is too late.
        resume: How the next attempt, or the one that waits for its trigger, continues; None: from the beginning.
    """

    policy: Policy = Policy()
    state: TaskState = TaskState.NONE
    epoch: int = 0
    tries: int = 0
    tries_before: int = 0
    max_tries: int = 1
    session: int | None = None
    lost: int = 0
    deadline_us: int | None = None
    due_us: int | None = None
    resume: Resume | None = None

    @property
    def outcome(self) -> Outcome | None:
        """How it has ended; None: it has not."""
        return _OUTCOMES.get(self.state)

    @property
    def started(self) -> bool:
        """Whether a try has begun since the task was created, or cleared."""
        return self.tries > self.tries_before

    @property
    def next_due_us(self) -> int | None:
        """When `Due` has to be fed, in UTC microseconds; None: not before something else happens."""
        due_us, deadline_us = self.due_us, self.deadline_us
        if self.state is TaskState.UP_FOR_RETRY:
            return due_us
        if self.state not in (TaskState.SCHEDULED, TaskState.QUEUED, TaskState.DEFERRED):
            return None
        if due_us is None or deadline_us is None:
            return deadline_us if due_us is None else due_us
        return min(due_us, deadline_us)

    def holds_slots(self, include_deferred: bool = False) -> bool:
        """Return whether it counts in its pool; `include_deferred`: whether deferred tasks do."""
        return self.state in (TaskState.QUEUED, TaskState.RUNNING) or (
            include_deferred and self.state is TaskState.DEFERRED
        )


class Moved(NamedTuple):
    """The task changes to `task`, and the effects are carried out."""

    task: TaskRow
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Already:
    """This was said before, and is stored: the answer was lost."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The task has moved on: who speaks for the epoch it gave is too late, and ends."""


@dataclass(frozen=True, slots=True)
class Refused:
    """Nothing changes: the input does not apply in this state."""

    reason: str


Answer = Moved | Already | Fenced | Refused


class _Changes(TypedDict, total=False):
    tries: int
    lost: int
    deadline_us: int | None
    due_us: int | None
    resume: Resume | None


_RING_SCHEDULER, _RING_WORKER, _RING_TRIGGERER = Ring(Channel.SCHEDULER), Ring(Channel.WORKER), Ring(Channel.TRIGGERER)


def feed(task: TaskRow, given: Input, now_us: int, left: str | None = None) -> Answer:
    """Return what a task becomes.

    Args:
        task: The task as it is stored, and locked.
        given: What happened.
        now_us: The database's time, in UTC microseconds.
        left: What the journal says by which input the task left the epoch of `given` (`identify`); None: nothing.
    """
    if given.epoch is not None and given.epoch != task.epoch:
        return Already() if given.epoch < task.epoch and left == identify(given) else Fenced()
    # The most frequent inputs first.
    match given:
        case Ready() | Admit() | Claim() | Due():
            return _decide_waiting(task, given, now_us)
        case Succeeded() | Failed() | Skipped() | Deferred() | Lost():
            return _decide_attempt(task, given, now_us)
        case TriggerFired() | TriggerFailed():
            return _decide_trigger(task, given, now_us)
        case _:
            return _decide_user(task, given)


def _refuse(task: TaskRow, given: Input) -> Refused:
    return Refused(f"a task that is {task.state.value} takes no {type(given).__name__.lower()}")


def _move(
    task: TaskRow,
    state: TaskState,
    *effects: Effect | None,
    session: int | None = None,
    **changes: Unpack[_Changes],
) -> Moved:
    """Return the task in another state, with what holds for every change."""
    moved = task._replace(state=state, epoch=task.epoch + 1, session=session, **changes)
    all_effects = [effect for effect in effects if effect is not None]
    before, after = task.outcome, moved.outcome
    if after is not before:
        all_effects += (TellSuccessors(before, after), _RING_SCHEDULER)
    return Moved(moved, tuple(all_effects))


def _end(task: TaskRow, outcome: Outcome, *effects: Effect | None, error: str | None = None) -> Moved:
    """End the task. Its callback runs if it was started."""
    callback = RunCallback(_CALLBACKS[outcome], error) if task.started else None
    return _move(task, _STATES[outcome], *effects, callback, due_us=None, deadline_us=None, resume=None)


def _fail(
    task: TaskRow, error: str, now_us: int, bits: int, *effects: Effect, may_retry: bool = True, soft: bool = False
) -> Moved:
    """End the try: another one follows, or the task fails, or is skipped instead (`soft`)."""
    if soft and task.policy.soft_fail:
        return _end(task, Outcome.SKIPPED, *effects, error=error)
    if not may_retry or task.tries >= task.max_tries:
        return _end(task, Outcome.FAILED, *effects, error=error)
    due_us = now_us + task.policy.compute_delay(task.tries, bits)
    told = (*effects, RunCallback(Callback.RETRY, error), _RING_SCHEDULER)
    return _move(task, TaskState.UP_FOR_RETRY, *told, due_us=due_us, deadline_us=None, resume=None, lost=0)


def _decide_waiting(task: TaskRow, given: Ready | Admit | Claim | Due, now_us: int) -> Answer:
    match given:
        case Claim(session=session):
            if task.state is TaskState.QUEUED:
                return _start(task, session, now_us)
        case Admit():
            if task.state is TaskState.SCHEDULED:
                return _move(task, TaskState.QUEUED, _RING_WORKER)
        case Ready(readiness=readiness):
            if task.state is TaskState.NONE and readiness is not Readiness.WAIT:
                return _decide_ready(task, readiness)
        case _:
            return _decide_due(task, given, now_us)
    return _refuse(task, given)


def _decide_ready(task: TaskRow, readiness: Readiness) -> Moved:
    if readiness is Readiness.RUN:
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER)
    return _end(task, Outcome.SKIPPED if readiness is Readiness.SKIP else Outcome.UPSTREAM_FAILED)


def _start(task: TaskRow, session: int, now_us: int) -> Moved:
    """Begin an attempt: of a new try, or of one that was deferred or lost."""
    if task.resume is not None or task.lost:
        return _move(task, TaskState.RUNNING, session=session)
    timeout_us, cleared = task.policy.execution_timeout_us, ClearXComs() if task.tries else None
    deadline_us = None if timeout_us is None else now_us + timeout_us
    return _move(task, TaskState.RUNNING, cleared, session=session, tries=task.tries + 1, deadline_us=deadline_us)


def _decide_due(task: TaskRow, given: Due, now_us: int) -> Answer:
    due_us = task.next_due_us
    if due_us is None or now_us < due_us:
        return Refused(f"nothing is due for a task that is {task.state.value}")
    if task.state is TaskState.UP_FOR_RETRY:
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER, due_us=None)
    if task.deadline_us is not None and now_us >= task.deadline_us:
        stop = (StopTrigger(Stop.TIMEOUT),) if task.state is TaskState.DEFERRED else ()
        return _fail(task, "TaskTimeout: the task took longer than its execution_timeout", now_us, given.bits, *stop)
    is_sensor = task.policy.is_sensor
    name, whose = ("SensorTimeout", "sensor") if is_sensor else ("TaskDeferralTimeout", "deferral")
    error = f"{name}: the trigger did not fire before the timeout of the {whose}"
    return _fail(task, error, now_us, given.bits, StopTrigger(Stop.TIMEOUT), may_retry=not is_sensor, soft=True)


def _decide_attempt(task: TaskRow, given: Succeeded | Failed | Skipped | Deferred | Lost, now_us: int) -> Answer:
    """Take the word of, or about, the attempt that runs."""
    if task.state is not TaskState.RUNNING:
        return _refuse(task, given)
    match given:
        case Succeeded(xcoms=xcoms):
            return _end(task, Outcome.SUCCESS, StoreXComs(xcoms) if xcoms else None)
        case Skipped():
            return _end(task, Outcome.SKIPPED)
        case Failed(error=error, may_retry=may_retry, bits=bits):
            return _fail(task, error, now_us, bits, may_retry=may_retry)
        case Deferred():
            due_us = None if given.timeout_us is None else now_us + given.timeout_us
            resume = Resume(given.method, given.kwargs)
            told = (MakeTrigger(task.epoch + 1, given.trigger), _RING_TRIGGERER, _RING_SCHEDULER)
            return _move(task, TaskState.DEFERRED, *told, due_us=due_us, lost=0, resume=resume)
        case _:
            if task.lost >= MAX_LOST:
                return _fail(task, f"the task was lost with its worker {MAX_LOST + 1} times", now_us, given.bits)
            return _move(task, TaskState.QUEUED, _RING_WORKER, lost=task.lost + 1)


def _decide_trigger(task: TaskRow, given: TriggerFired | TriggerFailed, now_us: int) -> Answer:
    if task.state is not TaskState.DEFERRED or task.resume is None:
        return _refuse(task, given)
    if isinstance(given, TriggerFired):
        resume = task.resume._replace(payload=given.payload)
        return _move(task, TaskState.SCHEDULED, StopTrigger(Stop.DONE), _RING_SCHEDULER, due_us=None, resume=resume)
    # As Python shows an error: the traceback, then its name and what it says, which lists show.
    trace, newline, said = given.error.rstrip().rpartition("\n")
    error = f"{trace}{newline}TaskDeferralError: {said}"
    return _fail(task, error, now_us, given.bits, StopTrigger(Stop.FAILED), soft=True)


def _decide_user(task: TaskRow, given: Clear | Mark | Cancel) -> Answer:
    """Do what a user wants, whatever the state; an attempt that runs is ended, and a trigger stopped."""
    ended: list[Effect] = []
    if task.session is not None:
        ended += [EndAttempt(task.session), _RING_WORKER]
    if task.state is TaskState.DEFERRED:
        ended += [StopTrigger(Stop.USER), _RING_TRIGGERER]
    match given:
        case Clear():
            if task.state is TaskState.NONE:
                return _refuse(task, given)
            again = TaskRow(
                task.policy,
                task.state,
                task.epoch,
                tries=task.tries,
                tries_before=task.tries,
                max_tries=task.tries + task.policy.retries + 1,
            )
            return _move(again, TaskState.NONE, *ended, ClearXComs(), _RING_SCHEDULER)
        case Mark(outcome=outcome):
            if task.outcome is outcome:
                return _refuse(task, given)
            return _end(task, outcome, *ended, error="marked by a user")
        case _:
            if task.outcome is not None:
                return _refuse(task, given)
            # One that waits for its first try has not started; one between two tries has.
            outcome = Outcome.FAILED if task.started else Outcome.SKIPPED
            return _end(task, outcome, *ended, error="the run was cancelled")
