"""The overview's list of other hosts, their pipelines, and those that do not answer."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from tidemill.web.pages import Pages
from tidemill.web.peers.peers import PeerAnswer, Peers
from tidemill.web.recorded import models
from tidemill.web.routes import Routes
from tidemill.web.workers import BlockingRoute


class PeerLag(BaseModel):
    """The part of a peer's lag that is shown."""

    messages: int | None


class PeerOverview(BaseModel):
    """The part of a peer's overview that is shown."""

    group: str
    worker: str
    state: str
    done_per_second: float
    lag: PeerLag
    problems: list[str]


@dataclass(frozen=True, slots=True)
class PeerHost:
    """A peer in the overview; a stale answer carries its time and the problem."""

    runs: PeerAnswer[list[models.StoredRunView]]
    overview: PeerAnswer[PeerOverview]

    @property
    def running(self) -> int:
        """The number of its runs that are being written."""
        return sum(run.live for run in self.runs.value or ())


def list_hosts(peers: Peers) -> list[PeerHost]:
    """Query all peers in parallel; takes no longer than one peer may take."""
    queries = dict.fromkeys(peers.addresses, ())
    runs = peers.begin("/runs", queries, list[models.StoredRunView], keep=True)
    # A peer without a pipeline has no overview.
    overviews = peers.begin("/overview", queries, PeerOverview, keep=True)
    return [PeerHost(*pair) for pair in zip(runs(), overviews(), strict=True)]


def build_pages(pages: Pages, peers: Peers) -> Routes:
    router = Routes(route_class=BlockingRoute)

    @router.get("/hosts")
    def show() -> Response:
        return HTMLResponse(pages.render("recorded/hosts.html", hosts=list_hosts(peers)))

    return router
