"""The life of a task: its states, and the transition that each input causes.

`feed(task, input, now_us)` returns the task's new row and the effects to carry out, in one transaction; it does nothing
itself. All services and the command line change tasks only through it.

    none -> scheduled -> queued -> running -> success | failed | skipped
                 ^                    |
                 +---- deferred <-----+
                 +-- up_for_retry <---+          none -> skipped | upstream_failed, as the upstream tasks decide

    scheduled -> deferred -> success | failed | skipped | up_for_retry, if a trigger starts and ends it
    queued -> failed | up_for_retry, if no worker has the file of its DAG
    running | deferred -> ending -> none | success | failed | skipped, as a user decides

A trigger that streams its events lives on when one of them resumes its task. The attempt handles what arrives, and
leaves its worker when nothing does:

    deferred -> scheduled -> queued -> running -> deferred, or scheduled if an event has arrived meanwhile

A mapped task as a whole has no attempt; it is `mapped` while its elements, which are tasks of their own, run:

    none -> mapped -> success | failed | upstream_failed | skipped -> mapped, when an element runs again
            mapped -> ending -> none | an outcome, as a user decides, once all its elements have ended

A unit of a mapped group stands for all tasks of the group with one index. Users clear and mark those tasks, not it:

    none -> mapped -> success | failed | upstream_failed | skipped | removed -> none, when one of its tasks is cleared

A generator whose values are stored far enough ahead waits at its `yield`. Its attempt is the same one all the time, so
the task stays `running` in the same epoch; `TaskRow.block` says how far the wait is:

    none -> full -> ready -> admitted -> none

It holds no slots until it is admitted again, and every input that ends a running attempt ends a waiting one, too.

A task that a user clears, marks or cancels while its attempt runs is `ending` until the attempt is gone: the process
with its `finally` and `on_kill`, or the trigger with its cleanup, or both if an attempt handles a stream. Only then may
the next attempt begin, or successors start, so that the old attempt's cleanup cannot hit their work:

    running -> ending (held by the worker) -> ending (held by the triggerer) -> none | success | failed | skipped

Events of a stream that no attempt has handled stay for the next try if nothing else can deliver them again. A mark and
a cancelled run discard them.

Invariants:
1. Every change raises the epoch by one, except those of `block` and the note that a trigger has cleaned up. Every
   report carries the epoch it was issued; a stale epoch changes nothing. The answer tells the sender whether it is too
   late (`Fenced`) or has sent the report before (`Already`).
2. A trigger exists exactly while its task is deferred, or from a deferral that streams until the try is over. A session
   holds a task exactly while it is running or ending.
3. Successors are informed of every change of the outcome, once: the last outcome they were told is the task's. A
   mapped task tells each kind of outcome that its elements have, and its end.
4. A try that was lost with its worker, or deferred, uses up no retry.
5. The deadline of a try is counted from its first start, across deferrals and queues, without the time that it waited
   at a `yield`.
6. A user's clear or mark takes effect only once nothing of the old attempt runs, neither process nor trigger, or its
   session is dead, or its trigger is overdue.
7. `block` is set only while an attempt is running or ending.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

from tidemill.core.tasks.dependencies import TOLD, Readiness, TaskOutcome, Told
from tidemill.core.tasks.endings import Failure, Success
from tidemill.core.tasks.inputs import (
    Admit,
    Blocked,
    CallbackKind,
    Cancel,
    Channel,
    Claim,
    CleanedUp,
    Clear,
    ClearXComs,
    Deferred,
    DiscardEvents,
    Due,
    Effect,
    EndAttempt,
    Ended,
    Failed,
    FileMissing,
    Input,
    Lost,
    MakeTrigger,
    MapTold,
    Mark,
    OpenMap,
    Ready,
    Remove,
    ResetMap,
    Returned,
    Ring,
    RunCallback,
    Skipped,
    StartInTrigger,
    StopMap,
    StopTrigger,
    StoreXComs,
    StreamIdle,
    StreamReady,
    Succeeded,
    TellSuccessors,
    TriggerEnded,
    TriggerFailed,
    TriggerFired,
    TriggerStopReason,
    Unblocked,
    WentOn,
    identify,
    name_input,
)
from tidemill.core.tasks.task_row import (
    ENDED,
    STATES,
    BlockPhase,
    TaskBlock,
    TaskEnding,
    TaskResume,
    TaskRow,
    TaskState,
    TaskStream,
)

#: How many times a try may be lost with its worker before that counts as a failure of the try.
MAX_LOST = 5
#: The longest wait for the cleanup of a task's old trigger. The triggerer reports it within
#: `worker.term_grace_seconds`, unless the triggerer never learnt that it had claimed the trigger.
MAX_CLEANUP_US = 60_000_000

_CALLBACKS = {
    TaskOutcome.SUCCESS: CallbackKind.SUCCESS,
    TaskOutcome.FAILED: CallbackKind.FAILURE,
    TaskOutcome.UPSTREAM_FAILED: CallbackKind.FAILURE,
    TaskOutcome.SKIPPED: CallbackKind.SKIPPED,
}


class Moved(NamedTuple):
    """The task changes to `task`, and the effects are carried out."""

    task: TaskRow
    effects: tuple[Effect, ...]


@dataclass(frozen=True, slots=True)
class Already:
    """The same report was received and stored before; its answer was lost."""


@dataclass(frozen=True, slots=True)
class Fenced:
    """The report carries a stale epoch; the sender must stop."""


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
    resume: TaskResume | None
    ending: TaskEnding | None
    block: TaskBlock | None
    stream: TaskStream | None


_RING_SCHEDULER, _RING_WORKER, _RING_TRIGGERER = Ring(Channel.SCHEDULER), Ring(Channel.WORKER), Ring(Channel.TRIGGERER)


def feed(task: TaskRow, given: Input, now_us: int, left: str | None = None) -> Answer:
    """Return the answer to an input.

    Args:
        task: The task as it is stored, and locked.
        given: The input.
        now_us: The database's time, in UTC microseconds.
        left: The input by which the task left the epoch of `given`, as recorded in the journal (`identify`); None:
            none.
    """
    if given.epoch is not None and given.epoch != task.epoch:
        return Already() if given.epoch < task.epoch and left == identify(given) else Fenced()
    # The most frequent inputs come first.
    match given:
        case Ready() | Admit() | Claim() | Due() | FileMissing():
            return _decide_waiting(task, given, now_us)
        case Succeeded() | Failed() | Skipped() | Deferred() | StreamIdle() | Lost() | Returned() | Ended():
            return _decide_attempt(task, given, now_us)
        case CleanedUp():
            return _forget_trigger(task, given)
        case Blocked() | Unblocked() | WentOn():
            return _decide_block(task, given, now_us)
        case TriggerFired() | TriggerEnded() | TriggerFailed() | StreamReady():
            return _decide_trigger(task, given, now_us)
        case MapTold(told=told):
            return _decide_map(task, given, told)
        case _:
            return _decide_user(task, given, now_us)


def order_elements(task: TaskRow) -> Mark | Remove | None:
    """Return the input that ends the open elements of a mapped task that is ending; None: its run ends them."""
    if task.ending is None or task.ending.state is TaskState.MAPPED:
        return None
    return Remove() if task.ending.state is TaskState.NONE else Mark(TaskOutcome(task.ending.state.value))


def _refuse(task: TaskRow, given: Input) -> Refused:
    return Refused(f"the task is {task.state.value}, so {name_input(given)} does not apply")


def _move(
    task: TaskRow,
    state: TaskState,
    *effects: Effect | None,
    session: int | None = None,
    told: Told | None = None,
    stop: TriggerStopReason = TriggerStopReason.DONE,
    **changes: Unpack[_Changes],
) -> Moved:
    """Return the task in another state, with the effects that every change has.

    Args:
        task: The task.
        state: Its new state.
        effects: Its other effects.
        session: The session that holds it.
        told: The part of a mapped task in the tallies of its successors.
        stop: Why its trigger is stopped, if it has one and does not keep it.
        changes: Other changes of its row.
    """
    changes.setdefault("block", None)
    moved = task._replace(state=state, epoch=task.epoch + 1, session=session, told=told, **changes)
    all_effects = [effect for effect in effects if effect is not None]
    if task.trigger is not None and moved.trigger is None:
        all_effects.insert(0, StopTrigger(stop))
    before, after = task.tells, moved.tells
    if after != before:
        all_effects += (TellSuccessors(before, after), _RING_SCHEDULER)
    return Moved(moved, tuple(all_effects))


def _end(
    task: TaskRow,
    outcome: TaskOutcome,
    *effects: Effect | None,
    error: str | None = None,
    stop: TriggerStopReason = TriggerStopReason.DONE,
) -> Moved:
    """End the task, and run its callback if the task was started."""
    callback = RunCallback(_CALLBACKS[outcome], error) if task.started else None
    over: _Changes = {"due_us": None, "deadline_us": None, "resume": None, "ending": None, "stream": None}
    return _move(task, STATES[outcome], *effects, callback, stop=stop, **over)


def _fail(
    task: TaskRow,
    error: str,
    now_us: int,
    bits: int,
    *effects: Effect,
    may_retry: bool = True,
    soft: bool = False,
    stop: TriggerStopReason = TriggerStopReason.FAILED,
) -> Moved:
    """End the try. Then another try follows, the task fails, or it is skipped instead (`soft`)."""
    if soft and task.policy.soft_fail:
        return _end(task, TaskOutcome.SKIPPED, *effects, error=error, stop=stop)
    if not may_retry or task.tries >= task.max_tries:
        return _end(task, TaskOutcome.FAILED, *effects, error=error, stop=stop)
    due_us = now_us + task.policy.compute_delay(task.tries, bits)
    told = (*effects, RunCallback(CallbackKind.RETRY, error), _RING_SCHEDULER)
    over: _Changes = {"due_us": due_us, "deadline_us": None, "resume": None, "lost": 0, "stream": None}
    return _move(task, TaskState.UP_FOR_RETRY, *told, stop=stop, **over)


def _decide_waiting(task: TaskRow, given: Ready | Admit | Claim | Due | FileMissing, now_us: int) -> Answer:
    match given:
        case Claim(session=session):
            if task.state is TaskState.QUEUED:
                return _start(task, session, now_us)
        case Admit(start=start):
            if task.state is TaskState.SCHEDULED and start is not None and task.resume is None:
                return _start_in_trigger(task, start, now_us)
            if task.state is TaskState.SCHEDULED:
                return _move(task, TaskState.QUEUED, _RING_WORKER)
            return _decide_block(task, given, now_us)
        case Ready(readiness=readiness):
            if task.state is TaskState.NONE and readiness is not Readiness.WAIT:
                return _decide_ready(task, readiness)
        case FileMissing(error=error, bits=bits):
            if task.state is TaskState.QUEUED:
                # The try counts, so that the retries of the task come to an end.
                tries = task.tries + (task.resume is None and not task.lost)
                return _fail(task._replace(tries=tries), error, now_us, bits)
        case _:
            return _decide_due(task, given, now_us)
    return _refuse(task, given)


def _decide_ready(task: TaskRow, readiness: Readiness) -> Moved:
    if readiness is Readiness.RUN:
        if task.policy.is_map:
            return _move(task, TaskState.MAPPED, OpenMap(), _RING_SCHEDULER)
        if task.policy.is_unit:
            return _move(task, TaskState.MAPPED)
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER)
    return _end(task, TaskOutcome.SKIPPED if readiness is Readiness.SKIP else TaskOutcome.UPSTREAM_FAILED)


def _start(task: TaskRow, session: int, now_us: int) -> Moved:
    """Begin the attempt of a new try, or of a try that was deferred or lost."""
    if task.resume is not None or task.lost:
        return _move(task, TaskState.RUNNING, session=session)
    cleared, deadline_us = _begin_try(task, now_us)
    return _move(task, TaskState.RUNNING, cleared, session=session, tries=task.tries + 1, deadline_us=deadline_us)


def _start_in_trigger(task: TaskRow, start: StartInTrigger, now_us: int) -> Moved:
    """Begin a new try as a deferral, without a worker."""
    cleared, deadline_us = _begin_try(task, now_us)
    task = task._replace(tries=task.tries + 1, deadline_us=deadline_us)
    resume = TaskResume(start.method, start.kwargs)
    moved, effects = _defer(task, start.trigger, resume, start.timeout_us, now_us, cleared)
    stream = TaskStream(moved.epoch, moved.due_us) if start.streams else None
    return Moved(moved._replace(stream=stream), effects)


def _begin_try(task: TaskRow, now_us: int) -> tuple[ClearXComs | None, int | None]:
    """Return the effect of a new try on the XComs of the last one, and its deadline."""
    timeout_us = task.policy.execution_timeout_us
    return ClearXComs() if task.tries else None, None if timeout_us is None else now_us + timeout_us


def _defer(
    task: TaskRow, trigger: str, resume: TaskResume, timeout_us: int | None, now_us: int, *effects: Effect | None
) -> Moved:
    due_us = None if timeout_us is None else now_us + timeout_us
    told = (MakeTrigger(task.epoch + 1, trigger), _RING_TRIGGERER, _RING_SCHEDULER)
    # The trigger of an earlier deferral of the try, if it streamed, is replaced by this one.
    old = None if task.stream is None else StopTrigger(TriggerStopReason.DONE)
    changes: _Changes = {"due_us": due_us, "lost": 0, "resume": resume, "stream": None}
    return _move(task, TaskState.DEFERRED, *effects, old, *told, **changes)


def _defer_stream(task: TaskRow, given: Deferred, now_us: int) -> Moved:
    """Wait for the first event of a trigger that lives until the try is over."""
    moved, effects = _defer(task, given.trigger, TaskResume(given.method, given.kwargs), given.timeout_us, now_us)
    stream = TaskStream(moved.epoch, moved.due_us)
    return Moved(moved._replace(stream=stream, due_us=_find_wait(stream, given.idle_us, now_us)), effects)


def _find_wait(stream: TaskStream, idle_us: int | None, now_us: int) -> int | None:
    """Return when the next event of a stream is too late."""
    limits = [limit for limit in (stream.due_us, None if idle_us is None else now_us + idle_us) if limit is not None]
    return min(limits, default=None)


def _leave_worker(task: TaskRow, stream: TaskStream, given: StreamIdle, now_us: int) -> Moved:
    """Wait for the next event of the stream without a worker, or be resumed by one that has arrived."""
    if given.ready and given.pause_us is None:
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER, due_us=stream.due_us, lost=0)
    paused = given.pause_us is not None
    due_us = _find_wait(stream, given.pause_us if paused else given.idle_us, now_us)
    stream = stream._replace(paused=paused)
    return _move(task, TaskState.DEFERRED, _RING_SCHEDULER, due_us=due_us, lost=0, stream=stream)


def _decide_due(task: TaskRow, given: Due, now_us: int) -> Answer:
    due_us = task.next_due_us
    if due_us is None or now_us < due_us:
        return Refused(f"the task is {task.state.value}, and nothing is due")
    if task.state is TaskState.UP_FOR_RETRY:
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER, due_us=None)
    if task.ending is not None:
        return _become(task, task.ending) if task.ending.triggerer is None else _forget_trigger(task, given)
    stop = TriggerStopReason.TIMEOUT
    if task.deadline_us is not None and now_us >= task.deadline_us:
        said = "TaskTimeout: the task took longer than its execution_timeout"
        return _fail(task, said, now_us, given.bits, stop=stop)
    if task.stream is not None and task.stream.paused and now_us < (task.stream.due_us or now_us + 1):
        return _resume_stream(task, task.stream)
    is_sensor = task.policy.is_sensor
    name, whose = ("SensorTimeout", "sensor") if is_sensor else ("TaskDeferralTimeout", "deferral")
    error = f"{name}: the trigger did not fire before the timeout of the {whose}"
    return _fail(task, error, now_us, given.bits, may_retry=not is_sensor, soft=True, stop=stop)


def _decide_attempt(
    task: TaskRow, given: Succeeded | Failed | Skipped | Deferred | StreamIdle | Lost | Returned | Ended, now_us: int
) -> Answer:
    """Process a report from, or about, the attempt that is running or ending."""
    if task.ending is not None and isinstance(given, (Ended, Lost, Returned)) and not task.policy.is_map:
        if task.ending.triggerer is None:
            return _become(task, task.ending)
        ending = task.ending._replace(triggerer=None)
        return _move(task, TaskState.ENDING, session=task.ending.triggerer, ending=ending)
    if task.state is not TaskState.RUNNING:
        return _refuse(task, given)
    match given:
        case Succeeded(xcoms=xcoms):
            return _end(task, TaskOutcome.SUCCESS, StoreXComs(xcoms) if xcoms else None)
        case Skipped():
            return _end(task, TaskOutcome.SKIPPED)
        case Failed(error=error, may_retry=may_retry, bits=bits):
            return _fail(task, error, now_us, bits, may_retry=may_retry)
        case Deferred(streams=True):
            return _defer_stream(task, given, now_us)
        case StreamIdle() if task.stream is not None:
            return _leave_worker(task, task.stream, given, now_us)
        case Deferred():
            task = task._replace(deadline_us=_find_deadline(task, now_us))
            return _defer(task, given.trigger, TaskResume(given.method, given.kwargs), given.timeout_us, now_us)
        case Lost(bits=bits):
            if task.lost >= MAX_LOST:
                return _fail(task, f"the task was lost with its worker {MAX_LOST + 1} times", now_us, bits)
            deadline_us = _find_deadline(task, now_us)
            return _move(task, TaskState.QUEUED, _RING_WORKER, lost=task.lost + 1, deadline_us=deadline_us)
        case Returned():
            # At least 1 continues the try; more would count towards the limit.
            deadline_us = _find_deadline(task, now_us)
            return _move(task, TaskState.QUEUED, _RING_WORKER, lost=max(task.lost, 1), deadline_us=deadline_us)
        case _:
            return _refuse(task, given)


def _forget_trigger(task: TaskRow, given: CleanedUp | Due) -> Answer:
    """Wait only for the process of an attempt that is ending; its epoch and session stay."""
    if task.ending is None or task.ending.triggerer is None:
        return _refuse(task, given)
    return Moved(task._replace(due_us=None, ending=task.ending._replace(triggerer=None)), ())


def _decide_block(task: TaskRow, given: Blocked | Unblocked | Admit | WentOn, now_us: int) -> Answer:
    """Apply what is said of the wait of a running attempt; neither its epoch nor its session changes."""
    if task.state is not TaskState.RUNNING:
        return _refuse(task, given)
    match given, task.block:
        case Blocked(), None:
            return Moved(task._replace(block=TaskBlock(BlockPhase.FULL, now_us)), (_RING_SCHEDULER,))
        case Unblocked(), TaskBlock(BlockPhase.FULL, since_us):
            return Moved(task._replace(block=TaskBlock(BlockPhase.READY, since_us)), (_RING_SCHEDULER,))
        case Admit(), TaskBlock(BlockPhase.READY, since_us):
            return Moved(task._replace(block=TaskBlock(BlockPhase.ADMITTED, since_us)), (_RING_WORKER,))
        case WentOn(), TaskBlock(BlockPhase.ADMITTED, _):
            return Moved(task._replace(block=None, deadline_us=_find_deadline(task, now_us)), ())
    return _refuse(task, given)


def _find_deadline(task: TaskRow, now_us: int) -> int | None:
    """Return the deadline of a running attempt, moved by the time that it has waited at its `yield`."""
    if task.deadline_us is None or task.block is None:
        return task.deadline_us
    return task.deadline_us + now_us - task.block.since_us


def _decide_trigger(
    task: TaskRow, given: TriggerFired | TriggerEnded | TriggerFailed | StreamReady, now_us: int
) -> Answer:
    if task.state is not TaskState.DEFERRED or task.resume is None:
        return _refuse(task, given)
    if isinstance(given, StreamReady):
        if task.stream is None or task.stream.paused:
            return _refuse(task, given)
        return _resume_stream(task, task.stream)
    # Attempts handle the end of a stream, too, unless its events go to maps.
    if task.stream is not None and isinstance(given, TriggerFired):
        return _refuse(task, given)
    if isinstance(given, TriggerEnded):
        return _end_by_trigger(task, given, now_us)
    if isinstance(given, TriggerFired):
        resume = task.resume._replace(payload=given.payload)
        return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER, due_us=None, resume=resume)
    # The format of a Python error: the traceback, then the name and message, which lists show.
    trace, newline, said = given.error.rstrip().rpartition("\n")
    error = f"{trace}{newline}TaskDeferralError: {said}"
    return _fail(task, error, now_us, given.bits, soft=True)


def _end_by_trigger(task: TaskRow, given: TriggerEnded, now_us: int) -> Moved:
    """End the task, or its try, as an event of its trigger says."""
    effects: tuple[Effect, ...] = (StoreXComs(given.xcoms),) if given.xcoms else ()
    ending, done = given.ending, TriggerStopReason.DONE
    if isinstance(ending, Failure):
        return _fail(task, ending.error, now_us, given.bits, *effects, may_retry=ending.may_retry, soft=True, stop=done)
    return _end(task, TaskOutcome.SUCCESS if isinstance(ending, Success) else TaskOutcome.SKIPPED, *effects)


def _resume_stream(task: TaskRow, stream: TaskStream) -> Moved:
    stream = stream._replace(paused=False)
    return _move(task, TaskState.SCHEDULED, _RING_SCHEDULER, due_us=stream.due_us, stream=stream)


def _decide_map(task: TaskRow, given: MapTold, told: Told) -> Answer:
    """Apply what the elements of a mapped task, or the tasks of a unit, have become."""
    if task.policy.is_unit:
        if task.state is TaskState.NONE or not told.done or told == task.tells:
            return _refuse(task, given)
        return _move(task, STATES[told.outcome] if told.kinds else TaskState.REMOVED)
    if task.ending is not None and told.done and task.policy.is_map:
        if task.ending.state is not TaskState.MAPPED:
            return _become(task, task.ending)
    elif not task.policy.is_map or told == task.tells or (task.state is not TaskState.MAPPED and not task.outcome):
        return _refuse(task, given)
    outcome = told.outcome if told.done else None
    state = TaskState.MAPPED if outcome is None else STATES[outcome]
    return _move(task, state, told=None if told == TOLD[outcome] else told, ending=None)


def _decide_user(task: TaskRow, given: Clear | Mark | Cancel | Remove, now_us: int) -> Answer:
    """Apply a user's decision in any state, once no part of the task is still running."""
    decided = task.state if task.ending is None else task.ending.state
    if task.policy.is_unit and not (isinstance(given, Clear) and decided in ENDED):
        return _refuse(task, given)
    match given:
        case Clear():
            if decided is TaskState.NONE:
                return _refuse(task, given)
            wanted, max_tries = TaskEnding(TaskState.NONE), task.tries + task.policy.retries + 1
            task = task._replace(tries_before=task.tries, max_tries=max_tries, lost=0, deadline_us=None, resume=None)
        case Mark(outcome=outcome):
            if decided in (STATES[outcome], TaskState.REMOVED):
                return _refuse(task, given)
            wanted = TaskEnding(STATES[outcome], "marked by a user")
        case Remove():
            if decided is TaskState.REMOVED or task.policy.is_map:
                return _refuse(task, given)
            wanted = TaskEnding(TaskState.REMOVED)
        case _:
            if decided in ENDED or (task.ending is not None and decided is TaskState.MAPPED):
                return _refuse(task, given)
            wanted = _cancel(task)
    return _end_first(task, wanted, given.triggerer, now_us)


