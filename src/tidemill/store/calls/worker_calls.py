"""The calls of workers: report finished attempts and claim new ones.

Invariants: if the answer to a turn was lost, the worker repeats it with the same number and gets the same attempts.
Times are UTC microseconds since the epoch; user values are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import enum
from typing import Any, Final

import msgspec

from tidemill.core.tasks.endings import ENDINGS, AttemptEnding
from tidemill.store.calls.call import Call, answered_by


class OutcomeKind(enum.StrEnum):
    """The outcome of a report.

    MOVED: stored. ALREADY: stored before. FENCED: the epoch is stale, and the attempt does not count. REFUSED: the
    report does not apply. UNSTORED: the run is damaged and cannot be changed now; the worker sends the report again.
    """

    MOVED = "moved"
    ALREADY = "already"
    FENCED = "fenced"
    REFUSED = "refused"
    UNSTORED = "unstored"


#: Log parts of an attempt are numbered from its epoch times this; those of a callback from the callback's id times
#: this.
PART_BASE: Final = 1 << 20


class LogPart(msgspec.Struct, frozen=True):
    """A part of the log of a try.

    Attributes:
        task: The task.
        try_number: The try, from 1; 0 for the log of its callbacks.
        number: The number of the part, from 0; a part that is already stored is not stored again.
        first_us: When its first line was written.
        data: The lines, compressed with zlib.
        lines: The number of lines.
        last: Whether this is the last part of the attempt.
    """

    task: int
    try_number: int
    number: int
    first_us: int
    data: bytes
    lines: int
    last: bool = False


class AttemptReport(msgspec.Struct, frozen=True):
    """The result of an attempt.

    Attributes:
        task: The task.
        epoch: The epoch of the attempt, from its claim.
        result: How it ended.
        xcoms: Keys and encoded values, returned and pushed. Stored only with `Success`.
        skip: The directly downstream tasks that the attempt skips (`.branch`).
        skip_all_downstream: Whether it skips all downstream tasks except teardowns (`.short_circuit`).
        log_end: The last part of its log.
        request: Identifies the report if an attempt can report twice; empty: the epoch identifies it.
        map_index: The map index of the instance, from its claim; the ends of elements do not lock their run.
        label: The rendered `map_index_template` of an element; None keeps what it has.
    """

    task: int
    epoch: int
    result: AttemptEnding
    xcoms: tuple[tuple[str, str], ...] = ()
    skip: tuple[str, ...] = ()
    skip_all_downstream: bool = False
    log_end: LogPart | None = None
    request: str = ""
    map_index: int = -1
    label: str | None = None


def decode_ending(kind: type, value: Any) -> AttemptEnding:
    """Return the ending that a decoded message holds; a `dec_hook`, because msgspec cannot choose among dataclasses."""
    try:
        return msgspec.convert(value, ENDINGS[value["kind"]])
    except KeyError:
        raise ValueError("unknown kind of ending") from None


class CallbackReport(msgspec.Struct, frozen=True):
    """A callback ended.

    Attributes:
        id: Its row id.
        error: The traceback, if it raised.
        lost: Whether it did not run to its end, and may be run again.
        log_end: The last part of its log.
        returned: Whether it was not lost, but given back by the worker, which does not count as a loss.
    """

    id: int
    error: str | None = None
    lost: bool = False
    log_end: LogPart | None = None
    returned: bool = False


class AttemptReportOutcome(msgspec.Struct, frozen=True):
    """The outcome of a report. `reason`: why it was refused."""

    task: int
    kind: OutcomeKind
    reason: str = ""


class ResumeWith(msgspec.Struct, frozen=True):
    """The resume point of an attempt: the method, its encoded arguments, and the encoded event."""

    method: str
    kwargs: str
    payload: str


class EarlierStream(msgspec.Struct, frozen=True, array_like=True):
    """A stream of an earlier try with undelivered events; see `ClaimedStream`."""

    trigger: int
    handled: int
    kept: int


class ClaimedStream(msgspec.Struct, frozen=True):
    """The stream that an attempt handles.

    Attributes:
        trigger: The trigger; also the `trigger_run_id` of its events.
        handled: The number of events that are handled.
        kept: The number of batches that were kept.
        checkpoint: The encoded value that the task stored last; None: none.
        due_us: When the stream is too late; None: never.
        carried: The number of events of earlier streams that the task had to handle when the stream began.
        earlier: The earlier streams that still have such events, which are delivered first.
    """

    trigger: int
    handled: int = 0
    kept: int = 0
    checkpoint: str | None = None
    due_us: int | None = None
    carried: int = 0
    earlier: tuple[EarlierStream, ...] = ()


class ClaimedCallback(msgspec.Struct, frozen=True):
    """A user callback to run.

    Attributes:
        id: Its row id, for `CallbackReport`.
        name: `on_success`, `on_failure`, `on_retry` or `on_skipped`.
        error: The error that made the task or the run fail.
        ended_us: When the task or the run entered the state that caused the callback.
        run_state: The state of the run.
        run_ended_us: When the run ended; None: it has not ended.
        started_us: When the try started; None: it is a callback of the whole run, or no try started.
        origin: The class and traceback locations of the exception; None: there was none.
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
    """Work claimed by a worker: an attempt of a task, or a callback.

    Attributes:
        task: The task; 0: a callback of the whole run.
        epoch: The fencing token. For a callback, the epoch of the change that caused it, without fencing.
        run: The row id of the run.
        dag_id: The DAG.
        run_id: The name of the run.
        task_id: The name of the task.
        map_index: The map index; -1: the task is not mapped.
        try_number: The try, from 1.
        max_tries: The number of tries after which a failure is final.
        file: The file of the DAG, relative to the DAG folder.
        digest: The hash of the file and of its imports when the DAG was stored; empty: unknown.
        queue: The queue that it was claimed from.
        operator: The name of its operator class, for display.
        run_kind: `manual`, `scheduled` or `dev`.
        run_started_us: When the run started.
        logical_us: The logical date of the run; None: it has none.
        interval_start_us: The start of the run's data interval.
        interval_end_us: The end of the run's data interval.
        conf: The run's configuration, encoded.
        params: The run's parameters, encoded: the defaults of the DAG overridden by `conf`.
        deadline_us: The deadline of the try.
        resume: How it resumes after a deferral; None: it starts from the beginning.
        callback: The callback to run; None: run the attempt itself.
        elements: For an element of a mapped task: per leaf of its sources, in order (the parts of a zip one by one),
            the encoded item; None for a literal, and for a part of a zip that has no such item.
        leaf_indexes: The index of the item per leaf; -1: the part of a zip has ended and is filled.
        map_length: The number of elements; None: the map is still open, or the task is not mapped.
        stream: The stream that the attempt handles; None: its trigger does not stream, or it resumes after none.
        checkpoint: The encoded checkpoint of an earlier try, if the try begins; None: it has set none.
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
    elements: tuple[str | None, ...] = ()
    leaf_indexes: tuple[int, ...] = ()
    map_length: int | None = None
    stream: ClaimedStream | None = None
    checkpoint: str | None = None
    digest: str = ""


class WorkerAnswer(msgspec.Struct, frozen=True):
    """The answer to a worker turn.

    Attributes:
        outcomes: The outcome of each report, in order.
        claimed: The work to start now.
        end: The attempts of `WorkerTurn.held` that have been replaced and must be stopped, as task and epoch.
        now_us: The store's time, for deadlines.
        unblocked: The attempts of `WorkerTurn.blocked` that have their slots again: they go on before anything else is
            started. `claimed` leaves room for them.
    """

    outcomes: tuple[AttemptReportOutcome, ...]
    claimed: tuple[ClaimedAttempt, ...]
    end: tuple[tuple[int, int], ...]
    now_us: int
    unblocked: tuple[tuple[int, int], ...] = ()


@answered_by("sessions.worker_turns:take_worker_turn")
class WorkerTurn(Call[WorkerAnswer], frozen=True):
    """Report finished work and claim new work, in one transaction; a worker sends one turn at a time.

    If the worker's session has ended, the call raises `CallRefusedError` (FENCED), and the worker must stop.

    Attributes:
        session: The worker's session.
        request: The number of this turn, repeated if the answer was lost.
        reports: The attempts that ended.
        callbacks: The callbacks that ended.
        held: The other attempts that the worker is running, as task and epoch; the answer lists those to stop.
        capacity: The number of additional attempts that it can take.
        queues: The queues to claim from.
        blocked: The attempts of `held` that wait at their `yield`; they need no capacity. An attempt that had its slots
            again and is no longer listed here has gone on.
        missing: The files of DAGs that the worker lacks; nothing of these DAGs is claimed.
    """

    session: int
    request: int
    reports: tuple[AttemptReport, ...] = ()
    callbacks: tuple[CallbackReport, ...] = ()
    held: tuple[tuple[int, int], ...] = ()
    capacity: int = 0
    queues: tuple[str, ...] = ("default",)
    blocked: tuple[tuple[int, int], ...] = ()
    missing: tuple[str, ...] = ()
