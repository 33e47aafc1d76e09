"""The calls of workers: what their attempts ended with, and what they run next.

Invariants: a turn may be repeated with the same number if its answer was lost, and gets the same attempts again. Times
are UTC microseconds since the epoch; values of users are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from tidemill.store.calls.call import Call


class OutcomeKind(enum.StrEnum):
    """What became of a report.

    MOVED: it is stored. ALREADY: it had been stored. FENCED: the task has moved on, and the attempt does not count.
    REFUSED: it does not apply.
    """

    MOVED = "moved"
    ALREADY = "already"
    FENCED = "fenced"
    REFUSED = "refused"


#: The parts of a log are numbered from the epoch of the attempt, or the number of the callback, times this.
PART_BASE: Final = 1 << 20


class LogPart(msgspec.Struct, frozen=True):
    """A piece of the log of a try.

    Attributes:
        task: The task.
        try_number: Which try, from 1; 0 for the log of its callbacks.
        number: The number of the part, from 0; a part that is stored already is not stored again.
        first_us: When its first line was written.
        data: The lines, compressed with zlib.
        lines: How many lines it has.
        last: Whether no other part follows in this attempt.
    """

    task: int
    try_number: int
    number: int
    first_us: int
    data: bytes
    lines: int
    last: bool = False


class Success(msgspec.Struct, frozen=True, tag=True):
    """The attempt returned."""


class Failure(msgspec.Struct, frozen=True, tag=True):
    """The attempt failed.

    Attributes:
        error: What happened, for people.
        may_retry: Whether its retries apply.
        origin: The class and the places of the exception, for callbacks; None: there was none.
    """

    error: str
    may_retry: bool = True
    origin: str | None = None


class Skip(msgspec.Struct, frozen=True, tag=True):
    """The attempt skipped its task."""


class Deferral(msgspec.Struct, frozen=True, tag=True):
    """The attempt handed itself to a trigger.

    Attributes:
        classpath: Where the class of the trigger is imported from.
        kwargs: Its arguments, encoded.
        method: The method of the operator that continues.
        method_kwargs: The arguments of that method, encoded.
        timeout_us: How long the trigger may take; None: any time.
        stream_key: The key of the stream that the trigger shares, as text; None: it shares none.
        queue: Which triggerers may run it.
    """

    classpath: str
    kwargs: str
    method: str
    method_kwargs: str = "{}"
    timeout_us: int | None = None
    stream_key: str | None = None
    queue: str = "default"


class Loss(msgspec.Struct, frozen=True, tag=True):
    """The attempt was lost, or is given back: it is queued again, and uses up no retry."""


Result = Success | Failure | Skip | Deferral | Loss


class Report(msgspec.Struct, frozen=True):
    """How an attempt ended.

    Attributes:
        task: The task.
        epoch: The epoch of the attempt, from its claim.
        result: How it ended.
        xcoms: Keys and encoded values: what was returned and pushed. Stored only with `Success`.
        skip: The tasks directly downstream that the attempt skips (`.branch`).
        skip_all_downstream: Whether it skips all tasks downstream but teardowns (`.short_circuit`).
        log_end: The last part of its log.
        request: Identifies the report if an attempt could report twice; empty: its epoch does.
    """

    task: int
    epoch: int
    result: Result
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    log_end: LogPart | None = None
    request: str = ""


class CallbackReport(msgspec.Struct, frozen=True):
    """A callback has ended. `error`: the traceback, if it raised; `lost`: it was not run, and may be run again."""

    id: int
    error: str | None = None
    lost: bool = False
    log_end: LogPart | None = None


class ReportOutcome(msgspec.Struct, frozen=True):
    """What became of a report. `reason`: why it was refused."""

    task: int
    kind: OutcomeKind
    reason: str = ""


class ResumeWith(msgspec.Struct, frozen=True):
    """How an attempt continues: the method, its encoded arguments, and the encoded event."""

    method: str
    kwargs: str
    payload: str


class ClaimedCallback(msgspec.Struct, frozen=True):
    """A callback of the user that is to be run.

    Attributes:
        id: Its number, for `CallbackReport`.
        name: `on_success`, `on_failure`, `on_retry` or `on_skipped`.
        error: What made the task or the run fail.
        ended_us: When the task, or the run, became what the callback is for.
        run_state: The state of the run.
        run_ended_us: When the run ended; None: it has not.
        started_us: When the try began; None: it is a callback of the run, or it never did.
        origin: The class and the places of the exception; None: there was none.
    """

    id: int
    name: str
    error: str | None
    ended_us: int
    run_state: str
    run_ended_us: int | None = None
    started_us: int | None = None
    origin: str | None = None


class ClaimedAttempt(msgspec.Struct, frozen=True):
    """What a worker runs now: an attempt of a task, or a callback.

    Attributes:
        task: The task; 0: a callback of the run as a whole.
        epoch: The fencing token. A callback speaks for nothing: it has the epoch of the change that caused it.
        run: The run, in the store.
        dag_id: The DAG.
        run_id: The run, by its name.
        task_id: The task, by its name.
        map_index: -1: it is not mapped.
        try_number: Which try, from 1.
        max_tries: After how many tries a failure is final.
        file: The file of the DAG, relative to the folder.
        queue: The queue that it was taken from.
        operator: The name of its class, for people.
        run_kind: `manual`, `scheduled` or `dev`.
        run_started_us: When the run began.
        logical_us: The logical date of the run; None: it has none.
        interval_start_us: The data interval of the run.
        interval_end_us: Likewise.
        conf: The run's configuration, encoded.
        params: The parameters of the run, encoded: the defaults of the DAG with `conf` over them.
        deadline_us: When the try has taken too long.
        resume: How it continues after a deferral; None: from the beginning.
        callback: Which callback is to be run; None: the attempt itself.
    """

    task: int
    epoch: int
    run: int
    dag_id: str
    run_id: str
    task_id: str
    map_index: int
    try_number: int
    max_tries: int
    file: str
    queue: str
    operator: str
    run_kind: str
    run_started_us: int
    logical_us: int | None
    interval_start_us: int | None
    interval_end_us: int | None
    conf: str
    params: str
    deadline_us: int | None = None
    resume: ResumeWith | None = None
    callback: ClaimedCallback | None = None


class WorkerAnswer(msgspec.Struct, frozen=True):
    """The answer to a turn.

    Attributes:
        outcomes: What became of each report, in order.
        claimed: What is to be run now.
        end: The attempts of `WorkerTurn.held` that have been replaced, and are to be ended: task and epoch.
        now_us: What the clock of the store says, for the deadlines.
    """

    outcomes: tuple[ReportOutcome, ...]
    claimed: tuple[ClaimedAttempt, ...]
    end: tuple[tuple[int, int], ...]
    now_us: int


class WorkerTurn(Call[WorkerAnswer], frozen=True):
    """Report what ended, and claim what is next, in one transaction; one turn at a time.

    A service that has been ended gets a `CallRefusedError` (FENCED), and stops.

    Attributes:
        service: The worker.
        request: The number of this turn; the same again if the answer was lost.
        reports: The attempts that ended.
        callbacks: The callbacks that ended.
        held: All attempts that it runs besides, as task and epoch: it is told which of them to end.
        capacity: How many attempts it can take.
        queues: The queues that it takes them from.
    """

    service: int
    request: int
    reports: tuple[Report, ...] = ()
    callbacks: tuple[CallbackReport, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    capacity: int = 0
    queues: tuple[str, ...] = ("default",)
