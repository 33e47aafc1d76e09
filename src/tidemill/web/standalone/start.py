"""Builds the web UI of recordings and of the DAGs of a shared store, for `tidemill web`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tidemill.config.redaction import redact_text
from tidemill.config.settings import Settings
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.setup import version
from tidemill.services.dev.web_ui import WatchedDags
from tidemill.services.hosts.store_thread import StoreThread
from tidemill.web.dags.desk import Desk
from tidemill.web.dags.section import build_dags_section
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.section import build_letters_section
from tidemill.web.pages import Pages
from tidemill.web.peers.peers import Peers
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.section import build_recorded_section
from tidemill.web.sections import Health, NavigationLink, PageAbout, UiSection
from tidemill.web.server import WebServer
from tidemill.web.standalone.section import ABSENT, NO_LETTERS, build_standalone_section


@dataclass(frozen=True, slots=True)
class WebContent:
    """What a server without a pipeline shows.

    Attributes:
        recordings: The folder of recordings; None: it shows none.
        letters_of: The configuration file of the pipeline whose dead letters are shown; None: none are shown.
        store: The store of the DAGs; None: it shows none.
    """

    recordings: Path | None
    letters_of: Path | None = None
    store: StoreThread | None = None


def mount_sections(pages: Pages, settings: Settings, shown: WebContent) -> list[UiSection]:
    """Return the sections; see `build_server`."""
    sections: list[UiSection] = []
    if shown.store is not None:
        worker = find_worker_name(settings)
        watched = WatchedDags(settings, worker, _name_store(settings), shown.store, shown.store.loop)
        sections.append(build_dags_section(Desk(watched, settings.debug.max_ui_rows), pages))
    if shown.recordings is not None:
        recorded = _mount_recordings(pages, settings, shown.recordings, letters_of=shown.letters_of)
        # The first section has the runs of DAGs.
        sections += [replace(one, links=[*map(_rename, one.links)]) for one in recorded] if sections else recorded
    return sections


def _rename(link: NavigationLink) -> NavigationLink:
    return replace(link, title="Recorded runs") if link.title == "Runs" else link


def _mount_recordings(pages: Pages, settings: Settings, folder: Path, *, letters_of: Path | None) -> list[UiSection]:
    archive = Archive(Reader(folder), settings.debug.max_ui_rows)
    has_letters = letters_of is not None
    absent = ABSENT if has_letters else f"{ABSENT}{NO_LETTERS}"
    recorded = build_recorded_section(archive, pages, absent, Peers(settings.debug.peers, lambda: archive.identity))
    sections = [build_standalone_section(pages, has_letters=has_letters), recorded]
    if has_letters:
        sections.append(build_letters_section(LetterBox(settings, config=letters_of), pages, archive.max_rows))
    return sections


def _name_store(settings: Settings) -> str:
    return redact_text(settings.store.url)


def describe_about(settings: Settings, shown: WebContent) -> PageAbout:
    """Return the description of the process for the head of every page."""
    links = [(link.name, link.url) for link in settings.debug.custom_links]
    kind, name = ("recordings in", str(shown.recordings))
    if shown.store is not None:
        kind, name = "DAGs in", _name_store(settings)
    return PageAbout(kind, name, "", version(), links, settings.cluster_name, is_read_only=True)


def build_server(listener: socket.socket, key: str | None, settings: Settings, shown: WebContent) -> WebServer:
    """Return the server.

    Args:
        listener: A listening socket.
        key: The key in the printed address; None if there are users or tokens.
        settings: Users and tokens, and the location of dead letters.
        shown: What it shows.
    """

    def mount(pages: Pages) -> Sequence[UiSection]:
        return mount_sections(pages, settings, shown)

    health = Health(find_dead=list, find_unready=list if shown.store is None else shown.store.find_unready)
    return WebServer(listener, settings.debug, key, describe_about(settings, shown), health, mount)
