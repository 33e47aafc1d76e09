"""The pages and the API of a trigger host: triggers, streams, configuration, live updates."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import Path, Query
from fastapi.responses import RedirectResponse, Response
from sse_starlette import EventSourceResponse
from starlette.requests import Request

from tidemill.services.triggerer.hosting.trigger_book import TriggerPhase
from tidemill.web.pages import Pages
from tidemill.web.pipeline.models import Setting
from tidemill.web.pipeline.settings_view import list_settings
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import change_address
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.triggers import models
from tidemill.web.triggers.lane_series import LaneSeries
from tidemill.web.triggers.view import PAGE_ROWS, TriggersView
from tidemill.web.workers import BlockingRoute

MAX_SERIES_SECONDS = 7 * 86_400
_PING_SECONDS = 15
_SEND_SECONDS = 30.0
STATES = [phase.value for phase in TriggerPhase]
#: Sections that only pipelines read.
_HIDDEN = frozenset(
    {"kafka", "executor", "sinks", "delivery", "dlq", "spark", "history", "cache"},
)
Cursor = Annotated[str, Query(max_length=2100, description="The cursor of the previous page.")]
LaneCursor = Annotated[
    str, Query(alias="cursor", pattern=r"^\d{0,18}$", description="The cursor of the previous page.")
]
Limit = Annotated[int, Query(ge=1, description="The maximum number of rows, up to debug.max_ui_rows.")]
State = Annotated[list[str], Query(description=", ".join(STATES))]
Text = Annotated[str, Query(max_length=1024, description="A part of the name or the class.")]
StreamId = Annotated[str, Path(pattern=r"^[0-9a-f]{16}$")]


def build_triggers_section(view: TriggersView, pages: Pages) -> UiSection:
    links = [
        NavigationLink("Triggers", "/triggers"),
        NavigationLink("Streams", "/streams"),
        NavigationLink("Configuration", "/configuration", is_last=True),
    ]
    return UiSection(links, _build_pages(view, pages), _build_api(view), view.live.close)


def _check_states(states: list[str]) -> tuple[str, ...]:
    chosen = tuple(state for state in states if state)
    for state in chosen:
        if state not in STATES:
            raise RequestProblem(422, f"state: expected one of {', '.join(STATES)}, not {state!r}")
    return chosen


def _list_settings(view: TriggersView) -> list[Setting]:
    return list_settings(view.watched.settings, view.watched.settings, hidden=_HIDDEN)


def _build_pages(view: TriggersView, pages: Pages) -> Routes:
    router = Routes(route_class=BlockingRoute)

    def link_more(request: Request, cursor: str | None) -> str:
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        return "" if cursor is None else pages.url(f"{request.url.path}?{change_address(given, cursor=cursor)}")

    @router.get("/")
    def lead_to_first() -> Response:
        return RedirectResponse(pages.url("/triggers"), 303)

    @router.get("/triggers")
    def show_triggers(
        request: Request,
        state: State = [],  # noqa: B006 - FastAPI copies it
        text: Text = "",
        cursor: Cursor = "",
    ) -> Response:
        states = _check_states(state)
        page, host = view.list_triggers(cursor, PAGE_ROWS, states, text), view.read_host()
        return pages.answer(
            request,
            "triggers/triggers.html",
            page=page,
            o=host,
            at=host.at,
            more=link_more(request, page.cursor),
            states=STATES,
            state=states[0] if states else "",
            text=text,
            is_live=not (states or text or cursor),
        )

    @router.get("/streams")
    def show_streams(request: Request, cursor: Cursor = "") -> Response:
        page = view.list_streams(cursor, PAGE_ROWS)
        more = link_more(request, page.cursor)
        return pages.answer(
            request, "triggers/streams.html", page=page, o=view.read_host(), more=more, is_live=not cursor
        )

    @router.get("/streams/{stream}")
    def show_stream(request: Request, stream: StreamId, after: LaneCursor = "") -> Response:
        found = view.find_stream(stream, int(after or -1), PAGE_ROWS)
        return pages.answer(request, "triggers/stream.html", page=found, more=link_more(request, found.cursor))

    @router.get("/configuration")
    def show_configuration(request: Request, changed: bool = False) -> Response:
        shown = [setting for setting in _list_settings(view) if not changed or setting.origin != "default"]
        sections: dict[str, list[Setting]] = {}
        for setting in shown:
            section = setting.key.partition(".")[0] if "." in setting.key else "general"
            sections.setdefault(section, []).append(setting)
        return pages.answer(request, "configuration.html", sections=sections, changed=changed, count=len(shown))

    return router


def _build_api(view: TriggersView) -> Routes:
    router = Routes(tags=["triggers"], route_class=BlockingRoute)

    @router.get("/host", summary="The state of the trigger host")
    def read_host() -> models.TriggerHostView:
        return view.read_host()

    @router.get("/triggers", summary="The triggers of the list, by name")
    def list_triggers(
        state: State = [],  # noqa: B006 - FastAPI copies it
        text: Text = "",
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
    ) -> models.TriggerPage:
        return view.list_triggers(cursor, limit, _check_states(state), text)

    @router.get("/streams", summary="The shared streams, by name")
    def list_streams(cursor: Cursor = "", limit: Limit = PAGE_ROWS) -> models.StreamPage:
        return view.list_streams(cursor, limit)

    @router.get(
        "/streams/series",
        summary="Events of lanes over time, for charts",
        description="Read from the recording; empty if debug.store_state is off.",
    )
    def read_series(
        seconds: Annotated[
            int, Query(ge=1, le=MAX_SERIES_SECONDS, description="The length of the period up to now.")
        ] = 900,
        stream: Annotated[str | None, Query(max_length=1024, description="The name of a stream; default: all.")] = None,
        lane: Annotated[str | None, Query(max_length=1024, description="The name of a lane of the stream.")] = None,
    ) -> LaneSeries:
        if lane is not None and stream is None:
            raise RequestProblem(422, "lane requires stream; add the name of the lane's stream")
        return view.read_series(seconds, stream, lane)

    @router.get("/streams/{stream}", summary="A shared stream with its lanes, and the triggers that hold them")
    def find_stream(stream: StreamId, after: LaneCursor = "", limit: Limit = PAGE_ROWS) -> models.StreamDetails:
        return view.find_stream(stream, int(after or -1), limit)

    @router.get("/configuration", summary="All settings, with secrets masked")
    def read_configuration() -> list[Setting]:
        return _list_settings(view)

    @router.get(
        "/live",
        summary="Live updates as server-sent events, at most once a second",
        description="The view `host` sends the document of /host when it changes. An event `missed` has the number of "
        "updates skipped because the client reads too slowly. The other views serve the pages of the web UI.",
        response_class=EventSourceResponse,
    )
    async def follow(
        request: Request, view_name: Annotated[Literal["host", "triggers", "streams"], Query(alias="view")] = "host"
    ) -> Response:
        await view.refresh(view_name)
        events = await view.live.listen(view_name, request.state.is_known)
        return EventSourceResponse(events, ping=_PING_SECONDS, send_timeout=_SEND_SECONDS)

    return router
