"""The pages and the API of recordings: messages, one message, tasks, failures, events, recordings."""

from __future__ import annotations

import time
from typing import Annotated, Any
from urllib.parse import urlencode

import msgspec
from fastapi import Depends, Path, Query
from fastapi.responses import RedirectResponse, Response
from starlette.requests import Request

from tidemill.recorder.format.events import EventKind
from tidemill.web.pages import Pages
from tidemill.web.peers.client import IDENTITY
from tidemill.web.peers.peers import Peers
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded import downloads, hosts, models, runs
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.filters import (
    RUN_NAMES,
    STATUSES,
    EventFilters,
    MessageFilters,
    RunFilters,
    TaskFilters,
    change_address,
    parse_position,
    parse_time,
)
from tidemill.web.recorded.merged import MergedArchive
from tidemill.web.recorded.waterfall import draw_waterfall
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.workers import BlockingRoute

PAGE_ROWS = 100
_GROUPS = 200
#: With several hosts, a cursor holds the position in each.
Cursor = Annotated[str, Query(max_length=16_000, description="The cursor of the previous page.")]
Limit = Annotated[int, Query(ge=1, description="The maximum number of rows, up to debug.max_ui_rows.")]
Partition = Annotated[int, Path(ge=0, le=2**31 - 1)]
Offset = Annotated[int, Path(ge=0, le=2**63 - 1)]
Since = Annotated[str, Query(max_length=40, description="A time such as 2026-05-01T12:00, or 15m, 2h, 1d ago.")]


EachCursor = Annotated[bool, Query(description="Whether to return a cursor for each row in `cursors`.")]
WithPeers = Annotated[bool, Query(description="Whether to query debug.peers too.")]


def build_recorded_section(archive: Archive, pages: Pages, absent: str = "", peers: Peers | None = None) -> UiSection:
    """Return the section of recordings.

    Args:
        archive: The recordings.
        pages: Renders pages.
        absent: Which parts this server does not show, and why; may be ''.
        peers: Other hosts; None: there are none.
    """
    merged = MergedArchive(archive, peers or Peers([], lambda: archive.identity))
    links = [
        NavigationLink("Messages", "/messages"),
        NavigationLink("Tasks", "/tasks"),
        NavigationLink("Failures", "/failures"),
        NavigationLink("Events", "/events"),
        NavigationLink("Runs", "/runs"),
        NavigationLink("Recordings", "/recordings"),
    ]
    routes, api = _build_pages(archive, merged, pages), _build_api(archive, merged)
    routes.include(runs.build_pages(archive, pages, absent, merged.peers.addresses))
    routes.include(hosts.build_pages(pages, merged.peers))
    api.include(runs.build_api(archive))
    loads = downloads.Downloads(archive)
    api.include(downloads.build_api(loads))
    return UiSection(links, routes, api, loads.close)


