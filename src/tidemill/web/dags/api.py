"""The REST API of DAGs; the guard has checked role, token and origin before a change gets here."""

from __future__ import annotations

from typing import Annotated

import msgspec
from fastapi import Path, Query
from starlette.requests import Request

from tidemill.core.tasks.instance import MAX_INDEX
from tidemill.core.tasks.structure import hide_arguments
from tidemill.core.wording import format_count
from tidemill.runtime.json.codec import EncodingError, encode
from tidemill.services.conf_lists import mark_lists
from tidemill.store.calls.dag_calls import PauseDag
from tidemill.store.calls.instance_calls import ClearTasks, MarkTasks
from tidemill.store.calls.run_calls import CancelRun, CreateRun
from tidemill.web.dags import models
from tidemill.web.dags.desk import PAGE_ROWS, Desk, bind_stage, describe_run
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.workers import BlockingRoute

RUN_STATES = ("queued", "running", "success", "failed")
_OPEN_STATES = ("none", "scheduled", "queued", "running", "deferred", "up_for_retry", "ending")
_ENDED_STATES = ("success", "failed", "skipped", "upstream_failed")
TASK_STATES = (*_OPEN_STATES, "mapped", *_ENDED_STATES)
ELEMENT_STATES = (*_OPEN_STATES, "mapped", *_ENDED_STATES, "removed")
Cursor = Annotated[str, Query(max_length=2100, description="The cursor of the previous page.")]
Limit = Annotated[int, Query(ge=1, description="The maximum number of rows, up to debug.max_ui_rows.")]
RunState = Annotated[list[str], Query(description=", ".join(RUN_STATES))]
TaskState = Annotated[list[str], Query(description=", ".join(TASK_STATES))]
ElementState = Annotated[list[str], Query(description=", ".join(ELEMENT_STATES))]
FirstIndex = Annotated[
    int | None, Query(ge=0, le=MAX_INDEX, description="The lowest index; default: from the beginning.")
]
LastIndex = Annotated[int | None, Query(ge=0, le=MAX_INDEX, description="The highest index; default: to the end.")]
Tag = Annotated[str, Query(max_length=250, description="Only DAGs with this tag.")]
DagId = Annotated[str, Path(max_length=250)]
RunId = Annotated[str, Path(max_length=250)]
TaskId = Annotated[str, Path(max_length=2000)]
MapIndex = Annotated[
    int,
    Query(ge=-1, le=MAX_INDEX, description="The index of an element of a mapped task; -1: the task itself."),
]
AnyMapIndex = Annotated[
    int | None,
    Query(ge=-1, le=MAX_INDEX, description="Only XComs of the instances with this index; default: of all instances."),
]
LastXComIndex = Annotated[
    int | None, Query(ge=0, le=MAX_INDEX, description="The last index of a range that begins at map_index.")
]
CallbackId = Annotated[int, Path(ge=1, le=2**42)]
Try = Annotated[
    int | None, Query(alias="try", ge=0, le=10**6, description="The number of the try; default: the last one.")
]
_BASE = "/dags/{dag_id}/runs/{run_id}"
_TASK = f"{_BASE}/tasks/{{task_id}}"


