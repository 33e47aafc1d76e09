"""The pages and the API of all engines and all partitions; the overview shows only the first of them.

Filters and cursor are in the address. An open page requests its rows again every few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import HTMLResponse, Response
from starlette.requests import Request

from tidemill.spark.live.status_report import is_starting
from tidemill.spark.live.web_ui import Watched
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunPhase
from tidemill.web.pages import Pages
from tidemill.web.pipeline import engines, partitions
from tidemill.web.pipeline.models import EnginePage, PartitionPage
from tidemill.web.pipeline.partitions import PartitionFilters, PartitionTable
from tidemill.web.pipeline.sampler import PipelineSampler
from tidemill.web.recorded.filters import change_address
from tidemill.web.routes import Routes

#: Half as many as in other lists: these rows change constantly, and every open page reloads them.
PAGE_ROWS = 50
#: How often an open page reloads its rows.
EVERY_SECONDS = 5
Cursor = Annotated[str, Query(max_length=4096, description="The cursor of the previous page.")]
Limit = Annotated[int, Query(ge=1, description="The maximum number of rows, up to debug.max_ui_rows.")]


@dataclass(frozen=True, slots=True)
class PipelineMoment:
    """A snapshot of a pipeline.

    Attributes:
        at: The time of the snapshot, in seconds since the epoch.
        progress: The totals over its engines.
        partitions: Its partitions.
    """

    at: float
    progress: PipelineProgress
    partitions: PartitionTable


class Lists:
    """Finds rows for pages and API.

    Args:
        watched: The pipeline.
        look: Returns the snapshot to show.
        sampler: Measures the CPU use of engines.
    """

    def __init__(self, watched: Watched, look: Callable[[], PipelineMoment], sampler: PipelineSampler) -> None:
        self._watched = watched
        self._look = look
        self._sampler = sampler

    def find_partitions(self, query: PartitionFilters, cursor: str, limit: int) -> PartitionPage:
        """Return a page of partitions; see `PartitionTable.find`."""
        most = min(limit, self._watched.settings.debug.max_ui_rows)
        return self._look().partitions.find(query, cursor, most)

    def find_engines(self, state: str, cursor: str, limit: int) -> EnginePage:
        """Return a page of engines; see `engines.find_engines`."""
        most = min(limit, self._watched.settings.debug.max_ui_rows)
        return engines.find_engines(self._look().progress.engines, state, cursor, most, self._sampler.cpu_percent)

    def describe_pipeline(self) -> dict[str, Any]:
        """Return the facts about the pipeline that its rows show."""
        moment, state = self._look(), self._watched.asked.state()
        return {
            "topic": self._watched.settings.kafka.source_topic,
            "at": moment.at,
            "is_running": state.phase is RunPhase.RUNNING and not is_starting(state, moment.progress),
            "is_all_paused": any(pause.partition is None for pause in moment.progress.pauses),
        }


def build_pages(lists: Lists, pages: Pages) -> Routes:
    """Return the routes of the pages, and of the rows that they reload."""
    router = Routes()

    def answer(request: Request, kind: str, page: PartitionPage | EnginePage, **values: Any) -> Response:
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        is_part = request.url.path.endswith("/rows")

        def link(path: str, **changes: str | None) -> str:
            query = change_address(given, **changes)
            return pages.url(f"{path}?{query}" if query else path)

        values |= lists.describe_pipeline() | {"page": page}
        values["first_address"] = link(f"/{kind}s", cursor=None)
        values["next_address"] = link(f"/{kind}s", cursor=page.cursor)
        if is_part:
            return HTMLResponse(pages.render(f"overview/{kind}_list.html", **values))
        values["rows_address"] = link(f"/{kind}s/rows")
        values["first"] = lambda name: (given.get(name) or [""])[0]
        return pages.answer(request, f"{kind}s.html", given=given, every_seconds=EVERY_SECONDS, **values)

    async def show_partitions(request: Request, query: PartitionFilters, cursor: Cursor = "") -> Response:
        page = lists.find_partitions(query, cursor, PAGE_ROWS)
        return answer(request, "partition", page, states=partitions.STATES)

    async def show_engines(request: Request, state: engines.StateFilter = "", cursor: Cursor = "") -> Response:
        return answer(request, "engine", lists.find_engines(state, cursor, PAGE_ROWS), states=engines.STATES)

    for path in ("", "/rows"):
        router.get(f"/partitions{path}")(show_partitions)
        router.get(f"/engines{path}")(show_engines)
    return router


def build_api(lists: Lists) -> Routes:
    router = Routes(tags=["pipeline"])

    @router.get(
        "/partitions",
        summary="Partitions that engines own; those in trouble come first",
        description="While lags change, a partition may appear on two pages or on none, unless the order is by name.",
    )
    async def find_partitions(query: PartitionFilters, cursor: Cursor = "", limit: Limit = PAGE_ROWS) -> PartitionPage:
        return lists.find_partitions(query, cursor, limit)

    @router.get("/engines", summary="Engines; those in trouble come first")
    async def find_engines(
        state: engines.StateFilter = "", cursor: Cursor = "", limit: Limit = PAGE_ROWS
    ) -> EnginePage:
        return lists.find_engines(state, cursor, limit)

    return router
