"""The pages and the API of a pipeline: overview, configuration, live updates, actions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Annotated, Literal

import structlog
from fastapi import Query
from fastapi.responses import Response
from sse_starlette import EventSourceResponse
from starlette.requests import Request

from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.file_layout import name_worker_folder
from tidemill.recorder.reading.runs import RunFilter
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.spark.live.web_ui import Watched
from tidemill.web.live import LiveUpdates
from tidemill.web.pages import Pages
from tidemill.web.peers.peers import Peers
from tidemill.web.pipeline import lists
from tidemill.web.pipeline.actions import build_actions
from tidemill.web.pipeline.lists import Lists, PipelineMoment
from tidemill.web.pipeline.live_board import LEASE_SECONDS, LiveBoard
from tidemill.web.pipeline.live_models import LivePicture
from tidemill.web.pipeline.models import Overview, Setting
from tidemill.web.pipeline.overview import describe_pipeline
from tidemill.web.pipeline.partitions import PartitionTable
from tidemill.web.pipeline.prometheus import PrometheusQuery, list_queries
from tidemill.web.pipeline.sampler import KEPT_SECONDS, PipelineSampler
from tidemill.web.pipeline.settings_view import list_settings
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.models import StoredRunView
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.series import Series, build_series, choose_step
from tidemill.web.workers import run_blocking

log = structlog.get_logger(__name__)

TICK_SECONDS = 1.0
_MILLION = 1_000_000
MAX_SERIES_SECONDS = 7 * 86_400
_PING_SECONDS = 15
#: A client that does not read for this long is disconnected; browsers reconnect by themselves.
_SEND_SECONDS = 30.0
#: The parts of the overview that are replaced when they change.
_PARTS = ("head", "tiles", "engines", "partitions", "sinks", "slowest", "hooks")


class PipelineView:
    """The state that pages and API show, and its live updates.

    Args:
        watched: The pipeline.
        pages: Renders parts of pages.
        archive: The recordings.
        writer: Records actions; None: they are only logged.

    Attributes:
        recording: The name of this worker's recordings.
    """

    def __init__(self, watched: Watched, pages: Pages, archive: Archive, writer: RecordWriter | None = None) -> None:
        self.archive = archive
        self.recording = name_worker_folder(watched.settings.kafka.consumer_group, watched.worker)
        self.watched = watched
        self.sampler = PipelineSampler()
        self.lists = Lists(watched, self.look, self.sampler)
        self._moment: PipelineMoment | None = None
        self._overview: Overview | None = None
        self.peers = Peers(watched.settings.debug.peers, lambda: archive.identity)
        self.board = LiveBoard()
        self.live = LiveUpdates({"overview": self._describe, "page": self._render, "tasks": self._show_tasks})
        self._pages = pages
        self._writer = writer
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling on the running loop, until the loop ends."""
        self.sample()
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def sample(self) -> None:
        since_boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        self.sampler.add(time.time(), since_boot, self.watched.asked.progress())

    def look(self) -> PipelineMoment:
        """Return a snapshot of the pipeline; all callers share it until the next totals arrive."""
        progress = self.watched.asked.progress()
        if self._moment is None or self._moment.progress is not progress:
            table = PartitionTable(progress, None if self._moment is None else self._moment.partitions)
            self._moment, self._overview = PipelineMoment(time.time(), progress, table), None
        return self._moment

    def now(self) -> Overview:
        """Return the state of the pipeline; shared like the snapshot."""
        moment = self.look()
        if self._overview is None:
            self._overview = describe_pipeline(
                self.watched, moment.progress, moment.partitions, self.sampler, moment.at
            )
        return self._overview

    def note_action(self, action: str, by: str) -> None:
        """Log and record an action and its user."""
        log.info("carried out an action for the web UI", action=action, by=by)
        if self._writer is not None:
            at_us = int(time.time() * _MILLION)
            event = RecordedEvent(at_us, EventKind.ACTION, text=action, data={"by": by})
            self._writer.add_event(event)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.tick()
            except Exception:
                log.exception("an update of the web UI failed; the next one is in a second")

    def tick(self) -> None:
        """Take a sample, and send updates to live clients."""
        self.sample()
        if self.live.has_clients("tasks"):
            self.watch_tasks()
        self.live.update()

    def watch_tasks(self) -> None:
        """Request reports about executors from the engines, for the next few seconds."""
        self.watched.engines.watch(self.board.take, LEASE_SECONDS)

    def _show_tasks(self) -> Mapping[str, str]:
        return {"tasks": self.board.describe_news().model_dump_json()}

    def _describe(self) -> Mapping[str, str]:
        return {"overview": self.now().model_dump_json()}

    def _render(self) -> Mapping[str, str]:
        overview = self.now()
        parts = {name: self._pages.render(f"overview/{name}.html", o=overview) for name in _PARTS}
        return parts | {"point": self.sampler.series(1).model_dump_json()}


