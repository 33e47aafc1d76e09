"""What a process mounts into the web UI: sections, each a few pages and their part of the REST API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.web.routes import Routes


@dataclass(frozen=True, slots=True)
class Link:
    """A page in the navigation.

    Attributes:
        title: What it is called.
        path: Where it is.
        is_last: Whether it comes after the pages of all other sections.
    """

    title: str
    path: str
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the web UI.

    Attributes:
        links: Its pages in the navigation.
        pages: Their routes.
        api: Its routes below `/api/v1`.
        close: Ends what would keep the server from ending, such as streams.
    """

    links: Sequence[Link]
    pages: Routes
    api: Routes
    close: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class About:
    """What runs here, for the head of every page.

    Attributes:
        kind: As in "pipeline".
        name: Its name: a pipeline's consumer group.
        worker: The worker's name.
        version: Of tidemill.
        custom_links: Names and addresses of other places.
        cluster: The name of the installation; ''.
        is_read_only: Whether pages have nothing that changes something.
    """

    kind: str
    name: str
    worker: str
    version: str
    custom_links: Sequence[tuple[str, str]] = ()
    cluster: str = ""
    is_read_only: bool = False


@dataclass(frozen=True, slots=True)
class Health:
    """What probes ask, on any thread.

    Attributes:
        find_dead: Why the process should be restarted.
        find_unready: Why it is not ready.
    """

    find_dead: Callable[[], list[str]]
    find_unready: Callable[[], list[str]]
