"""The context of a running task, with Airflow's keys.

`fencing_token` has no counterpart in Airflow: it rises with each attempt of the task, so that an external system can
refuse late writes of an earlier attempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, Final

from tidemill.dags.attempt.lazy_context import Context
from tidemill.dags.attempt.task_services import AttemptClaim, TaskServices
from tidemill.dags.context.connection import ConnectionAccessor
from tidemill.dags.context.dag_run import EPOCH, DagRun, open_lists, read_moment
from tidemill.dags.context.macros import macros
from tidemill.dags.context.task_instance import TaskInstance
from tidemill.dags.context.task_state import TaskStateStore
from tidemill.dags.context.variable import VariableAccessor
from tidemill.runtime.json.codec import decode

#: Keys of the last successful run before this one, each with the field of that run.
_OF_EARLIER: Final = {
    "prev_data_interval_start_success": "data_interval_start",
    "prev_data_interval_end_success": "data_interval_end",
    "prev_start_date_success": "start_date",
    "prev_end_date_success": "end_date",
}
#: All keys of the context; a parameter of a `@task` function with one of these names receives its value.
CONTEXT_KEYS: Final = frozenset(
    {
        *("conn", "dag", "dag_run", "data_interval_end", "data_interval_start", "ds", "ds_nodash", "exception"),
        *("expanded_ti_count", "fencing_token", "inlets", "logical_date", "macros", "map_index_template", "outlets"),
        *("loop", "params", "reason", "run_id", "start_date", "task", "task_instance", "task_instance_key_str"),
        *("task_reschedule_count", "task_state_store", "templates_dict", "test_mode", "ti", "try_number", "ts"),
        *("ts_nodash", "ts_nodash_with_tz", "var", *_OF_EARLIER),
    }
)


def build_context(task: Any, dag: Any, claim: AttemptClaim, services: TaskServices, params: dict[str, Any]) -> Context:
    """Return the context of an attempt.

    Args:
        task: The operator, as copied for this attempt.
        dag: The DAG of the task.
        claim: The attempt, as the worker claimed it.
        services: Access to XComs, variables, connections and other runs.
        params: The params of the run.
    """
    values = build_run_values(claim, params, services)
    run: DagRun = values["dag_run"]
    logical = run.logical_date
    instance = TaskInstance(task, claim, services, run, params)
    group = None if task is None else task.mapped_group
    build_loop = getattr(group, "build_state", None)
    loop = {} if build_loop is None else {"loop": build_loop(claim.map_index, services)}
    context: dict[str, Any] = {
        **values,
        **loop,
        "conn": ConnectionAccessor(),
        "dag": dag,
        "fencing_token": claim.epoch,
        "inlets": [],
        "macros": macros,
        "map_index_template": getattr(task, "map_index_template", None),
        "outlets": [],
        "start_date": instance.start_date,
        "task": task,
        "task_instance": instance,
        "task_instance_key_str": f"{claim.dag_id}__{claim.task_id}__{logical:%Y%m%d}" if logical else instance.key,
        "task_reschedule_count": 0,
        "task_state_store": TaskStateStore(services),
        "test_mode": claim.run_kind == "test",
        "ti": instance,
        "var": SimpleNamespace(
            value=VariableAccessor(deserialize_json=False), json=VariableAccessor(deserialize_json=True)
        ),
    }
    return Context(context, _ask_later(instance))


def build_run_values(
    claim: AttemptClaim, params: Mapping[str, Any], services: TaskServices | None = None
) -> dict[str, Any]:
    """Return the values of a context that come from the claim alone.

    Args:
        claim: The attempt, or the task that starts in a trigger.
        params: The params of the run.
        services: Access to the store; None: long lists in the configuration of the run are left out.
    """
    logical = read_moment(claim.logical_us)
    start, end = read_moment(claim.interval_start_us), read_moment(claim.interval_end_us)
    begun = EPOCH + timedelta(microseconds=claim.run_started_us)
    conf = open_lists(decode(claim.conf) or {}, services)
    run = DagRun(claim.dag_id, claim.run_id, claim.run_kind, logical, start, end, begun, logical or begun, conf)
    callback = claim.callback
    if callback is not None:
        run = replace(run, state=callback.run_state, end_date=read_moment(callback.run_ended_us))
    return {
        "dag_run": run,
        "data_interval_end": end,
        "data_interval_start": start,
        "expanded_ti_count": claim.map_length if claim.map_index >= 0 else None,
        "logical_date": logical,
        "params": params,
        "run_id": claim.run_id,
        "try_number": claim.try_number,
        **_format_dates(logical),
    }


def _ask_later(instance: TaskInstance) -> dict[str, Callable[[], Any]]:
    """Return the keys whose values need a request to the store: the dates of the last successful run before."""

    @cache
    def find() -> DagRun | None:
        return instance.get_previous_dagrun("success")

    return {name: partial(_read_earlier, find, field) for name, field in _OF_EARLIER.items()}


def _read_earlier(find: Callable[[], DagRun | None], field: str) -> Any:
    found = find()
    return None if found is None else getattr(found, field)


def _format_dates(logical: datetime | None) -> dict[str, str]:
    """Return the keys that format the logical date; none for a run without one."""
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