def build_pipeline_section(view: PipelineView, pages: Pages) -> UiSection:
    links = [
        NavigationLink("Overview", "/"),
        NavigationLink("Live", "/live"),
        NavigationLink("Metrics", "/metrics-queries", is_last=True),
        NavigationLink("Configuration", "/configuration", is_last=True),
    ]
    routes, api = _build_pages(view, pages), _build_api(view)
    routes.include(lists.build_pages(view.lists, pages))
    api.include(lists.build_api(view.lists))
    return UiSection(links, routes, api, view.live.close)


def _build_pages(view: PipelineView, pages: Pages) -> Routes:
    router = Routes()

    @router.get("/")
    async def show_overview(
        request: Request,
        range_seconds: Annotated[int, Query(alias="range", ge=1, le=MAX_SERIES_SECONDS)] = KEPT_SECONDS,
    ) -> Response:
        # The overview also works while searches occupy all workers, then without the list of other runs.
        runs: list[StoredRunView] = []
        with contextlib.suppress(RequestProblem):
            runs = await run_blocking(view.archive.list_runs)
        others = [run for run in runs if run.recording != view.recording]
        return pages.answer(
            request, "overview.html", o=view.now(), range=range_seconds, others=others, peers=view.peers.addresses
        )

    @router.get("/metrics-queries")
    async def show_metrics(request: Request) -> Response:
        is_served = view.watched.metrics_address is not None
        return pages.answer(request, "metrics.html", queries=find_queries(view), served=is_served)

    @router.get("/live")
    async def show_live(request: Request) -> Response:
        least = view.watched.settings.debug.ws_min_duration_ms / 1000
        return pages.answer(request, "live.html", least_seconds=least)

    @router.get("/configuration")
    async def show_configuration(request: Request, changed: bool = False) -> Response:
        found = list_settings(view.watched.settings, view.watched.configured)
        shown = [setting for setting in found if not changed or setting.origin != "default"]
        sections: dict[str, list[Setting]] = {}
        for setting in shown:
            section = setting.key.partition(".")[0] if "." in setting.key else "general"
            sections.setdefault(section, []).append(setting)
        return pages.answer(request, "configuration.html", sections=sections, changed=changed, count=len(shown))

    return router


def find_queries(view: PipelineView) -> list[PrometheusQuery]:
    """Return ready-made queries for this pipeline's metrics."""
    settings = view.watched.settings
    return list_queries(settings.debug, view.watched.worker, settings.cluster_name)


def _build_api(view: PipelineView) -> Routes:
    router = Routes(tags=["pipeline"])

    @router.get("/overview", summary="The state of the pipeline")
    async def read_overview() -> Overview:
        return view.now()

    @router.get(
        "/series",
        summary="Time series, for charts",
        description="One point per second for the last 15 minutes; longer ranges are read from the recording, in "
        "larger steps.",
    )
    async def read_series(
        seconds: Annotated[
            int, Query(ge=1, le=MAX_SERIES_SECONDS, description="The length of the period up to now.")
        ] = KEPT_SECONDS,
    ) -> Series:
        if seconds <= KEPT_SECONDS:
            return view.sampler.series(seconds)
        step, now = choose_step(seconds), int(time.time())
        since = (now - seconds) // step * step
        counts = await run_blocking(
            view.archive.read_counts, RunFilter(recording=view.recording), since * _MILLION, (now + 1) * _MILLION, step
        )
        return build_series(counts, step, time.time())

    @router.get("/metrics-queries", summary="Ready-made queries for Prometheus")
    async def read_queries() -> list[PrometheusQuery]:
        return find_queries(view)

    @router.get("/configuration", summary="All settings, with secrets masked")
    async def read_configuration() -> list[Setting]:
        return list_settings(view.watched.settings, view.watched.configured)

    @router.get(
        "/live",
        summary="Live updates as server-sent events, at most once a second",
        description="The view `overview` sends the document of /overview when it changes. An event `missed` has the "
        "number of updates skipped because the client reads too slowly. The view `tasks` sends the state of the "
        "executors and the attempts that ended since the previous update; start with /live/tasks, and repeat that "
        "request after a gap in the numbers. The view `page` serves the pages of the web UI.",
        response_class=EventSourceResponse,
    )
    async def follow(
        request: Request, view_name: Annotated[Literal["overview", "page", "tasks"], Query(alias="view")] = "overview"
    ) -> Response:
        if view_name == "tasks":
            view.watch_tasks()
        events = await view.live.listen(view_name, request.state.is_known)
        return EventSourceResponse(events, ping=_PING_SECONDS, send_timeout=_SEND_SECONDS)

    @router.get(
        "/live/tasks",
        summary="The state of the executors, and the attempts that ended in the last minute",
        description="Engines report this only while a client follows the view `tasks` of /live.",
    )
    async def read_live_tasks() -> LivePicture:
        return view.board.describe_all()

    router.include(build_actions(view.watched, view.note_action))
    return router