def _build_pages(archive: Archive, merged: MergedArchive, pages: Pages) -> Routes:
    router = Routes(route_class=BlockingRoute)

    def answer(
        request: Request,
        template: str,
        cursor: str | None = None,
        status: int = 200,
        only_group: str | None = None,
        **values: Any,
    ) -> Response:
        """Return a page. `only_group` is the group whose runs it shows by default, without a filter in its address."""
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        known = archive.list_runs()
        if only_group is None and RUN_NAMES & set(given) and not any(given.get(name, [""])[0] for name in RUN_NAMES):
            given["runs"] = ["all"]  # no filter was chosen; links omit empty filters
        if all(run.group == only_group for run in known):
            only_group = None
        path = request.url.path
        more = "" if cursor is None else pages.url(f"{path}?{change_address(given, cursor=cursor)}")

        def change(**changes: str | None) -> str:
            return pages.url(f"{path}?{change_address(given, cursor=None, **changes)}")

        def first(name: str) -> str:
            return (given.get(name) or [(only_group or "") if name == "group" else ""])[0]

        own: dict[str, Any] = {"given": given, "first": first, "change": change, "more": more, "only_group": only_group}
        own |= {"is_first": not first("cursor"), "runs": known, "peers": merged.peers.addresses}
        return pages.answer(request, f"recorded/{template}.html", status, **own, **values)

    def find_own_group(request: Request) -> str | None:
        """Return the group whose failures and events are shown by default; None if the address has filters."""
        return None if RUN_NAMES & set(request.query_params) else archive.group

    @router.get("/messages")
    def show_messages(request: Request, query: MessageFilters, cursor: Cursor = "", find: str = "") -> Response:
        if (position := parse_position(find)) is not None:
            return RedirectResponse(pages.url("/messages/{}/{}/{}".format(*position)), 303)
        if find:
            given = {name: request.query_params.getlist(name) for name in request.query_params}
            return RedirectResponse(pages.url(f"/messages?{change_address(given, find=None, key=find)}"), 303)
        page = merged.find_messages(query, cursor, PAGE_ROWS)
        return answer(request, "messages", page.cursor, page=page, statuses=STATUSES)

    @router.get("/messages/{topic}/{partition}/{offset}")
    def show_message(request: Request, topic: str, partition: Partition, offset: Offset) -> Response:
        story = archive.tell_story(topic, partition, offset)
        told = [(each, draw_waterfall(each)) for each in reversed(story.stories)]
        is_known = bool(story.stories or story.tasks or story.events)
        status = 200 if is_known or story.now is not None else 404
        position: dict[str, Any] = {"topic": topic, "partition": partition, "offset": offset}
        return answer(request, "message", status=status, story=story, told=told, known=is_known, **position)

    @router.get("/tasks")
    def show_tasks(request: Request, query: TaskFilters, cursor: Cursor = "") -> Response:
        page = merged.find_tasks(query, cursor, PAGE_ROWS)
        return answer(request, "tasks", page.cursor, page=page)

    @router.get("/failures")
    def show_failures(request: Request, chosen: RunFilters, since: Since = "24h") -> Response:
        now, own = time.time(), find_own_group(request)
        if own is not None:
            chosen = msgspec.structs.replace(chosen, group=own)
        since_us = parse_time("since", since, now)
        page = merged.list_failures(since_us, None, _GROUPS, chosen)
        only = {name: text for name in ("recording", "group", "worker") if (text := getattr(chosen, name))}
        times: dict[str, Any] = {"since": since, "until": now, "begin": (since_us or 0) / 1_000_000}
        link = f"&{urlencode(only or {'runs': 'all'})}"
        return answer(request, "failures", only_group=own, page=page, chosen=link, **times)

    @router.get("/events")
    def show_events(request: Request, query: EventFilters, cursor: Cursor = "") -> Response:
        if (own := find_own_group(request)) is not None:
            query = msgspec.structs.replace(query, group=own)
        page = archive.find_events(query, cursor, PAGE_ROWS)
        return answer(request, "events", page.cursor, only_group=own, page=page, kinds=list(EventKind))

    @router.get("/recordings")
    def show_recordings(request: Request, chosen: RunFilters) -> Response:
        return answer(request, "recordings", recordings=archive.list_recordings(chosen))

    return router


def _build_api(archive: Archive, merged: MergedArchive) -> Routes:
    async def identify(response: Response) -> None:
        response.headers[IDENTITY] = archive.identity

    router = Routes(dependencies=[Depends(identify)], route_class=BlockingRoute, tags=["recordings"])

    @router.get("/messages", summary="Finished messages, newest first")
    def find_messages(
        query: MessageFilters,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
        each_cursor: EachCursor = False,
        peers: WithPeers = False,
    ) -> models.MessagePageView:
        if peers:
            return merged.find_messages(query, cursor, min(limit, archive.max_rows))
        return archive.find_messages(query, cursor, limit, each_cursor=each_cursor)

    @router.get("/messages/{topic}/{partition}/{offset}", summary="The history of a message")
    def tell_story(topic: str, partition: Partition, offset: Offset) -> models.MessageStory:
        story = archive.tell_story(topic, partition, offset)
        if not (story.stories or story.tasks or story.events or story.now):
            raise RequestProblem(
                404, f"{topic}:{partition}:{offset} is not recorded; /api/v1/recordings lists the recorded periods"
            )
        return story

    @router.get("/tasks", summary="Tasks that ran, latest end first")
    def find_tasks(
        query: TaskFilters,
        cursor: Cursor = "",
        limit: Limit = PAGE_ROWS,
        each_cursor: EachCursor = False,
        peers: WithPeers = False,
    ) -> models.TaskPageView:
        if peers:
            return merged.find_tasks(query, cursor, min(limit, archive.max_rows))
        return archive.find_tasks(query, cursor, limit, each_cursor=each_cursor)

    @router.get("/failures", summary="Failures by error, most frequent first")
    def list_failures(
        chosen: RunFilters,
        since: Since = "",
        until: Since = "",
        limit: Limit = PAGE_ROWS,
        peers: WithPeers = False,
    ) -> models.FailureListView:
        now = time.time()
        first, last = parse_time("since", since, now), parse_time("until", until, now)
        return (merged if peers else archive).list_failures(first, last, min(limit, archive.max_rows), chosen)

    @router.get("/events", summary="Failures, retries, rebalances and actions, newest first")
    def find_events(query: EventFilters, cursor: Cursor = "", limit: Limit = PAGE_ROWS) -> models.EventPageView:
        return archive.find_events(query, cursor, limit)

    @router.get("/recordings", summary="Stored recordings, by worker and period")
    def list_recordings(chosen: RunFilters) -> list[models.RecordingView]:
        return archive.list_recordings(chosen)

    return router
