"""The DAG run that a task belongs to, and earlier runs of the DAG."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from tidemill.dags.attempt.lazy_sequence import LazySequence
from tidemill.dags.attempt.task_services import PastRun, TaskServices
from tidemill.dags.long_lists import is_list_mark
from tidemill.runtime.json.codec import decode

EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DagRun:
    """The DAG run that a task belongs to.

    Attributes:
        dag_id: The DAG.
        run_id: The id of the run.
        run_type: `manual`, `scheduled` or `dev`.
        logical_date: The date that the run processes; None for a run without one.
        data_interval_start: The start of the interval of data that the run processes.
        data_interval_end: The end of that interval.
        start_date: When the run started.
        run_after: The earliest time at which the run could start.
        conf: The configuration that the run was triggered with.
        end_date: When the run ended; None if it has not.
        state: `queued`, `running`, `success` or `failed`.
    """

    dag_id: str
    run_id: str
    run_type: str
    logical_date: datetime | None
    data_interval_start: datetime | None
    data_interval_end: datetime | None
    start_date: datetime
    run_after: datetime
    conf: dict[str, Any]
    end_date: datetime | None = None
    state: str = "running"


def open_lists(
    values: Mapping[str, Any], services: TaskServices | None, dag_id: str | None = None, run_id: str | None = None
) -> dict[str, Any]:
    """Return the configuration of a run, or its params, with access to the lists that are stored item by item.

    Args:
        values: The configuration or the params.
        services: Access to the store; None: leave these lists out.
        dag_id: The DAG; None: that of the running task.
        run_id: The run; None: that of the running task.
    """
    found = {}
    for name, value in values.items():
        if not is_list_mark(value):
            found[name] = value
        elif services is not None:
            found[name] = LazySequence(services, "", name, dag_id, run_id)
    return found


def build_run(found: PastRun, services: TaskServices) -> DagRun:
    began = read_moment(found.started_us if found.started_us is not None else found.created_us)
    assert began is not None
    logical = read_moment(found.logical_us)
    return DagRun(
        found.dag_id,
        found.run_id,
        found.kind,
        logical,
        read_moment(found.interval_start_us),
        read_moment(found.interval_end_us),
        began,
        logical or began,
        open_lists(decode(found.conf) or {}, services, found.dag_id, found.run_id),
        read_moment(found.ended_us),
        found.state,
    )


def read_moment(time_us: int | None) -> datetime | None:
    return None if time_us is None else EPOCH + timedelta(microseconds=time_us)
