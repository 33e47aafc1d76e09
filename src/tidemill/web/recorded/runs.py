"""The page and the API of runs: the runs with recordings, and their time series."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query
from fastapi.responses import Response
from starlette.requests import Request

from tidemill.recorder.reading.runs import RunFilter
from tidemill.web.pages import Pages
from tidemill.web.recorded import models
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.filters import RunFilters, parse_time
from tidemill.web.routes import Routes
from tidemill.web.series import Series, build_series, choose_step
from tidemill.web.workers import BlockingRoute

RANGE_SECONDS = 3600
MAX_RANGE_SECONDS = 31 * 86_400
_MILLION = 1_000_000
Range = Annotated[int, Query(alias="range", ge=1, le=MAX_RANGE_SECONDS)]


def show_runs(
    archive: Archive,
    pages: Pages,
    request: Request,
    chosen: RunFilter,
    range_seconds: int,
    absent: str = "",
    peers: Mapping[str, str] = MappingProxyType({}),
) -> Response:
    """Return the page of runs.

    Args:
        archive: The recordings.
        pages: Renders the page.
        request: The request to answer.
        chosen: The runs whose charts are shown.
        range_seconds: The time range of the charts.
        absent: Which parts this server does not show, and why; may be ''.
        peers: The addresses of other hosts, by name.
    """
    runs = archive.list_runs()
    shown = select_runs(runs, chosen)
    filters = {name: text for name in ("recording", "group", "worker") if (text := getattr(chosen, name))}
    # For runs that have ended, the charts end with the last write.
    ended_at = None if not shown or any(run.live for run in shown) else max(run.written_at for run in shown)
    series = {"seconds": str(range_seconds), **filters}
    if ended_at is not None:
        series["until"] = datetime.fromtimestamp(ended_at + 3, UTC).isoformat(timespec="seconds")

    def change(**changes: str | None) -> str:
        kept = {**filters, "range": str(range_seconds), **changes}
        return f"?{urlencode({name: text for name, text in kept.items() if text})}"

    return pages.answer(
        request,
        "recorded/runs.html",
        runs=runs,
        shown=shown,
        first=lambda name: request.query_params.get(name, ""),
        change=change,
        filters=urlencode(filters),
        range=range_seconds,
        series=pages.url(f"/api/v1/runs/series?{urlencode(series)}"),
        ended_at=ended_at,
        absent=absent,
        peers=peers,
    )


def select_runs(runs: Sequence[models.StoredRunView], chosen: RunFilter) -> list[models.StoredRunView]:
    """Return the runs that match a filter."""
    return [
        run
        for run in runs
        if chosen.recording in (None, run.recording)
        and chosen.group in (None, run.group)
        and chosen.worker in (None, run.worker)
    ]


def build_pages(archive: Archive, pages: Pages, absent: str, peers: Mapping[str, str]) -> Routes:
    """Return the route of the page; see `show_runs`."""
    router = Routes(route_class=BlockingRoute)

    @router.get("/runs")
    def show(request: Request, chosen: RunFilters, range_seconds: Range = RANGE_SECONDS) -> Response:
        return show_runs(archive, pages, request, chosen, range_seconds, absent, peers)

    return router


def build_api(archive: Archive) -> Routes:
    router = Routes(route_class=BlockingRoute, tags=["recordings"])

    @router.get("/runs", summary="Runs with recordings: live runs first, then newest first")
    def list_runs(chosen: RunFilters) -> list[models.StoredRunView]:
        return select_runs(archive.list_runs(), chosen)

    @router.get(
        "/runs/series",
        summary="Recorded time series",
        description="Values of several runs at the same time are added up.",
    )
    def read_series(
        chosen: RunFilters,
        seconds: Annotated[
            int, Query(ge=1, le=MAX_RANGE_SECONDS, description="The length of the period.")
        ] = RANGE_SECONDS,
        until: Annotated[str, Query(max_length=40, description="The end of the period; default: now.")] = "",
    ) -> Series:
        now = time.time()
        end_us = parse_time("until", until, now)
        end = int(now if end_us is None else min(now, end_us / _MILLION))
        step = choose_step(seconds)
        since = (end - seconds) // step * step
        counts = archive.read_counts(chosen, since * _MILLION, (end + 1) * _MILLION, step)
        return build_series(counts, step, now)

    return router