def check_states(states: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """Return the states that a query parameter lists.

    Raises:
        Problem: A state is unknown.
    """
    chosen = tuple(state for state in states if state)
    for state in chosen:
        if state not in known:
            raise RequestProblem(422, f"state: expected one of {', '.join(known)}, not {state!r}")
    return chosen


def build_api(desk: Desk) -> Routes:
    router = Routes(route_class=BlockingRoute)
    _add_dags(router, desk)
    _add_tasks(router, desk)
    _add_changes(router, desk)
    _add_task_changes(router, desk)
    return router


def _add_dags(router: Routes, desk: Desk) -> None:
    @router.get("/dags", tags=["dags"], summary="All DAGs, by id")
    def list_dags(
        tag: Tag = "", inactive: bool = False, cursor: Cursor = "", limit: Limit = PAGE_ROWS
    ) -> models.DagPage:
        return desk.list_dags(cursor, limit, tag, inactive=inactive)

    @router.get("/dag-files", tags=["dags"], summary="The files of DAGs, with errors of those that cannot be parsed")
    def list_files(broken: bool = False) -> list[models.File]:
        return desk.list_files(broken=broken)

    @router.get(
        "/dag-file-differences",
        tags=["dags"],
        summary="The DAG files that live services lack, or have with another content",
    )
    def list_differences() -> list[models.FileDifferenceView]:
        return desk.list_differences()

    @router.get("/services", tags=["dags"], summary="The live services of all hosts, with what they run")
    def list_services() -> list[models.ServiceView]:
        return desk.list_services()

    @router.get("/pools", tags=["dags"], summary="The pools of slots")
    def list_pools() -> list[models.Pool]:
        return desk.list_pools()

    @router.get("/dags/{dag_id}", tags=["dags"], summary="A DAG with its structure")
    def read_dag(dag_id: DagId) -> models.DagDetailsView:
        dag, structure = desk.get_dag(dag_id)
        return models.DagDetailsView(dag=dag, structure=msgspec.to_builtins(hide_arguments(structure)))

    @router.get("/dag-runs", tags=["dags"], summary="The runs of all DAGs, newest first")
    def list_all_runs(
        state: RunState = [],  # noqa: B006 - FastAPI copies it
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.RunPage:
        return desk.list_runs(None, cursor, limit, check_states(state, RUN_STATES))

    @router.get("/dags/{dag_id}/runs", tags=["dags"], summary="The runs of a DAG, newest first")
    def list_runs(
        dag_id: DagId,
        state: RunState = [],  # noqa: B006
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.RunPage:
        desk.get_dag(dag_id)
        return desk.list_runs(dag_id, cursor, limit, check_states(state, RUN_STATES))

    @router.get(_BASE, tags=["dags"], summary="A run")
    def read_run(dag_id: DagId, run_id: RunId) -> models.DagRunView:
        return describe_run(desk.find_run(dag_id, run_id))


def _add_tasks(router: Routes, desk: Desk) -> None:
    @router.get(f"{_BASE}/tasks", tags=["dags"], summary="The tasks of a run, each with the reason why it waits")
    def list_tasks(
        dag_id: DagId,
        run_id: RunId,
        state: TaskState = [],  # noqa: B006
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.DagTaskPage:
        return desk.list_tasks(dag_id, run_id, cursor, limit, check_states(state, TASK_STATES))[2]

    @router.get(_TASK, tags=["dags"], summary="A task, with the reason why it waits")
    def read_task(dag_id: DagId, run_id: RunId, task_id: TaskId, map_index: MapIndex = -1) -> models.DagTaskView:
        return desk.find_task(dag_id, run_id, task_id, map_index)[2]

    @router.get(
        f"{_TASK}/elements",
        tags=["dags"],
        summary="The elements of a mapped task or group, by index",
        description="`state` may be repeated. `first` and `last` limit the indexes. An element of a mapped group is "
        "`mapped` while its tasks run. If few elements are in the states, a page may be empty although `cursor` names "
        "a next one.",
    )
    def list_elements(
        dag_id: DagId,
        run_id: RunId,
        task_id: TaskId,
        state: ElementState = [],  # noqa: B006
        first: FirstIndex = None,
        last: LastIndex = None,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.ElementPage:
        states = check_states(state, ELEMENT_STATES)
        return desk.list_elements(dag_id, run_id, task_id, cursor, limit, states, (first, last))

    @router.get(
        f"{_TASK}/failures",
        tags=["dags"],
        summary="The failed elements of a mapped task, or of the tasks of a mapped group, grouped by error",
        description="Only the first 1,000 failed elements of each task are grouped; `more` says whether there are "
        "others.",
    )
    def group_failures(dag_id: DagId, run_id: RunId, task_id: TaskId) -> models.FailureGroupsView:
        return desk.group_failures(dag_id, run_id, task_id)

    @router.get(f"{_TASK}/history", tags=["dags"], summary="The history of a task, oldest first")
    def read_history(
        dag_id: DagId,
        run_id: RunId,
        task_id: TaskId,
        map_index: MapIndex = -1,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.ChangePage:
        return desk.list_history(dag_id, run_id, task_id, map_index, cursor, limit)

    @router.get(f"{_TASK}/events", tags=["dags"], summary="The events of a task's latest trigger, newest first")
    def list_events(
        dag_id: DagId,
        run_id: RunId,
        task_id: TaskId,
        map_index: MapIndex = -1,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.TaskEventPage:
        return desk.list_events(dag_id, run_id, task_id, map_index, cursor, limit)

    @router.get(
        f"{_TASK}/log",
        tags=["dags"],
        summary="The log of a try",
        description="While the log is being written, repeat the request with `cursor` to read further lines.",
    )
    def read_log(
        dag_id: DagId,
        run_id: RunId,
        task_id: TaskId,
        map_index: MapIndex = -1,
        try_number: Try = None,
        cursor: Cursor = "",
    ) -> models.LogPage:
        return desk.read_log(dag_id, run_id, task_id, map_index, try_number, cursor)

    @router.get(
        f"{_BASE}/callbacks",
        tags=["dags"],
        summary="The callbacks of a run itself, and the failed callbacks of its tasks, oldest first",
    )
    def list_callbacks(
        dag_id: DagId, run_id: RunId, cursor: Cursor = "", limit: Limit = PAGE_ROWS
    ) -> models.CallbackPage:
        return desk.list_callbacks(dag_id, run_id, cursor, limit)

    @router.get(f"{_BASE}/callbacks/{{callback}}/log", tags=["dags"], summary="The log of a callback of a run")
    def read_callback_log(dag_id: DagId, run_id: RunId, callback: CallbackId, cursor: Cursor = "") -> models.LogPage:
        return desk.read_callback_log(dag_id, run_id, callback, cursor)

    @router.get(f"{_BASE}/xcoms", tags=["dags"], summary="The XComs of a run, by task and key")
    def list_xcoms(
        dag_id: DagId,
        run_id: RunId,
        task: Annotated[str, Query(max_length=2000, description="Only XComs of this task.")] = "",
        map_index: AnyMapIndex = None,
        last_index: LastXComIndex = None,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.XComPage:
        return desk.list_xcoms(dag_id, run_id, task or None, map_index, cursor, limit, last_index)


def _add_changes(router: Routes, desk: Desk) -> None:
    @router.post("/dags/{dag_id}/pause", tags=["dags"], summary="Pause or resume a DAG")
    def pause(request: Request, dag_id: DagId, order: models.PauseDagOrder) -> models.DagActionDone:
        changed = desk.ask(PauseDag(dag_id, order.paused, request.state.identity.name))
        state = "paused" if order.paused else "active"
        return models.DagActionDone(text=f"{dag_id} is {state}." if changed else f"{dag_id} was already {state}.")

    @router.post(
        "/dags/{dag_id}/conf-lists",
        tags=["dags"],
        summary="Send a part of a long list for the configuration of a run that is created next",
        description="Tasks have to be mapped over the param that the list is for. Parts are sent in order; repeating "
        "one changes nothing. All lists of a run may have 64 MiB together, and each `dags.max_map_length` values. A "
        "user may have lists for 20 runs that do not exist yet; those that no run has taken over after a day are "
        "removed.",
    )
    def send_list(request: Request, dag_id: DagId, part: models.ConfListPart) -> models.DagActionDone:
        total = desk.stage_list(dag_id, part, request.state.identity.name)
        return models.DagActionDone(text=f"{part.name} has {format_count(total, 'value')} so far.")

    @router.post("/dags/{dag_id}/runs", status_code=201, tags=["dags"], summary="Trigger a DAG: create a run")
    def create_run(request: Request, dag_id: DagId, order: models.RunOrder) -> models.Created:
        twice = sorted(order.conf.keys() & order.lists.keys())
        if twice:
            raise RequestProblem(422, f"{twice[0]!r} is in conf and in lists; give it in one of them")
        try:
            conf = mark_lists(encode(order.conf, "conf"), order.lists)
        except EncodingError as error:
            raise RequestProblem(422, str(error)) from error
        moment = order.logical_date
        logical_us = None if moment is None else round(moment.timestamp() * 1e6)
        by = request.state.identity.name
        stage = bind_stage(dag_id, order.stage)
        call = CreateRun(dag_id, order.run_id, logical_us, conf, by=by, request=order.request, stage=stage)
        run = desk.ask(call)
        text = " ".join([f"Created the run {run.run_id}.", *run.warnings])
        return models.Created(text=text, run=describe_run(run), warnings=list(run.warnings))

    @router.post(f"{_BASE}/cancel", tags=["dags"], summary="Cancel a run: its unfinished tasks fail or are skipped")
    def cancel_run(request: Request, dag_id: DagId, run_id: RunId) -> models.Created:
        if desk.find_run(dag_id, run_id).ended_us is not None:
            raise RequestProblem(409, f"the run {run_id!r} has ended already and cannot be cancelled")
        run = desk.ask(CancelRun(dag_id, run_id, request.state.identity.name))
        return models.Created(text=f"Cancelled the run {run_id}.", run=describe_run(run))


def _add_task_changes(router: Routes, desk: Desk) -> None:
    @router.post(f"{_BASE}/clear", tags=["dags"], summary="Clear tasks so that they run again; deletes their XComs")
    def clear(request: Request, dag_id: DagId, run_id: RunId, order: models.ClearOrder) -> models.Changed:
        by = request.state.identity.name
        call = ClearTasks(
            dag_id,
            run_id,
            tuple(order.tasks),
            by,
            order.downstream,
            order.failed,
            order.dry_run,
            order.map_index,
            order.indexes,
        )
        names = list(desk.ask(call))
        if order.dry_run:
            return models.Changed(text=f"{format_count(len(names), 'task')} would be cleared.", tasks=names)
        return models.Changed(text=f"Cleared {format_count(len(names), 'task')}.", tasks=names)

    @router.post(f"{_BASE}/mark", tags=["dags"], summary="Mark tasks as success, failed or skipped")
    def mark(request: Request, dag_id: DagId, run_id: RunId, order: models.MarkOrder) -> models.Changed:
        by = request.state.identity.name
        call = MarkTasks(dag_id, run_id, tuple(order.tasks), order.state, by, order.map_index, order.indexes)
        names = list(desk.ask(call))
        return models.Changed(text=f"Marked {format_count(len(names), 'task')} as {order.state}.", tasks=names)
