"""What a task knows while it runs: the context, with Airflow's keys, and the task instance.

`fencing_token` is new: it rises with each attempt of the task, so that a system outside can refuse one that is late.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final, cast

from tidemill.dags.arguments import check_text
from tidemill.dags.connection import ConnectionAccessor
from tidemill.dags.current import get_current_context
from tidemill.dags.exceptions import LeftOutError, NotFoundError
from tidemill.dags.lazy_context import Context
from tidemill.dags.macros import macros
from tidemill.dags.task_services import Claim, PastRun, TaskServices
from tidemill.dags.variable import VariableAccessor
from tidemill.dags.xcom_arg import RETURN_VALUE
from tidemill.runtime.json.codec import decode, encode

#: What a task has become when its callback runs.
_STATES: Final = {
    "on_success": "success",
    "on_failure": "failed",
    "on_retry": "up_for_retry",
    "on_skipped": "skipped",
}
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class DagRun:
    """The run that the task is in.

    Attributes:
        dag_id: The DAG.
        run_id: Its id.
        run_type: `manual`, `scheduled` or `dev`.
        logical_date: The time that it is for; None: it has none.
        data_interval_start: The begin of the data that it is for.
        data_interval_end: The end.
        start_date: When it began.
        run_after: From when on it could begin.
        conf: What it was triggered with.
        end_date: When it ended; None: it has not.
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


class TaskInstance:
    """The task that runs, as `context["ti"]`.

    Attributes:
        task: Its operator.
        task_id: Its id.
        dag_id: The DAG.
        run_id: The run.
        map_index: -1: it is not mapped.
        try_number: Which try it is, from 1.
        max_tries: How many retries follow the first try.
        state: `running`; in a callback what the task has become.
        start_date: When this attempt began; in a callback, when the try did.
        end_date: None: it has not ended.
        hostname: The machine that it runs on.
        dag_run: The run.
        fencing_token: Rises with each attempt of this task.
        skipped: The tasks directly downstream that it skips.
        skips_all: Whether it skips all tasks downstream.
    """

    def __init__(
        self, task: Any, claim: Claim, services: TaskServices, dag_run: DagRun, params: Mapping[str, Any]
    ) -> None:
        """Keep what is known."""
        self.task = task
        self.task_id, self.dag_id, self.run_id = claim.task_id, claim.dag_id, claim.run_id
        self.map_index, self.try_number, self.max_tries = claim.map_index, claim.try_number, claim.max_tries - 1
        self.operator = type(task).__name__
        self.hostname = socket.gethostname()
        self.queue = claim.queue
        self.state = "running"
        self.start_date = datetime.now(UTC)
        self.end_date: datetime | None = None
        if claim.callback is not None:
            self.state = _STATES.get(claim.callback.name, self.state)
            self.end_date = _moment(claim.callback.ended_us)
            self.start_date = _moment(claim.callback.started_us) or self.end_date or self.start_date
        self.dag_run = dag_run
        self.logical_date = dag_run.logical_date
        self.fencing_token = claim.epoch
        self.params = params
        self.skipped: set[str] = set()
        self.skips_all = False
        self._services = services

    @property
    def duration(self) -> float | None:
        """How many seconds it took; None: it has not ended."""
        return None if self.end_date is None else (self.end_date - self.start_date).total_seconds()

    def xcom_push(self, key: str, value: Any) -> None:
        """Keep a value for other tasks, at once.

        Raises:
            DagError: The key is not a text that a store accepts.
            EncodingError: The value cannot be written down.
        """
        check_text("xcom_push", "key", key)
        self._services.push_xcom(key, encode(value, f"XCom {key!r}"))

    def xcom_pull(
        self,
        task_ids: str | Sequence[str] | None = None,
        dag_id: str | None = None,
        key: str = RETURN_VALUE,
        include_prior_dates: bool = False,
        *,
        map_indexes: int | None = None,
        default: Any = None,
        run_id: str | None = None,
    ) -> Any:
        """Return what a task kept under a key; for a list of tasks a list.

        Args:
            task_ids: The tasks; None: this one.
            dag_id: The DAG; by default this one. Of another one it is the latest run that is not later than this one,
                unless `run_id` says which.
            key: The key; by default what the task returned.
            include_prior_dates: Whether earlier runs count where this one has none.
            map_indexes: Which element of a mapped task.
            default: What to return for nothing.
            run_id: The run; by default this one.
        """
        other_dag = None if dag_id == self.dag_id else dag_id
        other_run = None if other_dag is None and run_id == self.run_id else run_id
        names = (self.task_id,) if task_ids is None else (task_ids,) if isinstance(task_ids, str) else tuple(task_ids)
        index = -1 if map_indexes is None else map_indexes
        texts = self._services.get_xcom(names, key, index, include_prior_dates, other_dag, other_run)
        values = [default if text is None else decode(text) for text in texts]
        return values[0] if task_ids is None or isinstance(task_ids, str) else values

    def get_previous_dagrun(self, state: str | None = None) -> DagRun | None:
        """Return the run of this DAG with the logical date before that of this run, if it has one.

        Args:
            state: Only runs in this state, such as `success`.
        """
        if self.dag_run.logical_date is None:
            return None
        found = self._services.get_earlier_run(state)
        return None if found is None else _build_run(found)

    def get_dagrun_state(self, dag_id: str, run_id: str) -> str:
        """Return the state of a run.

        Raises:
            NotFoundError: There is no such run.
        """
        found = self._services.get_run(dag_id, run_id)
        if found is None:
            raise NotFoundError(f"DAG {dag_id!r} has no run {run_id!r}")
        return found.state

    def get_first_reschedule_date(self, context: Any = None) -> None:
        """Return None: a sensor that looks again later defers, and is not rescheduled."""

    def get_template_context(self) -> Context:
        """Return the context of this attempt."""
        return cast("Context", get_current_context())

    def __getattr__(self, name: str) -> Any:
        """Say of what Airflow has, and this has not, why, and what to use instead."""
        if name in _LEFT_OUT:
            raise LeftOutError(f"a task instance has no {name!r}: {_LEFT_OUT[name]}")
        raise AttributeError(f"a task instance has no {name!r}")

    def read_xcom(self, task_id: str, key: str) -> Any:
        """Return the value of an output that was passed as an argument."""
        return self.xcom_pull(task_id, key=key)

    @property
    def key(self) -> str:
        """What people call it."""
        return f"{self.dag_id}__{self.task_id}__{self.run_id}"

    def __repr__(self) -> str:
        """Show the ids."""
        return f"<TaskInstance {self.dag_id}.{self.task_id} {self.run_id} try {self.try_number}>"


