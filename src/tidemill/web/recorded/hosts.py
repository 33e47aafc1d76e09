"""A part of the overview: the other hosts, what runs there, and which of them do not answer."""

from __future__ import annotations

from dataclasses import dataclass

from fastapi.responses import HTMLResponse, Response
from pydantic import BaseModel

from tidemill.web.pages import Pages
from tidemill.web.peers.peers import Answer, Peers
from tidemill.web.recorded import models
from tidemill.web.routes import Routes
from tidemill.web.workers import BlockingRoute


class PeerLag(BaseModel):
    """The part of a lag that is shown of a peer."""

    messages: int | None


class PeerOverview(BaseModel):
    """The part of an overview that is shown of a peer."""

    group: str
    worker: str
    state: str
    done_per_second: float
    lag: PeerLag
    problems: list[str]


@dataclass(frozen=True, slots=True)
class Host:
    """A peer, as the overview shows it; what is stale has the time it is of, and the problem."""

    runs: Answer[list[models.Run]]
    overview: Answer[PeerOverview]

    @property
    def running(self) -> int:
        """How many of its runs are being written."""
        return sum(run.live for run in self.runs.value or ())


def list_hosts(peers: Peers) -> list[Host]:
    """Return what all peers say, within the time that one may take."""
    everybody = dict.fromkeys(peers.addresses, ())
    runs = peers.begin("/runs", everybody, list[models.Run], keep=True)
    # One without a pipeline has no overview.
    overviews = peers.begin("/overview", everybody, PeerOverview, keep=True)
    return [Host(*pair) for pair in zip(runs(), overviews(), strict=True)]


def build_pages(pages: Pages, peers: Peers) -> Routes:
    """Return the route."""
    router = Routes(route_class=BlockingRoute)

    @router.get("/hosts")
    def show() -> Response:
        return HTMLResponse(pages.render("recorded/hosts.html", hosts=list_hosts(peers)))

    return router
