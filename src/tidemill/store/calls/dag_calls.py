"""The calls of the command line and the web pages about DAGs.

Invariants: DAGs are listed in keyset pages in a stable order; `after` is the `next` of the previous page. `by` names
the user who makes a change and is recorded in the journal. Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by


class DagRecord(msgspec.Struct, frozen=True):
    """A DAG.

    Attributes:
        id: Its row id.
        dag_id: Its id.
        file: The file that defines it.
        version: Its newest version number, from 1.
        active: Whether its file still defines it.
        paused: Whether it is paused: no scheduled runs are created and queued runs do not start.
        next_us: The logical date of the next scheduled run; None: there is none.
        schedule: The schedule for display: a cron expression, a duration, `@once`, or empty.
        tags: Its tags.
        label: Its display name; empty: its id.
    """

    id: int
    dag_id: str
    file: str
    version: int
    active: bool
    paused: bool
    next_us: int | None
    schedule: str
    tags: tuple[str, ...]
    label: str


@answered_by("dags.files.dags:list_dags", reads=True)
class ListDags(Call[Listed[DagRecord]], frozen=True):
    """Return the DAGs by id. `inactive`: include DAGs that no file defines any more. `tag`: only DAGs with this tag."""

    after: str | None = None
    limit: int = PAGE
    inactive: bool = False
    tag: str | None = None


class DagDetails(msgspec.Struct, frozen=True):
    """A DAG with its structure.

    Attributes:
        dag: The DAG.
        structure: The JSON of its `core.tasks.structure.DagStructure`.
        unshared: The effects of importing its file that a forked process does not inherit; None: none, or not checked.
    """

    dag: DagRecord
    structure: bytes
    unshared: str | None = None


@answered_by("dags.files.dags:get_dag", reads=True)
class GetDag(Call[DagDetails | None], frozen=True):
    """Return a DAG; None if there is none. `version`: None for the newest."""

    dag_id: str
    version: int | None = None


@answered_by("dags.files.dags:pause_dag")
class PauseDag(Call[bool], frozen=True):
    """Pause or resume a DAG; return False if nothing changed. An unknown DAG is refused."""

    dag_id: str
    paused: bool
    by: str