class TaskStateStore:
    """Values of a task that outlive its retries, as `context["task_state_store"]`; XComs do not."""

    def __init__(self, services: TaskServices) -> None:
        """Ask these services."""
        self._services = services

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or a default."""
        text = self._services.get_task_state(key)
        return default if text is None else decode(text)

    def set(self, key: str, value: Any) -> None:
        """Keep a value.

        Raises:
            EncodingError: The value cannot be written down.
        """
        self._services.set_task_state(key, encode(value, f"state {key!r}"))

    def delete(self, key: str) -> None:
        """Delete a value, if there is one."""
        self._services.delete_task_state(key)

    def clear(self) -> None:
        """Delete all values of this task."""
        self._services.clear_task_state()


def build_context(task: Any, dag: Any, claim: Claim, services: TaskServices, params: dict[str, Any]) -> Context:
    """Return the context of an attempt.

    Args:
        task: The operator, the copy of this attempt.
        dag: Its DAG.
        claim: What is known of the attempt.
        services: Whom to ask for the rest.
        params: The parameters of the run.
    """
    logical = _moment(claim.logical_us)
    start, end = _moment(claim.interval_start_us), _moment(claim.interval_end_us)
    begun = _EPOCH + timedelta(microseconds=claim.run_started_us)
    conf = decode(claim.conf)
    run = DagRun(claim.dag_id, claim.run_id, claim.run_kind, logical, start, end, begun, logical or begun, conf or {})
    callback = claim.callback
    if callback is not None:
        run = replace(run, state=callback.run_state, end_date=_moment(callback.run_ended_us))
    instance = TaskInstance(task, claim, services, run, params)
    context: dict[str, Any] = {
        "conn": ConnectionAccessor(),
        "dag": dag,
        "dag_run": run,
        "data_interval_end": end,
        "data_interval_start": start,
        "expanded_ti_count": None,
        "fencing_token": claim.epoch,
        "inlets": [],
        "logical_date": logical,
        "macros": macros,
        "map_index_template": None,
        "outlets": [],
        "params": params,
        "run_id": claim.run_id,
        "start_date": instance.start_date,
        "task": task,
        "task_instance": instance,
        "task_instance_key_str": f"{claim.dag_id}__{claim.task_id}__{logical:%Y%m%d}" if logical else instance.key,
        "task_reschedule_count": 0,
        "task_state_store": TaskStateStore(services),
        "test_mode": claim.run_kind == "test",
        "ti": instance,
        "try_number": claim.try_number,
        "var": SimpleNamespace(
            value=VariableAccessor(deserialize_json=False), json=VariableAccessor(deserialize_json=True)
        ),
    }
    return Context({**context, **_format_dates(logical)}, _ask_later(instance))


def _ask_later(instance: TaskInstance) -> dict[str, Callable[[], Any]]:
    """Return what has to be asked for: when the last run before this one that succeeded was."""

    @cache
    def find() -> DagRun | None:
        return instance.get_previous_dagrun("success")

    return {name: partial(_read_earlier, find, field) for name, field in _OF_EARLIER.items()}


def _read_earlier(find: Callable[[], DagRun | None], field: str) -> Any:
    found = find()
    return None if found is None else getattr(found, field)


def _build_run(found: PastRun) -> DagRun:
    began = _moment(found.started_us if found.started_us is not None else found.created_us)
    assert began is not None
    logical = _moment(found.logical_us)
    return DagRun(
        found.dag_id,
        found.run_id,
        found.kind,
        logical,
        _moment(found.interval_start_us),
        _moment(found.interval_end_us),
        began,
        logical or began,
        decode(found.conf) or {},
        _moment(found.ended_us),
        found.state,
    )


def _moment(time_us: int | None) -> datetime | None:
    return None if time_us is None else _EPOCH + timedelta(microseconds=time_us)


def _format_dates(logical: datetime | None) -> dict[str, str]:
    """Return the logical date as texts; a run without one has none of them."""
    if logical is None:
        return {}
    ts = logical.isoformat()
    return {
        "ds": f"{logical:%Y-%m-%d}",
        "ds_nodash": f"{logical:%Y%m%d}",
        "ts": ts,
        "ts_nodash": f"{logical:%Y%m%dT%H%M%S}",
        "ts_nodash_with_tz": ts.replace("-", "").replace(":", ""),
    }


#: The keys about the last run before this one that succeeded, with what they are of that run.
_OF_EARLIER: Final = {
    "prev_data_interval_start_success": "data_interval_start",
    "prev_data_interval_end_success": "data_interval_end",
    "prev_start_date_success": "start_date",
    "prev_end_date_success": "end_date",
}
_COUNTS = "a task does not look at other tasks and runs; use xcom_pull, get_previous_dagrun or get_dagrun_state"
#: What a task instance has in Airflow, and not here.
_LEFT_OUT: Final = {
    **dict.fromkeys(("get_ti_count", "get_dr_count", "get_task_states", "get_task_breadcrumbs"), _COUNTS),
    **dict.fromkeys(("get_previous_ti", "get_previous_start_date", "previous_ti"), _COUNTS),
    "get_relevant_upstream_map_indexes": "tasks are not mapped",
    "rendered_map_index": "tasks are not mapped",
    **dict.fromkeys(("log_url", "mark_success_url"), "it does not know the address of the web UI; use ti.key"),
    **dict.fromkeys(("id", "dag_version_id"), "use ti.key to name it, and ti.fencing_token to tell its attempts apart"),
    "execution_date": "Airflow 3 no longer has it; use logical_date",
}

#: The names of the keys; parameters of `@task` functions with these names get their values.
CONTEXT_KEYS: Final = frozenset(
    {
        *("conn", "dag", "dag_run", "data_interval_end", "data_interval_start", "ds", "ds_nodash", "exception"),
        *("expanded_ti_count", "fencing_token", "inlets", "logical_date", "macros", "map_index_template", "outlets"),
        *("params", "reason", "run_id", "start_date", "task", "task_instance", "task_instance_key_str"),
        *("task_reschedule_count", "task_state_store", "templates_dict", "test_mode", "ti", "try_number", "ts"),
        *("ts_nodash", "ts_nodash_with_tz", "var", *_OF_EARLIER),
    }
)
