"""The pages of DAGs: the list, a DAG, a run, a task with its tries."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import Query
from fastapi.responses import RedirectResponse, Response
from markupsafe import escape
from starlette.requests import Request

from tidemill.core.tasks.instance import UNMAPPED, format_instance
from tidemill.core.tasks.structure import DagStructure, LoopStructure
from tidemill.services.conf_lists import list_mapped_params
from tidemill.web.dags import models
from tidemill.web.dags.api import (
    ELEMENT_STATES,
    RUN_STATES,
    Cursor,
    DagId,
    ElementState,
    MapIndex,
    RunId,
    RunState,
    Tag,
    TaskId,
    Try,
    build_api,
    check_states,
)
from tidemill.web.dags.desk import PAGE_ROWS, Desk, count_grid_runs, describe_run
from tidemill.web.dags.element_counts import count_ended, format_counts, format_rate, list_parts
from tidemill.web.dags.layout import HEIGHT, WIDTH, draw, list_in_order
from tidemill.web.dags.params import build_field
from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import change_address
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.workers import BlockingRoute

_RUN = "/dags/{dag_id}/runs/{run_id}"
IndexRange = Annotated[str, Query(max_length=40, description="An index, or the first and the last one: 3-7.")]
_RANGE = re.compile(r"(\d{1,10})(?:\s*-\s*(\d{1,10}))?", re.ASCII)
Seen = Annotated[str, Query(max_length=64)]
_BAR_HEIGHT = 26
_MAX_HISTORY = 200
#: The number of events of a stream on the page of its task.
_MAX_EVENTS = 20
#: The number of tasks of a mapped group whose states its page shows for each element, and the longest range of indexes.
_MAX_CELLS, _MAX_SPAN = 20, 200
#: The number of callbacks whose output a run's page shows.
_MAX_CALLBACKS = 10


def build_dags_section(desk: Desk, pages: Pages) -> UiSection:
    pages.add_filter("seg", lambda text: quote(str(text), safe=""))
    pages.add_filter("state_tone", find_tone)
    pages.add_filter("instance", lambda one: format_instance(one.task_id, one.map_index))
    pages.add_filter("bars", measure_bars)
    pages.add_filter("count_parts", list_parts)
    pages.add_filter("count_text", format_counts)
    pages.add_filter("count_ended", count_ended)
    pages.add_filter("rate", format_rate)
    links = [NavigationLink("DAGs", "/dags"), NavigationLink("Runs", "/dag-runs"), NavigationLink("Pools", "/pools")]
    links.append(NavigationLink("Services", "/services"))
    return UiSection(links, _build_pages(desk, pages), build_api(desk))


def find_tone(state: str) -> str:
    """Return the color tone of a state's chip.

    Example:
        >>> find_tone("upstream_failed"), find_tone("running")
        ('bad', 'info')
    """
    tones = {"success": "good", "running": "info", "mapped": "info", "failed": "bad", "upstream_failed": "bad"}
    return tones.get(state, "warn" if state in ("up_for_retry", "queued", "scheduled", "ending") else "")


def measure_bars(runs: list[models.DagRunView]) -> list[tuple[models.DagRunView, int]]:
    """Return runs with the heights of their bars, in proportion to their durations."""
    took = [(run.ended_at or run.created_at) - (run.started_at or run.created_at) for run in runs]
    longest = max([*took, 0.001])
    return [(run, 6 + round((_BAR_HEIGHT - 6) * seconds / longest)) for run, seconds in zip(runs, took, strict=True)]


def _describe_graph(
    structure: DagStructure, states: dict[str, str] | None, counts: Mapping[str, models.MapCountsView] | None = None
) -> dict[str, Any]:
    plans = {task.id: task for task in structure.tasks}
    labels = {(task.id, after): text for task in structure.tasks for after, text in task.edge_labels.items()}
    upstream = structure.list_upstream()
    across, down = (draw(upstream, down=down) for down in (False, True))
    values: dict[str, Any] = {"rows": list_in_order(upstream, across), "plans": plans, "states": states}
    values |= {"labels": labels, "element_counts": counts or {}}
    pictures = [picture for picture in (across, down) if picture is not None]
    return values | {"pictures": pictures, "node": (WIDTH, HEIGHT)}


def _list_group(structure: DagStructure, group: str) -> list[str]:
    """Return the tasks of a mapped group in graph order; none for a task."""
    inside = structure.list_groups().get(group, [])
    upstream = {one.id: one.upstream for one in structure.tasks}
    return list_in_order({name: [one for one in upstream[name] if one in inside] for name in inside}, None)


def _find_loop(structure: DagStructure, task_id: str) -> LoopStructure | None:
    """Return the loop that a task is, or is part of."""
    plans = {one.id: one for one in structure.tasks}
    plan = plans.get(task_id)
    group = plan if plan is None or plan.is_group else plans.get(plan.mapped_group)
    return None if group is None or group.mapped is None else group.mapped.loop


def _parse_range(text: str) -> tuple[int | None, int | None]:
    """Return the first and the last index that a filter names; None: no limit.

    Raises:
        Problem: It names neither an index nor a range.
    """
    if not text.strip():
        return None, None
    found = _RANGE.fullmatch(text.strip())
    if found is None or int(found[1]) > int(found[2] or found[1]):
        raise RequestProblem(422, f"index: expected an index such as 3, or a range such as 3-7, not {text!r}")
    return int(found[1]), int(found[2] or found[1])


def _digest(*parts: Any) -> str:
    text = json.dumps([part.model_dump() for part in parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _build_pages(desk: Desk, pages: Pages) -> Routes:
    router = Routes(route_class=BlockingRoute)

    def link_more(request: Request, cursor: str | None) -> str:
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        return "" if cursor is None else pages.url(f"{request.url.path}?{change_address(given, cursor=cursor)}")

    @router.get("/")
    def lead_to_first() -> Response:
        return RedirectResponse(pages.url("/dags"), 303)

    @router.get("/dags")
    def show_dags(request: Request, tag: Tag = "", inactive: bool = False, cursor: Cursor = "") -> Response:
        page = desk.list_dags(cursor, PAGE_ROWS, tag, inactive=inactive)
        values: dict[str, Any] = {"page": page, "latest": desk.list_latest(page.rows), "tag": tag}
        values |= {"inactive": inactive, "broken": desk.list_files(broken=True), "query": request.url.query}
        values |= {"differences": desk.list_differences()}
        return pages.answer(request, "dags/dags.html", more=link_more(request, page.cursor), **values)

    @router.get("/pools")
    def show_pools(request: Request) -> Response:
        return pages.answer(request, "dags/pools.html", pools=desk.list_pools())

    @router.get("/services")
    def show_services(request: Request) -> Response:
        return pages.answer(request, "dags/services.html", services=desk.list_services())

    @router.get("/dag-runs")
    def show_runs(
        request: Request,
        state: RunState = [],  # noqa: B006 - FastAPI copies it
        cursor: Cursor = "",
    ) -> Response:
        states = check_states(state, RUN_STATES)
        page = desk.list_runs(None, cursor, PAGE_ROWS, states)
        values: dict[str, Any] = {"page": page, "states": RUN_STATES, "state": states[0] if states else ""}
        return pages.answer(request, "dags/runs.html", more=link_more(request, page.cursor), **values)

    @router.get("/dags/{dag_id}")
    def show_dag(request: Request, dag_id: DagId, cursor: Cursor = "") -> Response:
        dag, structure = desk.get_dag(dag_id)
        page = desk.list_runs(dag_id, cursor, PAGE_ROWS, ())
        values: dict[str, Any] = {"dag": dag, "structure": structure, "page": page, "run": None}
        values |= {"fields": [build_field(param) for param in structure.params]}
        has_schema = {param.name: param.schema != "{}" for param in structure.params}
        values |= {"lists": {name: has_schema.get(name, False) for name in sorted(list_mapped_params(structure))}}
        values |= {"broken": [file for file in desk.list_files(broken=True) if file.path == dag.file]}
        values |= _describe_graph(structure, None) | _describe_grid(structure)
        return pages.answer(request, "dags/dag.html", more=link_more(request, page.cursor), **values)

    def _describe_grid(structure: DagStructure) -> dict[str, Any]:
        runs, grid = desk.list_grid(structure.id, count_grid_runs(len(structure.tasks)))
        return {"grid_runs": [(run, escape(link_run(structure.id, run.run_id))) for run in runs], "grid": grid}

    def link_run(dag_id: str, run_id: str) -> str:
        return pages.url(f"/dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}")

    def describe_state(dag_id: str, run_id: str, cursor: str = "") -> dict[str, Any]:
        found, structure, page = desk.list_tasks(dag_id, run_id, cursor)
        run = describe_run(found)
        heads = [task for task in page.rows if task.map_index == UNMAPPED]
        states = {task.task_id: task.state for task in heads}
        counts = {task.task_id: task.elements for task in heads if task.elements is not None}
        callbacks = desk.list_callbacks(dag_id, run_id)
        values = {"run": run, "page": page, "dag_id": dag_id, "structure": structure, "callbacks": callbacks}
        values |= {"seen": _digest(run, page, callbacks)}
        return values | _describe_graph(structure, states, counts)

    def read_logs(values: dict[str, Any]) -> dict[int, list[models.LogLineView]]:
        """Return the output of the last callbacks of a run itself, by callback id."""
        run = values["run"]
        own = [one.id for one in values["callbacks"].rows if one.task_id is None][-_MAX_CALLBACKS:]
        return {number: desk.read_callback_log(run.dag_id, run.run_id, number).rows for number in own}

    @router.get(_RUN)
    def show_run(request: Request, dag_id: DagId, run_id: RunId, cursor: Cursor = "") -> Response:
        values = describe_state(dag_id, run_id, cursor)
        values |= _describe_grid(values["structure"])
        more = link_more(request, values["page"].cursor)
        logs = read_logs(values)
        return pages.answer(request, "dags/run.html", more=more, is_first=not cursor, logs=logs, **values)

    @router.get(f"{_RUN}/state")
    def show_run_state(request: Request, dag_id: DagId, run_id: RunId, seen: Seen = "") -> Response:
        values = describe_state(dag_id, run_id)
        if seen == values["seen"]:
            return Response(status_code=204)
        more = values["page"].cursor
        path = f"{link_run(dag_id, run_id)}?{change_address({}, cursor=more)}"
        values |= {"more": path if more else "", "logs": read_logs(values)}
        return pages.answer(request, "dags/run_state.html", is_first=True, **values)

    def describe_task(dag_id: str, run_id: str, task_id: str, map_index: int) -> dict[str, Any]:
        found, structure, task = desk.find_task(dag_id, run_id, task_id, map_index)
        history = desk.list_history(dag_id, run_id, task_id, map_index, "", _MAX_HISTORY)
        inside = _list_group(structure, task_id)
        instances = desk.list_instances(found, structure, inside, map_index) if inside and map_index >= 0 else []
        values: dict[str, Any] = {"run": describe_run(found), "task": task, "history": history, "inside": inside}
        attempt = desk.find_attempt(found, structure, task_id)
        values |= {"instances": instances, "attempt": attempt, "iteration_of": _find_loop(structure, task_id)}
        values["seen"] = _digest(task, history, *instances, *([] if attempt is None else [attempt]))
        values["mapped_group"] = next((one.mapped_group for one in structure.tasks if one.id == task_id), "")
        if task.stream is not None:
            values["events"] = desk.list_events(dag_id, run_id, task_id, map_index, "", _MAX_EVENTS)
        if task.elements is not None:
            values["failures"] = desk.group_failures(dag_id, run_id, task_id)
        return values | {"dag_id": dag_id, "xcoms": desk.list_xcoms(dag_id, run_id, task_id, map_index, "", PAGE_ROWS)}

    def list_cells(
        dag_id: str, run_id: str, inside: list[str], elements: list[models.DagTaskView]
    ) -> dict[int, list[tuple[str, str]]]:
        """Return the names and states of the tasks of a group by element, unless there are too many."""
        if not inside or not elements or len(inside) > _MAX_CELLS:
            return {}
        first, last = elements[0].map_index, elements[-1].map_index
        return desk.list_states(dag_id, run_id, inside, first, last) if last - first < _MAX_SPAN else {}

    @router.get(f"{_RUN}/tasks/{{task_id}}")
    def show_task(
        request: Request,
        dag_id: DagId,
        run_id: RunId,
        task_id: TaskId,
        map_index: MapIndex = -1,
        try_number: Try = None,
        state: ElementState = [],  # noqa: B006
        index: IndexRange = "",
        cursor: Cursor = "",
    ) -> Response:
        values = describe_task(dag_id, run_id, task_id, map_index)
        task = values["task"]
        if task.elements is not None:
            states, indexes = check_states(state, ELEMENT_STATES), _parse_range(index)
            elements = desk.list_elements(dag_id, run_id, task_id, cursor, PAGE_ROWS, states, indexes)
            values["cells"] = list_cells(dag_id, run_id, values["inside"], elements.rows)
            values |= {"elements": elements, "more": link_more(request, elements.cursor), "chosen_index": index}
            values |= {"element_states": ELEMENT_STATES, "chosen_state": states[0] if states else ""}
        tries = (values["attempt"] or task).tries
        shown = max(tries, 1) if try_number is None else try_number
        return pages.answer(request, "dags/task.html", shown=shown, **values)

    @router.get(f"{_RUN}/tasks/{{task_id}}/state")
    def show_task_state(
        request: Request, dag_id: DagId, run_id: RunId, task_id: TaskId, map_index: MapIndex = -1, seen: Seen = ""
    ) -> Response:
        values = describe_task(dag_id, run_id, task_id, map_index)
        if seen == values["seen"]:
            return Response(status_code=204)
        return pages.answer(request, "dags/task_state.html", **values)

    return router
