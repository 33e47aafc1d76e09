"""Builds the structure of a DAG: the plain values that the store keeps and that all code outside tasks reads.

Invariant: a file yields the same structure in every process; nothing in it depends on set order or object addresses.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Final, cast

import msgspec

from tidemill.core.errors import describe_error
from tidemill.core.tasks.structure import (
    DagStructure,
    MapSource,
    MapStructure,
    ParamStructure,
    ScheduleStructure,
    StartStructure,
    TaskStructure,
)
from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError
from tidemill.dags.params import Param
from tidemill.dags.structure.order import Linked, sort_tasks
from tidemill.dags.structure.structures import read_structure, write_structure
from tidemill.runtime.json.codec import encode_sorted

#: Larger structures are refused, because every decision about a DAG reads its structure.
MAX_BYTES: Final = 4 << 20
_MICROSECOND: Final = timedelta(microseconds=1)
_TASK_CALLBACKS: Final = ("on_success", "on_failure", "on_retry", "on_skipped")
_DAG_CALLBACKS: Final = ("on_success", "on_failure")


def serialize_dag(dag: Any) -> bytes:
    """Return the structure of a DAG as JSON.

    Raises:
        DagError: The structure is larger than 4 MiB, or a param or a later changed attribute cannot be serialized.
    """
    try:
        text = write_structure(build_structure(dag))
        read_structure(text)
    except DagError:
        raise
    except (AttributeError, TypeError, ValueError) as error:
        raise DagError(
            f"DAG {dag.dag_id!r}: an attribute of the DAG or of a task was changed after creation and has an invalid "
            f"value: {describe_error(error)}"
        ) from error
    if len(text) > MAX_BYTES:
        raise DagError(
            f"DAG {dag.dag_id!r} has {len(dag.task_dict)} tasks and takes {len(text):,} bytes as JSON; at most "
            f"{MAX_BYTES:,} are allowed: split it, or shorten its documentation"
        )
    return text


def build_structure(dag: Any) -> DagStructure:
    """Return the structure of a validated DAG."""
    name = f"DAG {dag.dag_id!r}"
    priorities = _Priorities(dag.task_dict, dag.links)
    scopes = _find_scopes(dag.task_dict)
    tasks = (
        _build_task(task, priorities.find(task_id), scopes.get(task_id, set()))
        for task_id, task in dag.task_dict.items()
    )
    return DagStructure(
        id=dag.dag_id,
        tasks=tuple(sorted((*tasks, *map(_build_group, dag.mapped_groups)), key=lambda task: task.id)),
        schedule=_build_schedule(dag),
        params=tuple(_build_param(name, key, param) for key, param in sorted(dag.params.items())),
        tags=tuple(sorted(dag.tags)),
        doc=dag.doc_md or dag.description or "",
        label=dag.dag_display_name,
        groups={key: dag.groups[key].label for key in sorted(dag.groups)},
        max_active_runs=dag.max_active_runs,
        max_active_tasks=dag.max_active_tasks,
        run_timeout_us=_read_us(dag, "dagrun_timeout"),
        fail_fast=dag.fail_fast,
        callbacks=_list_callbacks(dag, _DAG_CALLBACKS),
    )


def _build_task(task: Any, priority: int, scope: set[str]) -> TaskStructure:
    tasks = task.dag.task_dict
    upstream = tuple(sorted(task.upstream_task_ids))
    group = task.mapped_group
    labels = {after: task.dag.edge_labels.get((task.task_id, after)) for after in sorted(task.downstream_task_ids)}
    return TaskStructure(
        id=task.task_id,
        operator=task.task_type,
        rule=task.trigger_rule,
        upstream=upstream,
        setups=tuple(name for name in upstream if tasks[name].is_setup),
        scope=() if task.is_teardown else tuple(sorted(scope - task.upstream_task_ids)),
        is_setup=task.is_setup,
        is_teardown=task.is_teardown,
        fails_run=task.on_failure_fail_dagrun,
        group=task.task_group.group_id,
        label=task.task_display_name or ("" if task.label == task.task_id else task.label),
        doc=task.doc_md or "",
        queue=task.queue,
        pool=task.pool,
        pool_slots=task.pool_slots,
        priority=priority,
        retries=task.retries,
        retry_delay_us=_read_us(task, "retry_delay") or 0,
        exponential=task.retry_exponential_backoff,
        max_retry_delay_us=_read_us(task, "max_retry_delay") or 0,
        execution_timeout_us=_read_us(task, "execution_timeout"),
        soft_fail=task.soft_fail or task.never_fail,
        depends_on_past=task.depends_on_past,
        wait_for_downstream=task.wait_for_downstream,
        max_active_per_dag=task.max_active_tis_per_dag,
        max_active_per_run=task.max_active_tis_per_dagrun,
        callbacks=_list_callbacks(task, _TASK_CALLBACKS),
        edge_labels={after: label for after, label in labels.items() if label},
        is_sensor=task.is_sensor,
        template_fields=tuple(task.template_fields),
        mapped=task.map_structure if task.is_mapped else None if group is None else _map_over_group(task, group),
        is_generator=task.is_generator,
        start=_describe_start(task),
        mapped_group="" if group is None else group.group_id,
    )


def _map_over_group(task: Any, group: Any) -> MapStructure:
    return MapStructure((), (MapSource("group", task=group.group_id),), index_template=task.map_index_template or "")


def _build_group(group: Any) -> TaskStructure:
    """Return the task that stands for a mapped group."""
    return TaskStructure(
        id=group.group_id,
        operator="TaskGroup",
        upstream=tuple(sorted(group.source_ids)),
        group=group.parent_group.group_id,
        label="" if group.label == group.group_id else group.label,
        doc=group.tooltip,
        pool_slots=0,
        mapped=group.map_structure,
        is_group=True,
    )


def _describe_start(task: Any) -> StartStructure | None:
    if not task.start_from_trigger:
        return None
    # That module imports Jinja, and few files need it.
    return cast(
        "StartStructure | None", importlib.import_module("tidemill.dags.triggers.starting").describe_start(task)
    )


def _build_schedule(dag: Any) -> ScheduleStructure:
    found = dag.timetable
    return ScheduleStructure(
        kind=found.kind,
        cron=found.cron,
        zone=found.zone,
        interval_us=None if found.interval is None else found.interval // _MICROSECOND,
        start_us=_moment(found.start),
        end_us=_moment(found.end),
        catchup=dag.catchup,
    )


def _build_param(owner: str, name: str, param: Param) -> ParamStructure:
    try:
        default = encode_sorted(param.default, f"the default of param {name!r}") if param.has_default else None
    except ValueError as error:
        raise DagError(f"{owner}: {error}") from error
    # JSON object keys are strings, so the numbers in `values_display={1: "one"}` become strings.
    schema = msgspec.json.encode(json.loads(json.dumps(param.schema)), order="sorted").decode()
    return ParamStructure(name, default, schema, param.description or "")


def _list_callbacks(owner: Any, names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if getattr(owner, f"{name}_callback"))


def _read_us(owner: Any, name: str) -> int | None:
    """Return a duration in microseconds. The file may have changed it since it was first checked, so check it again."""
    value = getattr(owner, name)
    label = f"task {owner.task_id!r}" if hasattr(owner, "task_id") else f"DAG {owner.dag_id!r}"
    return None if value is None else check_duration(label, name, value, zero=True) // _MICROSECOND


def _moment(moment: datetime | None) -> int | None:
    return None if moment is None else (moment - datetime(1970, 1, 1, tzinfo=moment.tzinfo)) // _MICROSECOND


class _Priorities:
    """Computes the effective priorities of tasks by their weight rules.

    A set of tasks is an int with one bit for each task, which keeps the sums fast in chains of thousands of tasks.
    """

    def __init__(self, tasks: Mapping[str, Any], links: Mapping[str, Linked]) -> None:
        self._tasks, self._links = tasks, links
        self._order = sort_tasks(links)
        self._bits = {name: 1 << number for number, name in enumerate(self._order)}
        self._masks: dict[int, int] = {}
        for name, task in tasks.items():
            self._masks[task.priority_weight] = self._masks.get(task.priority_weight, 0) | self._bits[name]
        self._reach: dict[str, dict[str, int]] = {}

    def find(self, task_id: str) -> int:
        task = self._tasks[task_id]
        # Elements of a map are ordered among themselves by their index.
        if task.weight_rule == "absolute" or task.is_mapped or task.mapped_group is not None:
            return int(task.priority_weight)
        reached = self._find_reach(task.weight_rule)[task_id]
        total = sum(weight * (reached & mask).bit_count() for weight, mask in self._masks.items())
        # The store's column has 32 bits.
        return max(min(total, (1 << 31) - 1), -(1 << 31))

    def _find_reach(self, rule: str) -> dict[str, int]:
        """Return, for each task, the bits of the task and of all tasks downstream or upstream of it."""
        if rule not in self._reach:
            downstream = rule == "downstream"
            found: dict[str, int] = {}
            for name in reversed(self._order) if downstream else self._order:
                task = self._links[name]
                found[name] = self._bits[name]
                for next_one in task.downstream_task_ids if downstream else task.upstream_task_ids:
                    found[name] |= found[next_one]
            self._reach[rule] = found
        return self._reach[rule]


def _find_scopes(tasks: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return, for each task, the setups whose scope contains it.

    A setup's scope is all tasks downstream of it; if teardowns directly follow the setup, only those upstream of a
    teardown. That of a setup in a mapped group ends with the group.
    """
    scopes: dict[str, set[str]] = {}
    for name, setup in tasks.items():
        if not setup.is_setup:
            continue
        inside = setup.dag.find_relatives(name)
        teardowns = [after for after in setup.downstream_task_ids if tasks[after].is_teardown]
        if teardowns:
            before = [setup.dag.find_relatives(teardown, upstream=True) for teardown in teardowns]
            inside &= set().union(*before)
        if (group := setup.mapped_group) is not None:
            inside &= {task.task_id for task in group.iter_tasks()}
        for task_id in inside:
            scopes.setdefault(task_id, set()).add(name)
    return scopes
