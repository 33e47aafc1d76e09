"""The calls of the command line and the web pages about runs of DAGs.

Invariants: runs are listed in keyset pages in a stable order; `after` is the `next` of the previous page. `by` names
the user who makes a change and is recorded in the journal. Times are UTC microseconds since the epoch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from tidemill.store.calls.call import PAGE, Call, Listed, answered_by

RunKind = Literal["manual", "scheduled", "dev"]


class RunRecord(msgspec.Struct, frozen=True):
    """A run of a DAG.

    Attributes:
        id: Its row id.
        dag_id: Its DAG.
        run_id: Its name, unique within the DAG.
        kind: `manual`, `scheduled` or `dev`.
        state: `queued`, `running`, `success` or `failed`.
        reason: Why it failed if not because of its tasks: it was cancelled or exceeded its timeout.
        version: The version of the DAG that it uses.
        logical_us: Its logical date; None: it has none.
        interval_start_us: The start of its data interval.
        interval_end_us: The end of its data interval.
        conf: Its configuration, encoded.
        by: The user or service that created it.
        created_us: When it was created.
        started_us: When it started.
        ended_us: When it ended.
        warnings: Likely mistakes in its configuration; only in the answer to `CreateRun`.
    """

    id: int
    dag_id: str
    run_id: str
    kind: str
    state: str
    reason: str | None
    version: int
    logical_us: int | None
    interval_start_us: int | None
    interval_end_us: int | None
    conf: str
    by: str
    created_us: int
    started_us: int | None
    ended_us: int | None
    warnings: tuple[str, ...] = ()


@answered_by("dags.scheduling.new_runs:create_run")
class CreateRun(Call[RunRecord], frozen=True):
    """Create a run and return it. Refused if the DAG is unknown or inactive, or already has such a run (CONFLICT).

    Attributes:
        dag_id: The DAG.
        run_id: Its name; None: generated from its kind and time.
        logical_us: Its logical date; None: it has none.
        conf: Its configuration, encoded.
        kind: `manual`, `scheduled` or `dev`.
        by: The user or service that creates it.
        request: An idempotency key: a repeated call with the same key returns the same run; empty: not idempotent.
        interval_start_us: The start of its data interval; None: derived from its logical date.
        interval_end_us: The end of its data interval; None: derived from its logical date.
        stage: The number under which the client has stored lists of the configuration (`StageConfItems`); 0: none. The
            configuration has a mark with the length in place of each.
    """

    dag_id: str
    run_id: str | None = None
    logical_us: int | None = None
    conf: str = "{}"
    kind: RunKind = "manual"
    by: str = ""
    request: str = ""
    interval_start_us: int | None = None
    interval_end_us: int | None = None
    stage: int = 0


@answered_by("dags.items.conf_lists:stage_items")
class StageConfItems(Call[None], frozen=True):
    """Store a part of a list in the configuration of a run that is about to be created.

    The parts of a list come in order; a repeated one changes nothing. What no run has taken over after a day may be
    removed.

    Attributes:
        stage: A number that the client has chosen, from 1 to 2**62 - 1, for `CreateRun`.
        key: The name of the list: a param that tasks of the DAG are mapped over.
        first: The number of the first value, from 0.
        values: The encoded values, at most MAX_XCOM_BYTES each.
        most: The maximum length of the list; None: only its bytes are limited.
        by: The user, who may have lists for a limited number of runs that do not exist yet; empty: no limit.
    """

    stage: int
    key: str
    first: int
    values: tuple[str, ...]
    most: int | None = None
    by: str = ""


@answered_by("dags.runs.runs:cancel_run")
class CancelRun(Call[RunRecord], frozen=True):
    """Cancel a run: started tasks fail, the others are skipped, and the run fails. A finished run stays unchanged."""

    dag_id: str
    run_id: str
    by: str


@answered_by("dags.runs.runs:list_runs", reads=True)
class ListRuns(Call[Listed[RunRecord]], frozen=True):
    """Return runs, newest first. `dag_id`: None for all DAGs. `states`: empty for all."""

    dag_id: str | None = None
    states: tuple[str, ...] = ()
    after: str | None = None
    limit: int = PAGE


class RunProgress(msgspec.Struct, frozen=True):
    """The progress of a run.

    Attributes:
        run: The run.
        total: The number of its tasks, and of the elements of mapped tasks as far as their sources have given them.
        done: How many of them have ended.
        running: How many of them are running.
        waiting: The rest: tasks that wait for upstream tasks, slots, workers, triggers or a retry.
    """

    run: RunRecord
    total: int
    done: int
    running: int
    waiting: int


@answered_by("dags.runs.progress:watch_runs", reads=True)
class WatchRuns(Call[tuple[RunProgress, ...]], frozen=True):
    """Return the progress of runs: running ones first, then queued ones, then the last finished ones; newest first.

    Attributes:
        limit: The maximum number of runs.
    """

    limit: int = 10


@answered_by("dags.runs.runs:get_run", reads=True)
class GetRun(Call[RunRecord | None], frozen=True):
    """Return a run; None if there is none. `run_id`: None for the newest run of the DAG."""

    dag_id: str
    run_id: str | None = None
