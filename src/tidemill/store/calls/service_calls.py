"""The calls of services: their life, the files of DAGs, and the turns of the scheduler.

Invariants: a service is one start of a process, and its number is never used again; a request may be repeated with the
same number if its answer was lost, and gets the same answer. Times are UTC microseconds since the epoch, durations
microseconds; values of users are texts of `runtime.json.codec`.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import Call

# -- services ----------------------------------------------------------------------------------------------------------


class BeginService(Call[int], frozen=True):
    """Begin a service, and answer its number.

    Attributes:
        kind: `scheduler`, `worker`, `triggerer`, `parser` or `dev`.
        name: Its name, for people.
        host: The name of its machine.
        boot_id: Changes with every boot of the machine.
        pid: The process id.
        queues: The queues that it serves; a triggerer that serves none in particular gives none.
        capacity: How many tasks or triggers it runs at once.
    """

    kind: str
    name: str
    host: str
    boot_id: str
    pid: int
    queues: tuple[str, ...] = ()
    capacity: int = 0


class BeatService(Call[bool], frozen=True):
    """Beat; False: somebody has ended the service, which stops at once.

    Attributes:
        service: The service.
        measures: What it says of itself, by name, for whoever passes its calls on; the store does not keep it.
    """

    service: int
    measures: dict[str, float] = msgspec.field(default_factory=dict)


class EndService(Call[bool], frozen=True):
    """End a service that has stopped cleanly: what it still holds is free again. False: it had ended already."""

    service: int


class LoseService(Call[bool], frozen=True):
    """End a service that has died: its attempts are lost, its triggers free. False: it had ended already.

    Attributes:
        service: The dead one.
        by: The service that found it dead; None: a process without one.
    """

    service: int
    by: int | None = None


class LoseOthers(Call[tuple[int, ...]], frozen=True):
    """End every live service of DAGs but those named, and answer their numbers; hosts of lists of triggers stay.

    For a process that is the only one with the right to run services on a store: all that are not its own have died.

    Attributes:
        keep: The services that live.
        host: Only those of this machine and boot; None: all.
        boot_id: Likewise.
    """

    keep: tuple[int, ...] = ()
    host: str | None = None
    boot_id: str | None = None


class ServiceRecord(msgspec.Struct, frozen=True):
    """A service, with the fields of `BeginService`. `beat` rises while it lives; `quiet_us`: how old it is."""

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


class ListServices(Call[tuple[ServiceRecord, ...]], frozen=True):
    """Answer the services that have not ended, by number. `kind`: empty, all kinds."""

    kind: str = ""


# -- the files of DAGs -------------------------------------------------------------------------------------------------


class StoredDag(msgspec.Struct, frozen=True):
    """What became of a DAG of a file.

    Attributes:
        dag_id: Its id.
        changed: Whether it is new, or has a new version.
        refused: Why it is not stored; empty: it is.
        differs: What differs from its newest version though no file has changed; the version stays.
    """

    dag_id: str
    changed: bool = False
    refused: str = ""
    differs: str = ""


class StoreFile(Call[tuple[StoredDag, ...]], frozen=True):
    """Store what a file defines; the DAGs that it no longer defines become inactive.

    Attributes:
        path: The file, relative to the folder of DAGs.
        digest: The hash of the file and of what it imports below the folder.
        modules: The files that it imports below the folder, with their hashes.
        error: The traceback, if it cannot be parsed; its DAGs then stay as they are.
        structures: The DAGs, as the JSON of `core.tasks.structure.DagStructure`.
        paused: Whether DAGs that are new begin paused.
        unshared: What of its import a forked process would not have, for people; None: nothing.
        reread: Whether nothing that it reads has changed since it was stored: then no DAG gets another version.
    """

    path: str
    digest: str
    modules: dict[str, str] = msgspec.field(default_factory=dict)
    error: str | None = None
    structures: tuple[bytes, ...] = ()
    paused: bool = False
    unshared: str | None = None
    reread: bool = False


class RemoveFile(Call[bool], frozen=True):
    """Note that a file is gone: its DAGs become inactive, their runs finish. False: it was not known."""

    path: str


class FileRecord(msgspec.Struct, frozen=True):
    """A file of DAGs, as `StoreFile` described it last. `dags`: the ids of the active DAGs in it."""

    path: str
    digest: str
    modules: dict[str, str]
    error: str | None
    parsed_us: int
    dags: tuple[str, ...]


class ListFiles(Call[tuple[FileRecord, ...]], frozen=True):
    """Answer all files, by path. `broken`: only those with an error."""

    broken: bool = False


# -- the scheduler -----------------------------------------------------------------------------------------------------


class SchedulerAnswer(msgspec.Struct, frozen=True):
    """What a turn of the scheduler did.

    Attributes:
        next_due_us: When something is due next, by the clock of the store; None: nothing is.
        now_us: What that clock said.
        more: Whether there is more to do at once.
        admitted: How many tasks got slots.
        moved: How many tasks changed their state, those included.
        created: How many runs were created by their schedule.
        ended: How many runs ended.
        broken_runs: The runs that could not be worked on, and were left as they are.
        broken_dags: Likewise the DAGs, whose schedules make no runs.
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


class SchedulerTurn(Call[SchedulerAnswer], frozen=True):
    """Do what is to be done now, in a bounded transaction.

    Create the runs that are due, start those that wait, decide tasks whose upstream changed, feed what is due, give out
    slots, and end runs. A run that cannot be worked on is left as it is, and the others go on.

    Attributes:
        service: The scheduler.
        limit: About how many rows each step takes.
        skip_runs: Runs that an earlier turn could not work on, and that this one passes over.
        skip_dags: Likewise DAGs.
    """

    service: int
    limit: int = 500
    skip_runs: tuple[int, ...] = ()
    skip_dags: tuple[int, ...] = ()
