"""Builds the web UI of DAGs; `services.dev.web_ui` imports it by name."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from tidemill.runtime.log.setup import version
from tidemill.services.dev.web_ui import WatchedDags
from tidemill.web.dags.desk import Desk
from tidemill.web.dags.section import build_dags_section
from tidemill.web.pages import Pages
from tidemill.web.sections import Health, PageAbout, UiSection
from tidemill.web.server import WebServer


def describe_about(watched: WatchedDags) -> PageAbout:
    """Return the description of the process for the head of every page."""
    settings = watched.settings
    links = [(link.name, link.url) for link in settings.debug.custom_links]
    if watched.metrics_address is not None:
        links.append(("Metrics", f"{watched.metrics_address}/metrics"))
    return PageAbout("DAGs", watched.name, watched.worker, version(), links, settings.cluster_name)


def mount_sections(pages: Pages, watched: WatchedDags) -> list[UiSection]:
    return [build_dags_section(Desk(watched, watched.settings.debug.max_ui_rows), pages)]


def build_server(listener: socket.socket, key: str | None, watched: WatchedDags) -> WebServer:
    """Return the server.

    Args:
        listener: A listening socket.
        key: The key in the printed address; None if there are users or tokens.
        watched: The DAGs.
    """

    def mount(pages: Pages) -> Sequence[UiSection]:
        return mount_sections(pages, watched)

    health = Health(find_dead=watched.find_dead, find_unready=watched.find_unready)
    return WebServer(listener, watched.settings.debug, key, describe_about(watched), health, mount)
