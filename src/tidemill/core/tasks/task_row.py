"""The part of a task's row that its life depends on: its state, its author's policy, and its deadlines."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.core.tasks.dependencies import REMOVED, TOLD, TaskOutcome, Told


class TaskState(enum.StrEnum):
    """The state of a task instance.

    MAPPED: the elements of the mapped task, or the tasks of the unit of a mapped group, decide its outcome; it has no
    attempt itself. REMOVED: the source of the
    mapped task no longer has an item for this element.
    """

    NONE = "none"
    SCHEDULED = "scheduled"
    QUEUED = "queued"
    RUNNING = "running"
    DEFERRED = "deferred"
    UP_FOR_RETRY = "up_for_retry"
    ENDING = "ending"
    MAPPED = "mapped"
    SUCCESS = "success"
    FAILED = "failed"
    SKIPPED = "skipped"
    UPSTREAM_FAILED = "upstream_failed"
    REMOVED = "removed"


#: The terminal states, by outcome; a removed element has none.
STATES = {outcome: TaskState(outcome.value) for outcome in TaskOutcome}
#: All terminal states.
ENDED = frozenset((*STATES.values(), TaskState.REMOVED))
_OUTCOMES = {state: outcome for outcome, state in STATES.items()}


@dataclass(frozen=True, slots=True)
class Policy:
    """The decisions of a task's author.

    Attributes:
        retries: The number of tries that may follow the first one.
        retry_delay_us: The pause before a retry, in microseconds.
        exponential: Whether each pause is about twice as long as the previous one, randomised by a factor of up to two;
            the first is at least `retry_delay_us`.
        max_retry_delay_us: The longest pause.
        execution_timeout_us: How long a try may take, from its first start; None: no limit.
        soft_fail: Whether the sensor is skipped instead of failed if its trigger fails or is too late.
        is_sensor: Whether it is a sensor, which fails without retries when its trigger is too late.
        is_map: Whether it is a whole mapped task, whose elements decide its outcome; an element itself is a plain task.
        is_unit: Whether it is a unit of a mapped group, that is, stands for all tasks of the group with its index.
    """

    retries: int = 0
    retry_delay_us: int = 300_000_000
    exponential: bool = False
    max_retry_delay_us: int = 86_400_000_000
    execution_timeout_us: int | None = None
    soft_fail: bool = False
    is_sensor: bool = False
    is_map: bool = False
    is_unit: bool = False

    def compute_delay(self, tries: int, bits: int) -> int:
        """Return the pause in microseconds after try number `tries` (from 1) failed."""
        if not self.exponential:
            return min(self.retry_delay_us, self.max_retry_delay_us)
        bound = Backoff(self.retry_delay_us, self.max_retry_delay_us).compute_bound(tries + 1)
        pause = max(self.retry_delay_us, int(bound * (0.5 + bits / (2 << JITTER_BITS))))
        return min(pause, self.max_retry_delay_us)


class TaskResume(NamedTuple):
    """How an attempt continues after a deferral. `payload`: the encoded event."""

    method: str
    kwargs: str
    payload: str | None = None


class TaskStream(NamedTuple):
    """The trigger of a try that streams; it lives until its end is handled, or the try is over.

    Attributes:
        epoch: The epoch of the deferral that made it.
        due_us: When the stream is too late; None: never.
        paused: Whether the task takes no event before its `due_us`.
    """

    epoch: int
    due_us: int | None = None
    paused: bool = False


class TaskEnding(NamedTuple):
    """The transition of a task once its ended attempt, or all elements of a mapped task, have exited.

    Attributes:
        state: The state that follows. NONE: it runs again; MAPPED: the elements of the mapped task decide.
        error: The reason, for users.
        triggerer: The session that ends the trigger of a stream, while a worker ends the attempt; None: only one of
            them is left.
    """

    state: TaskState
    error: str | None = None
    triggerer: int | None = None


class BlockPhase(enum.IntEnum):
    """The progress of a running attempt that waits at its `yield`, because enough of what it yielded is stored ahead.

    FULL: its elements have to take some of it first. READY: they have; it waits for slots of its pool. ADMITTED: it
    has these again, and waits for a slot of its worker.
    """

    FULL = 1
    READY = 2
    ADMITTED = 3


class TaskBlock(NamedTuple):
    """The wait of a running attempt. `since_us`: when it began; that time does not count in its deadline."""

    phase: BlockPhase
    since_us: int


class TaskRow(NamedTuple):
    """The part of a task instance that its life depends on; a tuple, because one is created with every change.

    Attributes:
        policy: The decisions of its author.
        state: Its state.
        epoch: The number of changes of its state.
        tries: The number of tries that have begun.
        tries_before: The number of tries that had begun when a user last cleared the task.
        max_tries: The number of tries after which a failure is final.
        session: The worker's session that runs it, or the session that ends its process or trigger.
        lost: How many times this try was lost with its worker; at least 1 if a worker returned it.
        deadline_us: When this try times out.
        due_us: When a retry begins, when a trigger is too late, or when the wait for its cleanup ends.
        resume: How the next attempt, or the one that waits for its trigger, continues; None: from the beginning.
        ending: The state that follows; set exactly while it is ending.
        told: The part of a mapped task in the tallies of its successors, where its own outcome does not say it.
        block: The wait of a running attempt at its `yield`; kept while that attempt is ended.
        stream: The trigger of the try, if it streams its events.
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
    resume: TaskResume | None = None
    ending: TaskEnding | None = None
    told: Told | None = None
    block: TaskBlock | None = None
    stream: TaskStream | None = None

    @property
    def outcome(self) -> TaskOutcome | None:
        """The outcome; None if the task has not ended, or was removed."""
        return _OUTCOMES.get(self.state)

    @property
    def tells(self) -> Told:
        """The part of the task in the tallies of its successors."""
        if self.told is not None:
            return self.told
        return REMOVED if self.state is TaskState.REMOVED else TOLD[self.outcome]

    @property
    def trigger(self) -> int | None:
        """The epoch of the deferral that made the task's trigger; None: it has no trigger."""
        if self.stream is not None:
            return self.stream.epoch
        return self.epoch if self.state is TaskState.DEFERRED else None

    @property
    def started(self) -> bool:
        """Whether a try has begun since the task was created or cleared."""
        return self.tries > self.tries_before

    @property
    def next_due_us(self) -> int | None:
        """The time of the next `Due`, in UTC microseconds; None: only after another input."""
        due_us, deadline_us = self.due_us, self.deadline_us
        if self.state in (TaskState.UP_FOR_RETRY, TaskState.ENDING):
            return due_us
        if self.state not in (TaskState.SCHEDULED, TaskState.QUEUED, TaskState.DEFERRED):
            return None
        if due_us is None or deadline_us is None:
            return deadline_us if due_us is None else due_us
        return min(due_us, deadline_us)

    def holds_slots(self, include_deferred: bool = False) -> bool:
        """Return whether it counts in its pool. `include_deferred`: whether deferred tasks count."""
        if self.policy.is_map or (self.block is not None and self.block.phase is not BlockPhase.ADMITTED):
            return False
        return self.state in (TaskState.QUEUED, TaskState.RUNNING, TaskState.ENDING) or (
            include_deferred and self.state is TaskState.DEFERRED
        )
