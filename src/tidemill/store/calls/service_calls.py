"""The calls of services: their lifecycle, the files of DAGs, and the turns of the scheduler.

Invariants: a service session is one start of a process, and its id is never reused. If an answer was lost, the sender
repeats the request with the same number and gets the same answer. Times are UTC microseconds since the epoch, durations
are microseconds, and user values are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import enum
from typing import Final

import msgspec

from tidemill.core.tasks.backlog import MAX_BACKLOG
from tidemill.store.calls.call import Call, answered_by

# -- services ----------------------------------------------------------------------------------------------------------


class TrialKind(enum.IntEnum):
    """The work of a process that runs apart from others, because it may be killed by it.

    NONE: it is no trial. SPLIT: it runs only triggers that are reserved for it. WHOLE: it also runs triggers that join
    the streams of those. KILLS: it calls `on_kill` of triggers whose triggerers were lost while they called it.
    """

    NONE = 0
    SPLIT = 1
    WHOLE = 2
    KILLS = 3


@answered_by("sessions.services:begin_service_session")
class BeginSession(Call[int], frozen=True):
    """Start a service session and return its id.

    Attributes:
        kind: `scheduler`, `worker`, `triggerer`, `parser` or `dev`.
        name: Its name, for display.
        host: The name of its machine.
        boot_id: Changes with every boot of the machine.
        pid: The process id.
        queues: The queues that it serves; empty for a triggerer that serves all queues.
        capacity: How many tasks or triggers it runs at once.
        parent: The session of the process that supervises it and answers its calls, and that it ends with; None: it
            runs by itself.
        version: The version of tidemill.
        lock: The identity of the lock that it holds on its machine; empty: none.
        request: Identifies the request: repeating it returns the same session. Empty: each request begins a session.
        trial: Its work if it is the process of a trial.
    """

    kind: str
    name: str
    host: str
    boot_id: str
    pid: int
    queues: tuple[str, ...] = ()
    capacity: int = 0
    parent: int | None = None
    version: str = ""
    lock: str = ""
    request: str = ""
    trial: TrialKind = TrialKind.NONE


#: How many tasks and triggers a transaction releases: those of a large triggerer would exceed the time of one.
PART = 2_000


@answered_by("sessions.keys:check_key")
class CheckKey(Call[None], frozen=True):
    """Check that the keys of this process decrypt the check value; the first key encrypts it from now on.

    So a new key is first added after the old one everywhere, then put before it, and the old one is removed last.
    """


#: The answer to a heartbeat if the store reads the clock of this machine.
OWN_CLOCK: Final = 1


@answered_by("sessions.services:beat_service_session")
class BeatSession(Call[int], frozen=True):
    """Send a heartbeat; return the store's time, in UTC microseconds since the epoch, or `OWN_CLOCK`.

    0: another process has ended the session, and the service must stop at once.

    Attributes:
        session: The service session.
        measures: Measurements of the service by name, for the process that relays its calls. The store keeps
            `triggers`, by which triggerers divide what waits, and ignores the others.
    """

    session: int
    measures: dict[str, float] = msgspec.field(default_factory=dict)


@answered_by("sessions.services:note_stopping")
class StopSession(Call[bool], frozen=True):
    """Record that a service has been told to stop, and those that it supervises; their loss is then no death.

    False: the session has ended.
    """

    session: int


@answered_by("sessions.services:end_service_session")
class EndSession(Call[bool], frozen=True):
    """End the session of a service that has stopped cleanly, and those that it supervised, and release their claims.

    At most `PART` tasks and triggers are released at once; `ReleaseLeft` releases the others.

    False: it had already ended.
    """

    session: int


@answered_by("sessions.services:end_service_session")
class LoseSession(Call[bool], frozen=True):
    """End the session of a dead service, and those that it supervised: attempts are lost and triggers released.

    Unless the service had been told to stop, this counts as a death of its triggers, and may make them suspects. At
    most `PART` tasks and triggers are released at once; `ReleaseLeft` releases the others.

    False: it had already ended.

    Attributes:
        session: The dead session.
        by: The session that found it dead; None: a process without a session.
        beat: Its last heartbeat; if it has sent another one since, it stays. None: it is known to be dead.
        is_death: Whether its triggers may have caused it; False: the caller knows the cause.
    """

    session: int
    by: int | None = None
    beat: int | None = None
    is_death: bool = True


@answered_by("sessions.services:release_left")
class ReleaseLeft(Call[int], frozen=True):
    """Release a part of what sessions that have ended still hold; return how much: 0 once nothing is left.

    The end of a session releases everything, except the tasks of runs that failed at that moment, and tasks and
    triggers above `PART`.
    """


@answered_by("sessions.services:lose_other_sessions")
class LoseOtherSessions(Call[tuple[int, ...]], frozen=True):
    """End every live DAG service session except the given ones; return the ids. Hosts of trigger lists are excluded.

    Used by the process that alone has a SQLite file open: all other sessions must be dead.

    Attributes:
        keep: The sessions that stay.
    """

    keep: tuple[int, ...] = ()


class ServiceSession(msgspec.Struct, frozen=True):
    """A service session with the fields of `BeginSession`.

    Attributes:
        beat: The number of its heartbeats.
        started_us: When it began.
        beat_us: When it last sent a heartbeat.
        quiet_us: The age of that heartbeat.
        list: The trigger list that it runs; empty for services of DAGs.
    """

    id: int
    kind: str
    name: str
    host: str
    boot_id: str
    pid: int
    queues: tuple[str, ...]
    capacity: int
    beat: int
    started_us: int
    beat_us: int
    quiet_us: int = 0
    parent: int | None = None
    version: str = ""
    list: str = ""
    lock: str = ""


@answered_by("sessions.services:list_sessions", reads=True)
class ListSessions(Call[tuple[ServiceSession, ...]], frozen=True):
    """Return the sessions that have not ended, by id. `kind`: empty for all kinds."""

    kind: str = ""


class ServiceRecord(msgspec.Struct, frozen=True):
    """A live session. `held`: how many attempts or triggers it runs."""

    session: ServiceSession
    held: int


@answered_by("sessions.services:describe_services", reads=True)
class DescribeServices(Call[tuple[ServiceRecord, ...]], frozen=True):
    """Return the live sessions of DAG services with what they hold, by id."""


# -- the files of DAGs -------------------------------------------------------------------------------------------------


class StoredDag(msgspec.Struct, frozen=True):
    """The result of storing one DAG of a file.

    Attributes:
        dag_id: Its id.
        changed: Whether it is new or has a new version.
        refused: Why it was refused; empty: it was stored.
        differs: The differences from its newest version although no file has changed; the version stays.
    """

    dag_id: str
    changed: bool = False
    refused: str = ""
    differs: str = ""


@answered_by("dags.files.dags:store_file")
class StoreFile(Call[tuple[StoredDag, ...]], frozen=True):
    """Store the DAGs of a file; DAGs that it no longer defines become inactive.

    Attributes:
        path: The file, relative to the DAG folder.
        digest: The hash of the file and of the files in the folder that it imports.
        modules: The files in the folder that it imports, with their hashes.
        error: The traceback if it cannot be parsed; its DAGs then stay unchanged.
        structures: The DAGs, as the JSON of `core.tasks.structure.DagStructure`.
        paused: Whether new DAGs start paused.
        unshared: The effects of importing it that a forked process does not inherit, for display; None: none.
        session: The session of the parser, which has claimed the file; None: the only parser.
        reread: Whether neither the file nor its imports have changed since it was stored; then no DAG gets a new
            version.
    """

    path: str
    digest: str
    modules: dict[str, str] = msgspec.field(default_factory=dict)
    error: str | None = None
    structures: tuple[bytes, ...] = ()
    paused: bool = False
    unshared: str | None = None
    reread: bool = False
    session: int | None = None


@answered_by("dags.files.files:remove_file")
class RemoveFile(Call[bool], frozen=True):
    """Mark a file as removed: its DAGs become inactive, and their runs finish.

    Hosts may have different files. Only the parser that has claimed a file can remove it, or, once its session has
    ended, all live parsers together, when each of them has said that it lacks the file.

    False: the file was unknown, another parser has it, or the grace has not passed.

    Attributes:
        path: The file, relative to the DAG folder.
        session: The session of the parser that lacks it; None: the only parser.
        grace_us: How long the session of its last parser must have ended, because that may be about to start again.
    """

    path: str
    session: int | None = None
    grace_us: int = 0


@answered_by("dags.files.files:claim_files")
class ClaimFiles(Call[tuple[str, ...]], frozen=True):
    """Claim files for a parser; return those that it has, which no other parser reads until its session ends.

    Attributes:
        session: The session of the parser.
        paths: The files of its folder.
    """

    session: int
    paths: tuple[str, ...]


class FileRecord(msgspec.Struct, frozen=True):
    """A file of DAGs, as `StoreFile` last described it. `dags`: the ids of its active DAGs."""

    path: str
    digest: str
    modules: dict[str, str]
    error: str | None
    parsed_us: int
    dags: tuple[str, ...]


@answered_by("dags.files.dags:list_files", reads=True)
class ListFiles(Call[tuple[FileRecord, ...]], frozen=True):
    """Return all files by path.

    Attributes:
        broken: Only files with an error.
        removable_by: Only files that the parser with this session may remove, alone or together with others: files that
            it has, and those that no live parser has.
        not_of: Only files that other live parsers have than the one with this session.
    """

    broken: bool = False
    removable_by: int | None = None
    not_of: int | None = None


@answered_by("dags.files.file_differences:report_files")
class ReportFiles(Call[None], frozen=True):
    """Say how the files of a parser or worker differ from the stored ones; replaces what the session said before.

    Attributes:
        session: Its session.
        missing: The files that it lacks.
        differing: The files that it has with another content.
    """

    session: int
    missing: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()


class FileDifference(msgspec.Struct, frozen=True):
    """A file that a live service lacks, or has with another content.

    Attributes:
        path: The file, relative to the DAG folder.
        difference: `missing` or `differs`.
        since_us: The time from which it has been so.
        session: The session of the service.
        kind: Its kind.
        name: Its name.
        host: The name of its machine.
    """

    path: str
    difference: str
    since_us: int
    session: int
    kind: str
    name: str
    host: str


@answered_by("dags.files.file_differences:list_differences", reads=True)
class ListFileDifferences(Call[tuple[FileDifference, ...]], frozen=True):
    """Return how the files of live services differ from the stored ones, by path."""


# -- the scheduler -----------------------------------------------------------------------------------------------------


class SchedulerAnswer(msgspec.Struct, frozen=True):
    """The result of a scheduler turn.

    Attributes:
        next_due_us: The time of the next due item, by the store's clock; None: nothing is due.
        now_us: The store's time.
        more: Whether there is more work to do at once.
        admitted: How many tasks got slots.
        moved: How many tasks changed state, including the admitted ones.
        created: How many scheduled runs were created.
        ended: How many runs ended.
        broken_runs: Runs that raised an error and were left unchanged.
        broken_dags: DAGs whose schedule raised an error and created no runs.
        skipped: Whether work was left to the transactions that have it locked.
        again: Whether to look again soon, because something has changed.
    """

    next_due_us: int | None
    now_us: int
    more: bool = False
    admitted: int = 0
    moved: int = 0
    created: int = 0
    ended: int = 0
    broken_runs: tuple[int, ...] = ()
    broken_dags: tuple[int, ...] = ()
    skipped: bool = False
    again: bool = False


class MapLimits(msgspec.Struct, frozen=True):
    """The limits of mapped tasks (settings `dags.max_outstanding`, `dags.max_map_length`, `dags.max_backlog`).

    Attributes:
        max_outstanding: The number of unfinished elements of a map that sets none itself.
        max_map_length: The number of elements that a map may have.
        max_backlog: The number of items that a generator may yield ahead of the elements created from them.
    """

    max_outstanding: int = 128
    max_map_length: int = 1_000_000
    max_backlog: int = MAX_BACKLOG


@answered_by("sessions.scheduler_turns:take_scheduler_turn")
class SchedulerTurn(Call[SchedulerAnswer], frozen=True):
    """Do all scheduling work that is due, in a bounded transaction.

    Create due runs, start queued runs, decide tasks whose upstream changed, process deadlines and retries, admit tasks
    to slots, and end runs. A run that raises an error is left unchanged, and the turn continues with the others.

    Attributes:
        session: The scheduler's session.
        limit: The approximate number of rows per step.
        skip_runs: Runs that failed in an earlier turn and are skipped in this one.
        skip_dags: DAGs that failed in an earlier turn and are skipped in this one.
        map_limits: The limits of the maps that open in this turn; they keep them.
        missing_file_us: How long a queued task waits if no live worker of its queue has its file; then it fails.
    """

    session: int
    limit: int = 500
    skip_runs: tuple[int, ...] = ()
    skip_dags: tuple[int, ...] = ()
    map_limits: MapLimits = MapLimits()
    missing_file_us: int = 60_000_000