def _cancel(task: TaskRow) -> TaskEnding:
    error = "the run was cancelled"
    if task.policy.is_map and task.state is not TaskState.NONE:
        return TaskEnding(TaskState.MAPPED, error)
    # A task that waits for its first try has not started; a task between two tries has.
    return TaskEnding(TaskState.FAILED if task.started else TaskState.SKIPPED, error)


def _end_first(task: TaskRow, wanted: TaskEnding, triggerer: int | None, now_us: int) -> Moved:
    """End the running attempt of a task before the user's decision takes effect."""
    if task.state is TaskState.MAPPED or (task.ending is not None and task.policy.is_map):
        return _move(task, TaskState.ENDING, StopMap(), _RING_SCHEDULER, told=task.told, ending=wanted)
    effects: tuple[Effect, ...] = ()
    # The time limit of a stream ends with it; an attempt has any time for its cleanup.
    session, due_us, cleans_up = task.session, None, None
    if task.ending is not None:
        due_us, cleans_up = task.due_us, task.ending.triggerer
    if task.trigger is not None:
        effects = (_RING_TRIGGERER,)
        if triggerer is not None:
            due_us = now_us + MAX_CLEANUP_US
        if session is None:
            session = triggerer
        else:
            cleans_up = triggerer
    if task.session is not None and task.ending is None:
        effects = (*effects, EndAttempt(task.session), _RING_WORKER)
    if session is None:
        return _become(task, wanted, *effects)
    changes: _Changes = {
        "due_us": due_us,
        "deadline_us": None,
        "resume": None,
        "ending": wanted._replace(triggerer=cleans_up),
        "block": task.block,  # it has no slots for its cleanup either
        "stream": None,
    }
    return _move(task, TaskState.ENDING, *effects, session=session, stop=TriggerStopReason.USER, **changes)


def _become(task: TaskRow, wanted: TaskEnding, *effects: Effect) -> Moved:
    """Apply a user's decision to a task without a running attempt."""
    stop = TriggerStopReason.USER
    if wanted.state is TaskState.NONE:
        reset = ResetMap() if task.policy.is_map else None
        cleared: _Changes = {"due_us": None, "ending": None, "stream": None}
        return _move(task, TaskState.NONE, *effects, ClearXComs(), reset, _RING_SCHEDULER, stop=stop, **cleared)
    if wanted.state is TaskState.REMOVED:
        gone: _Changes = {"due_us": None, "deadline_us": None, "resume": None, "ending": None, "stream": None}
        return _move(task, TaskState.REMOVED, *effects, ClearXComs(), stop=stop, **gone)
    # A task that never began a try has no stream.
    discard = DiscardEvents(wanted.error or "") if task.tries and not task.policy.is_map else None
    return _end(task, TaskOutcome(wanted.state.value), *effects, discard, error=wanted.error, stop=stop)
