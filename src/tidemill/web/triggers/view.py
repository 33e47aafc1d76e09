"""Queries a trigger host for pages and API, and keeps live pages current.

Calls to the host's loop are made on worker threads, never on the loop of the web UI.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import TypeVar
from urllib.parse import urlencode

import structlog

from tidemill.recorder.format.file_layout import name_list_folder
from tidemill.services.triggerer.lists.reporting.host_view import HostView
from tidemill.services.triggerer.lists.reporting.web_ui import WatchedHost
from tidemill.web.live import LiveUpdates
from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.archive import Archive
from tidemill.web.triggers import models
from tidemill.web.triggers.lane_series import LaneSeries, read_lane_series
from tidemill.web.workers import Workers

log = structlog.get_logger(__name__)

T = TypeVar("T")
PAGE_ROWS = 100
TICK_SECONDS = 1.0
_HANGS = "the event loop of the trigger host does not answer; its log names the trigger that blocks it"


class TriggersView:
    """The state of a trigger host, for pages and API.

    Args:
        watched: The host.
        pages: Renders parts of pages.
        archive: The recordings.
    """

    def __init__(self, watched: WatchedHost, pages: Pages, archive: Archive) -> None:
        self.watched = watched
        self._archive = archive
        self._recording = name_list_folder(watched.list_name)
        self._pages = pages
        self._max_rows = archive.max_rows
        self._parts: dict[str, Mapping[str, str]] = {"host": {}, "triggers": {}, "streams": {}}
        self.live = LiveUpdates({name: lambda name=name: self._parts[name] for name in self._parts})  # type: ignore[misc]
        self._workers = Workers(threads=1)
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start following the host on the running loop, until the loop ends."""
        self._ticking = asyncio.get_running_loop().create_task(self._tick())

    def ask(self, question: Callable[[HostView], T]) -> T:
        """Return the host's answer; blocks.

        Raises:
            Problem: The host does not answer.
        """
        try:
            return self.watched.ask(question)
        except TimeoutError:
            raise RequestProblem(503, _HANGS, {"Retry-After": "5"}) from None

    def read_host(self) -> models.TriggerHostView:
        """Return the state of the host; blocks."""
        return models.TriggerHostView.model_validate(self.ask(lambda view: view.describe_host()))

    def list_triggers(self, cursor: str, limit: int, states: tuple[str, ...], text: str) -> models.TriggerPage:
        """Return a page of triggers; blocks."""
        limit = self._limit(limit)
        found, more = self.ask(lambda view: view.list_triggers(cursor or None, limit, states, text))
        rows = [models.ListTriggerView.model_validate(one) for one in found]
        return models.TriggerPage(rows=rows, cursor=rows[-1].name if more else None)

    def list_streams(self, cursor: str, limit: int) -> models.StreamPage:
        """Return a page of streams; blocks."""
        limit = self._limit(limit)
        number, _, name = cursor.partition("-")
        found, more = self.ask(lambda view: view.list_streams((name, number) if cursor else None, limit))
        rows = [models.StreamView.model_validate(one) for one in found]
        return models.StreamPage(rows=rows, cursor=f"{rows[-1].id}-{rows[-1].name}" if more else None)

    def find_stream(self, wanted: str, after: int, limit: int) -> models.StreamDetails:
        """Return a stream; blocks.

        Raises:
            Problem: There is no stream with this id.
        """
        limit = self._limit(limit)
        found = self.ask(lambda view: view.find_stream(wanted, after, limit))
        if found is None:
            raise RequestProblem(
                404,
                "this stream does not exist now; its triggers have ended, or it has failed and is not restarted yet",
            )
        stream, lanes, subscribers, more = found
        rows = [models.Lane.model_validate(lane) for lane in lanes]
        return models.StreamDetails(
            stream=models.StreamView.model_validate(stream),
            subscribers=subscribers,
            lanes=rows,
            cursor=str(rows[-1].head) if more else None,
        )

    def read_series(self, seconds: int, stream: str | None, lane: str | None) -> LaneSeries:
        """Return the time series of lanes; blocks."""
        return read_lane_series(self._archive, self._recording, seconds, stream, lane)

    def _limit(self, limit: int) -> int:
        return max(1, min(limit, self._max_rows))

    # -- live ----------------------------------------------------------------------------------------------------------

    async def refresh(self, name: str) -> None:
        """Read the current state for a live page, so that its first update is current."""
        self._parts[name] = await self._workers.run(self._render, name)

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                for name in filter(self.live.has_clients, self._parts):
                    await self.refresh(name)
            except RequestProblem:
                pass  # the host does not answer; the pages show the age of their data
            except Exception:
                log.exception("an update of the web UI failed; the next one is in a second")
            self.live.update()

    def _render(self, name: str) -> Mapping[str, str]:
        host = self.read_host()
        if name == "host":
            return {"host": host.model_dump_json()}
        render = self._pages.render
        parts = {
            "head": render("triggers/head.html", o=host, title=name.capitalize()),
            "tiles": render("triggers/tiles.html", o=host),
            "point": f"[{host.at}]",
        }
        if name == "streams":
            page = self.list_streams("", PAGE_ROWS)
            table = render("triggers/stream_table.html", page=page, more=self._link_more(name, page))
            return parts | {"streams": table}
        triggers = self.list_triggers("", PAGE_ROWS, (), "")
        more = self._link_more(name, triggers)
        return parts | {"triggers": render("triggers/trigger_table.html", page=triggers, more=more, at=host.at)}

    def _link_more(self, name: str, page: models.StreamPage | models.TriggerPage) -> str:
        return "" if page.cursor is None else self._pages.url(f"/{name}?{urlencode({'cursor': page.cursor})}")
