"""Builds the web UI of a trigger host; `services.triggerer.lists.reporting.web_ui` imports it by name."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tidemill.recorder.format.file_layout import name_list_folder, name_list_group
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.memory_recording import MemoryRecording
from tidemill.runtime.log.setup import version
from tidemill.services.triggerer.lists.reporting.web_ui import WatchedHost
from tidemill.web.pages import Pages
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.section import build_recorded_section
from tidemill.web.sections import Health, PageAbout, UiSection
from tidemill.web.server import WebServer
from tidemill.web.triggers.section import build_triggers_section
from tidemill.web.triggers.view import TriggersView

#: A trigger host has no messages; links lead to messages of pipelines in the same folder.
_LEFT_OUT = frozenset({"Messages", "Tasks"})


def describe_about(watched: WatchedHost) -> PageAbout:
    """Return the description of the process for the head of every page."""
    settings = watched.settings
    links = [(link.name, link.url) for link in settings.debug.custom_links]
    if watched.metrics_address is not None:
        links.append(("Metrics", f"{watched.metrics_address}/metrics"))
    return PageAbout("triggers", watched.list_name, watched.worker, version(), links, settings.cluster_name)


def open_archive(watched: WatchedHost) -> Archive:
    """Return the recordings of this host, and of others in the same folder."""
    debug, recorder = watched.settings.debug, watched.recorder
    try:
        folder = Path(debug.db_dir).expanduser() if debug.db_dir else None
    except RuntimeError:  # a user without a home directory: the recording is in memory
        folder = None
    memory = {}
    if recorder is not None and isinstance(recording := recorder.writer.recording, MemoryRecording):
        memory[name_list_folder(watched.list_name)] = recording
    return Archive(Reader(folder, memory), debug.max_ui_rows, group=name_list_group(watched.list_name))


def mount_sections(pages: Pages, watched: WatchedHost) -> tuple[TriggersView, list[UiSection]]:
    """Return the view and the sections that show it."""
    archive = open_archive(watched)
    view = TriggersView(watched, pages, archive)
    recorded = build_recorded_section(archive, pages)
    links = [link for link in recorded.links if link.title not in _LEFT_OUT]
    return view, [build_triggers_section(view, pages), replace(recorded, links=links)]


def build_server(listener: socket.socket, key: str | None, watched: WatchedHost) -> WebServer:
    """Return the server.

    Args:
        listener: A listening socket.
        key: The key in the printed address; None if there are users or tokens.
        watched: The trigger host.
    """

    def mount(pages: Pages) -> Sequence[UiSection]:
        view, sections = mount_sections(pages, watched)
        view.start()
        return sections

    health = Health(find_dead=watched.find_dead, find_unready=watched.find_unready)
    return WebServer(listener, watched.settings.debug, key, describe_about(watched), health, mount)
