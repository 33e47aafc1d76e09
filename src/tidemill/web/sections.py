"""Sections that a process mounts into the web UI: each has a few pages and a part of the REST API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tidemill.web.routes import Routes


@dataclass(frozen=True, slots=True)
class NavigationLink:
    """A page in the navigation.

    Attributes:
        title: The text of the link.
        path: The path of the page.
        is_last: Whether the link follows the links of all other sections.
    """

    title: str
    path: str
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class UiSection:
    """A part of the web UI.

    Attributes:
        links: Its pages in the navigation.
        pages: The routes of its pages.
        api: Its routes below `/api/v1`.
        close: Ends responses that would delay the server's shutdown, such as streams.
    """

    links: Sequence[NavigationLink]
    pages: Routes
    api: Routes
    close: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True)
class PageAbout:
    """Describes the process, for the head of every page.

    Attributes:
        kind: The kind of process, as in "pipeline".
        name: The process's name; a pipeline's is its consumer group.
        worker: The worker's name.
        version: The version of tidemill.
        custom_links: Titles and addresses of further links.
        cluster: The name of the installation; may be ''.
        is_read_only: Whether pages show no forms and buttons that change anything.
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
    """Answers probes, on any thread.

    Attributes:
        find_dead: Returns the reasons to restart the process.
        find_unready: Returns the reasons why the process is not ready.
    """

    find_dead: Callable[[], list[str]]
    find_unready: Callable[[], list[str]]
