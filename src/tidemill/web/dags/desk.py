"""Queries the store for the pages and the API of DAGs, on worker threads; every answer is bounded."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.tasks.alive import SILENT_US
from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.core.tasks.structure import DagStructure
from tidemill.runtime.json.codec import EncodingError, encode
from tidemill.runtime.log.task_lines import decode_lines
from tidemill.runtime.store_clock import STORE_CLOCK
from tidemill.services.conf_lists import check_values, list_mapped_params
from tidemill.services.dev.web_ui import WatchedDags
from tidemill.store.calls.call import Call, CallRefusedError, Listed, RefusalKind
from tidemill.store.calls.callback_calls import ListCallbacks, ReadCallbackLog
from tidemill.store.calls.dag_calls import DagRecord, GetDag, ListDags
from tidemill.store.calls.element_calls import GroupElementFailures, ListElements
from tidemill.store.calls.instance_calls import HistoryRecord, ListGrid, ListTasks, TaskHistory, TaskRecord
from tidemill.store.calls.log_calls import LogPartRecord, ReadLog
from tidemill.store.calls.run_calls import GetRun, ListRuns, RunRecord, StageConfItems
from tidemill.store.calls.service_calls import DescribeServices, ListFileDifferences, ListFiles, ServiceRecord
from tidemill.store.calls.setting_calls import ListPools
from tidemill.store.calls.stream_calls import EventEnvelope, ListTaskEvents
from tidemill.store.calls.xcom_calls import ListXComs
from tidemill.web.dags import models
from tidemill.web.dags.element_counts import compute_rate
from tidemill.web.dags.waiting import Around, describe_wait, look_around
from tidemill.web.problems import RequestProblem

T = TypeVar("T")
PAGE_ROWS = 50
#: The number of runs in a bar chart or a grid.
LATEST_RUNS = 16
MAX_TASKS = 1000
#: A grid with more cells shows fewer runs, but so many at least.
_MAX_CELLS, _LEAST_RUNS = 4_000, 4
_LOG_PARTS = 8
_MICRO = 1_000_000
_TASK_CURSOR = re.compile(r"\d{1,18}:-?\d{1,18}", re.ASCII)
_XCOM_CURSOR = re.compile(r"\d{1,18}:", re.ASCII)
_STATUS = {RefusalKind.UNKNOWN: 404, RefusalKind.INVALID: 422, RefusalKind.CONFLICT: 409, RefusalKind.FENCED: 409}
_BAD_CURSOR = "cursor: expected the cursor of the previous page"
_SILENT = "the store does not answer; see the log of this process"


def to_seconds(value_us: int | None) -> float | None:
    return None if value_us is None else value_us / _MICRO


def bind_stage(dag_id: str, stage: int) -> int:
    """Return the number under which the store keeps the lists that a client sends for a DAG.

    A run of another DAG, whose params have other schemas, does not find them.
    """
    digest = hashlib.blake2b(f"{stage} {dag_id}".encode(), digest_size=8).digest()
    return stage and (int.from_bytes(digest) >> 3) + 1


def count_grid_runs(tasks: int) -> int:
    """Return the number of runs in the grid of a DAG with so many tasks.

    Example:
        >>> [count_grid_runs(tasks) for tasks in (0, 250, 500, 1_000, 100_000)]
        [16, 16, 8, 4, 4]
    """
    return min(LATEST_RUNS, max(_LEAST_RUNS, _MAX_CELLS // max(1, tasks)))


def describe_dag(dag: DagRecord) -> models.Dag:
    fields = {name: getattr(dag, name) for name in models.Dag.model_fields if name not in ("next_at", "tags")}
    return models.Dag(**fields, next_at=to_seconds(dag.next_us), tags=list(dag.tags))


def describe_run(run: RunRecord) -> models.DagRunView:
    plain = ("dag_id", "run_id", "kind", "state", "reason", "version", "conf", "by")
    return models.DagRunView(
        **{name: getattr(run, name) for name in plain},
        logical_at=to_seconds(run.logical_us),
        created_at=run.created_us / _MICRO,
        started_at=to_seconds(run.started_us),
        ended_at=to_seconds(run.ended_us),
    )


def _describe_counts(task: TaskRecord, run: RunRecord) -> models.MapCountsView | None:
    if task.elements is None:
        return None
    rate = compute_rate(task, run.started_us, STORE_CLOCK.now_us())
    return models.MapCountsView(**msgspec.structs.asdict(task.elements), rate=rate)


def _describe_task(task: TaskRecord, wait: models.TaskWaitView | None, run: RunRecord) -> models.DagTaskView:
    plain = ("task_id", "map_index", "state", "operator", "tries", "max_tries", "pool", "pool_slots", "queue")
    return models.DagTaskView(
        **{name: getattr(task, name) for name in (*plain, "priority", "trigger", "error")},
        since=task.since_us / _MICRO,
        started_at=to_seconds(task.started_us),
        ended_at=to_seconds(task.ended_us),
        worker=task.worker,
        waits_for=wait,
        elements=_describe_counts(task, run),
        label=task.label,
        stream=None if task.stream is None else models.TaskStreamView(**msgspec.structs.asdict(task.stream)),
    )


def _describe_service(record: ServiceRecord) -> models.ServiceView:
    one = record.session
    return models.ServiceView(
        session=one.id,
        kind=one.kind,
        name=one.name,
        host=one.host,
        pid=one.pid,
        version=one.version,
        queues=list(one.queues),
        started_at=one.started_us / _MICRO,
        beat_age_seconds=one.quiet_us / _MICRO,
        holds=record.held,
        capacity=one.capacity,
        supervised_by=one.parent,
        is_silent=one.quiet_us >= SILENT_US,
    )


class Desk:
    """Queries the store for pages and API.

    Args:
        watched: The DAGs.
        max_rows: The maximum number of rows in an answer.
    """

    def __init__(self, watched: WatchedDags, max_rows: int) -> None:
        self.watched = watched
        self._max_rows = max_rows

    def limit(self, rows: int) -> int:
        """Return the number of rows of an answer, within the limits."""
        return max(1, min(rows, self._max_rows))

    def ask(self, request: Call[T]) -> T:
        """Return the store's answer to a call; blocks.

        Raises:
            Problem: The store rejects the call, fails, or does not answer.
        """
        return self.ask_all([request])[0]

    def ask_all(self, requests: list[Call[T]]) -> list[T]:
        """Return the store's answers to several calls; see `ask`."""
        try:
            return self.watched.ask_all(requests)
        except CallRefusedError as error:
            raise RequestProblem(_STATUS[error.kind], str(error)) from error
        except (RemoteError, ConfigError) as error:
            raise RequestProblem(503, str(error), {"Retry-After": "5"}) from error
        except TimeoutError:
            raise RequestProblem(503, _SILENT, {"Retry-After": "5"}) from None

    # -- DAGs ----------------------------------------------------------------------------------------------------------

    def list_dags(self, cursor: str, limit: int, tag: str, *, inactive: bool) -> models.DagPage:
        """Return a page of DAGs."""
        found = self.ask(ListDags(cursor or None, self.limit(limit), inactive, tag or None))
        return models.DagPage(rows=[describe_dag(dag) for dag in found.rows], cursor=found.next)

    def list_latest(self, dags: Sequence[models.Dag], count: int = LATEST_RUNS) -> dict[str, list[models.DagRunView]]:
        """Return the latest runs of each DAG, oldest first."""
        if not dags:
            return {}
        calls: list[Call[Listed[RunRecord]]] = [ListRuns(dag.dag_id, limit=count) for dag in dags]
        answers = self.ask_all(calls)
        latest = ([describe_run(run) for run in reversed(answer.rows)] for answer in answers)
        return {dag.dag_id: runs for dag, runs in zip(dags, latest, strict=True)}

    def list_files(self, *, broken: bool = False) -> list[models.File]:
        return [
            models.File(path=file.path, error=file.error, parsed_at=file.parsed_us / _MICRO, dags=list(file.dags))
            for file in self.ask(ListFiles(broken))
        ]

    def list_differences(self) -> list[models.FileDifferenceView]:
        """Return the files that live services lack, or have with another content."""
        return [
            models.FileDifferenceView(
                **{name: getattr(one, name) for name in models.FileDifferenceView.model_fields if name != "since"},
                since=one.since_us / _MICRO,
            )
            for one in self.ask(ListFileDifferences())
        ]

    def list_pools(self) -> list[models.Pool]:
        return [models.Pool(**msgspec.structs.asdict(pool)) for pool in self.ask(ListPools())]

    def get_dag(self, dag_id: str, version: int | None = None) -> tuple[models.Dag, DagStructure]:
        """Return a DAG and its structure.

        Raises:
            Problem: There is no such DAG.
        """
        found = self.ask(GetDag(dag_id, version))
        if found is None:
            raise RequestProblem(404, f"there is no DAG {dag_id!r}")
        return describe_dag(found.dag), msgspec.json.decode(found.structure, type=DagStructure)

    def list_services(self) -> list[models.ServiceView]:
        """Return the live services of all hosts."""
        return [_describe_service(one) for one in self.ask(DescribeServices())]

    # -- runs ----------------------------------------------------------------------------------------------------------

    def stage_list(self, dag_id: str, part: models.ConfListPart, by: str) -> int:
        """Store a part of a list that a user sends for a new run, and return the number of its values so far.

        Raises:
            Problem: No task is mapped over the list, or a value does not match the schema of its param.
        """
        _, structure = self.get_dag(dag_id)
        if part.name not in list_mapped_params(structure):
            raise RequestProblem(422, f"no task of DAG {dag_id!r} is mapped over {part.name!r}; give it in conf")
        try:
            check_values(structure, part.name, part.values, part.first)
            values = tuple(
                encode(value, f"{part.name}[{number}]") for number, value in enumerate(part.values, part.first)
            )
        except (ConfigError, EncodingError) as error:
            raise RequestProblem(422, str(error)) from error
        stage, most = bind_stage(dag_id, part.stage), self.watched.settings.dags.max_map_length
        self.ask(StageConfItems(stage, part.name, part.first, values, most, by))
        return part.first + len(values)

    def list_runs(self, dag_id: str | None, cursor: str, limit: int, states: tuple[str, ...]) -> models.RunPage:
        """Return a page of runs."""
        _check_number(cursor)
        found = self.ask(ListRuns(dag_id, states, cursor or None, self.limit(limit)))
        return models.RunPage(rows=[describe_run(run) for run in found.rows], cursor=found.next)

    def find_run(self, dag_id: str, run_id: str) -> RunRecord:
        """Return a run.

        Raises:
            Problem: There is no such run.
        """
        found = self.ask(GetRun(dag_id, run_id))
        if found is None:
            raise RequestProblem(404, f"DAG {dag_id!r} has no run {run_id!r}")
        return found

    def list_tasks(
        self, dag_id: str, run_id: str, cursor: str = "", limit: int = MAX_TASKS, states: tuple[str, ...] = ()
    ) -> tuple[RunRecord, DagStructure, models.DagTaskPage]:
        """Return a run, its structure, and a page of its tasks, each with the reason why it waits."""
        if cursor and not _TASK_CURSOR.fullmatch(cursor):
            raise RequestProblem(422, _BAD_CURSOR)
        run = self.find_run(dag_id, run_id)
        dag, structure = self.get_dag(dag_id, run.version)
        is_first = not cursor and not states and limit == MAX_TASKS
        found = self.ask(ListTasks(dag_id, run_id, states, cursor or None, limit if is_first else self.limit(limit)))
        every = found.rows
        if not is_first or any(task.map_index != UNMAPPED for task in found.rows):
            every = self._list_unmapped(dag_id, run_id)
        rows, around = self._describe_tasks(found.rows, every, run, dag, structure)
        missing = around.alive.explain_all() if run.ended_us is None else ""
        return run, structure, models.DagTaskPage(rows=rows, cursor=found.next, missing=missing)

    def _describe_tasks(
        self,
        found: Sequence[TaskRecord],
        every: Sequence[TaskRecord],
        run: RunRecord,
        dag: models.Dag,
        structure: DagStructure,
    ) -> tuple[list[models.DagTaskView], Around]:
        """Describe task instances; `every`: the tasks of the run, without elements of mapped tasks."""
        state_of = {task.task_id: task.state for task in every}
        around = look_around(self.ask, structure, found, dag.file, paused=dag.paused)
        plans = {task.id: task for task in structure.tasks}
        groups = structure.list_groups()
        rows = []
        for task in found:
            plan = plans.get(task.task_id)
            inside = () if plan is None else groups.get(plan.mapped_group, ())
            rows.append(_describe_task(task, describe_wait(task, plan, state_of, run, around, inside), run))
        return rows, around

    def _list_unmapped(self, dag_id: str, run_id: str) -> tuple[TaskRecord, ...]:
        return self.ask(ListTasks(dag_id, run_id, limit=MAX_TASKS, map_index=UNMAPPED)).rows

    def find_task(
        self, dag_id: str, run_id: str, task_id: str, map_index: int
    ) -> tuple[RunRecord, DagStructure, models.DagTaskView]:
        """Return a run, its structure, and a task instance of it.

        Raises:
            Problem: There is no such instance.
        """
        run = self.find_run(dag_id, run_id)
        dag, structure = self.get_dag(dag_id, run.version)
        found = self.ask(ListTasks(dag_id, run_id, task_id=task_id, map_index=map_index)).rows
        if not found:
            raise RequestProblem(404, f"run {run_id!r} has no task {format_instance(task_id, map_index)!r}")
        rows, _ = self._describe_tasks(found, self._list_unmapped(dag_id, run_id), run, dag, structure)
        return run, structure, rows[0]

    def find_attempt(self, run: RunRecord, structure: DagStructure, task_id: str) -> models.DagTaskView | None:
        """Return the attempt of a task that runs all elements in one; None: it has not begun, or is another task."""
        plan = next((one for one in structure.tasks if one.id == task_id), None)
        if plan is None or plan.mapped is None or not plan.mapped.iterated:
            return None
        found = self.ask(ListTasks(run.dag_id, run.run_id, task_id=task_id, map_index=None)).rows
        attempts = [task for task in found if task.map_index == 0]
        return _describe_task(attempts[0], None, run) if attempts else None

    def list_instances(
        self, run: RunRecord, structure: DagStructure, names: Sequence[str], map_index: int
    ) -> list[models.DagTaskView]:
        """Return the instances of some tasks that have this index, each with the reason why it waits."""
        calls: list[Call[Listed[TaskRecord]]] = [
            ListTasks(run.dag_id, run.run_id, task_id=name, map_index=map_index) for name in names
        ]
        found = [task for answer in self.ask_all(calls) for task in answer.rows]
        dag, _ = self.get_dag(run.dag_id, run.version)
        return self._describe_tasks(found, self._list_unmapped(run.dag_id, run.run_id), run, dag, structure)[0]

    def list_states(
        self, dag_id: str, run_id: str, names: Sequence[str], first: int, last: int
    ) -> dict[int, list[tuple[str, str]]]:
        """Return the names and states of the instances of some mapped tasks by index, within a range of indexes."""
        calls: list[Call[Listed[TaskRecord]]] = [
            ListElements(dag_id, run_id, name, first=first, last=last, limit=last - first + 1) for name in names
        ]
        found: dict[int, list[tuple[str, str]]] = {}
        for answer in self.ask_all(calls):
            for task in answer.rows:
                found.setdefault(task.map_index, []).append((task.task_id, task.state))
        return found

    def list_elements(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        cursor: str = "",
        limit: int = PAGE_ROWS,
        states: tuple[str, ...] = (),
        indexes: tuple[int | None, int | None] = (None, None),
    ) -> models.ElementPage:
        """Return a page of the elements of a mapped task, each with the reason why it waits."""
        _check_number(cursor)
        run = self.find_run(dag_id, run_id)
        dag, structure = self.get_dag(dag_id, run.version)
        found = self.ask(ListElements(dag_id, run_id, task_id, states, *indexes, cursor or None, self.limit(limit)))
        rows, _ = self._describe_tasks(found.rows, self._list_unmapped(dag_id, run_id), run, dag, structure)
        return models.ElementPage(rows=rows, cursor=found.next)

    def group_failures(self, dag_id: str, run_id: str, task_id: str) -> models.FailureGroupsView:
        """Return the failures of a mapped task, or of the tasks of a mapped group, by error."""
        run = self.find_run(dag_id, run_id)
        _, structure = self.get_dag(dag_id, run.version)
        inside = structure.list_groups().get(task_id)
        names = inside or [task_id]
        answers = self.ask_all([GroupElementFailures(dag_id, run_id, name) for name in names])
        groups = [
            models.ElementFailureGroup(task_id=name, **msgspec.structs.asdict(group))
            for name, found in zip(names, answers, strict=True)
            for group in found.groups
            # In a group, these follow from the failure of another task.
            if inside is None or group.error != "upstream_failed"
        ]
        groups.sort(key=lambda group: (-group.elements, group.first))
        elements = sum(group.elements for group in groups)
        return models.FailureGroupsView(groups=groups, elements=elements, more=any(found.more for found in answers))

    def list_grid(
        self, dag_id: str, count: int
    ) -> tuple[list[models.DagRunView], dict[str, dict[str, models.GridCell]]]:
        """Return the latest runs, oldest first, and the states of their tasks by task and run."""
        found = self.ask(ListRuns(dag_id, limit=count)).rows[::-1]
        names = {run.id: run.run_id for run in found}
        cells: dict[str, dict[str, models.GridCell]] = {}
        for task in self.ask(ListGrid(tuple(names), MAX_TASKS)) if names else ():
            cell = models.GridCell(task.state, task.elements)
            cells.setdefault(task.task_id, {})[names[task.run]] = cell
        return [describe_run(run) for run in found], cells

    # -- a task --------------------------------------------------------------------------------------------------------

    def list_history(
        self, dag_id: str, run_id: str, task_id: str, map_index: int, cursor: str, limit: int
    ) -> models.ChangePage:
        """Return a page of a task's history."""
        _check_number(cursor)
        found = self.ask(TaskHistory(dag_id, run_id, task_id, map_index, cursor or None, self.limit(limit)))
        return models.ChangePage(rows=[_describe_change(change) for change in found.rows], cursor=found.next)

    def list_events(
        self, dag_id: str, run_id: str, task_id: str, map_index: int, cursor: str, limit: int
    ) -> models.TaskEventPage:
        """Return a page of the events of a task's latest trigger."""
        _check_number(cursor)
        found = self.ask(ListTaskEvents(dag_id, run_id, task_id, map_index, cursor or None, self.limit(limit)))
        return models.TaskEventPage(rows=[_describe_event(event) for event in found.rows], cursor=found.next)

    def read_log(
        self, dag_id: str, run_id: str, task_id: str, map_index: int, try_number: int | None, cursor: str
    ) -> models.LogPage:
        """Return the next lines of a task's log, and a cursor to continue while the log is being written."""
        _check_number(cursor)
        return self._read_parts(
            ReadLog(dag_id, run_id, task_id, map_index, try_number, cursor or None, _LOG_PARTS), cursor
        )

    def list_callbacks(self, dag_id: str, run_id: str, cursor: str = "", limit: int = PAGE_ROWS) -> models.CallbackPage:
        """Return a page of the callbacks of a run, and of the failed callbacks of its tasks."""
        _check_number(cursor)
        found = self.ask(ListCallbacks(dag_id, run_id, cursor or None, self.limit(limit)))
        rows = [
            models.CallbackView(
                id=one.id,
                task_id=one.task_id,
                map_index=one.map_index,
                name=one.name,
                state=one.state,
                error=one.error,
                due_at=one.created_us / _MICRO,
                ended_at=to_seconds(one.ended_us),
            )
            for one in found.rows
        ]
        return models.CallbackPage(rows=rows, cursor=found.next)

    def read_callback_log(self, dag_id: str, run_id: str, callback: int, cursor: str = "") -> models.LogPage:
        """Return the next log lines of a callback of a run itself."""
        _check_number(cursor)
        return self._read_parts(ReadCallbackLog(dag_id, run_id, callback, cursor or None, _LOG_PARTS), cursor)

    def _read_parts(self, call: Call[Listed[LogPartRecord]], cursor: str) -> models.LogPage:
        found = self.ask(call)
        lines = [
            models.LogLineView(at=line.time_us / _MICRO, level=line.level, source=line.source, text=line.text)
            for part in found.rows
            for line in decode_lines(zlib.decompress(part.data))
        ]
        following = str(found.rows[-1].number) if found.rows else (cursor or None)
        return models.LogPage(rows=lines, cursor=following, ended=found.next is None)

    def list_xcoms(
        self,
        dag_id: str,
        run_id: str,
        task_id: str | None,
        map_index: int | None,
        cursor: str,
        limit: int,
        last_index: int | None = None,
    ) -> models.XComPage:
        """Return a page of XComs; with `map_index` None, the XComs of all instances."""
        if cursor and not _XCOM_CURSOR.match(cursor):
            raise RequestProblem(422, _BAD_CURSOR)
        found = self.ask(ListXComs(dag_id, run_id, task_id, cursor or None, self.limit(limit), map_index, last_index))
        rows = [
            models.XCom(
                task_id=one.task_id,
                map_index=one.map_index,
                key=one.key,
                value=one.value,
                created_at=one.created_us / _MICRO,
            )
            for one in found.rows
        ]
        return models.XComPage(rows=rows, cursor=found.next)


def _check_number(cursor: str) -> None:
    if cursor and not (cursor.isascii() and cursor.isdecimal() and len(cursor) < 19):
        raise RequestProblem(422, _BAD_CURSOR)


def _describe_event(event: EventEnvelope) -> models.TaskEventView:
    plain = ("trigger_run_id", "sequence_index", "payload", "identity", "is_last")
    return models.TaskEventView(**{name: getattr(event, name) for name in plain}, at=event.created_us / _MICRO)


def _describe_change(change: HistoryRecord) -> models.Change:
    fields = {name: getattr(change, name) for name in ("epoch", "before", "after", "given", "by", "detail")}
    return models.Change(**fields, at=change.at_us / _MICRO)
