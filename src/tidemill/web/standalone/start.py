"""Builds the web UI of recordings, for `tidemill web`."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.recorder.reading.reader import Reader
from tidemill.runtime.log.setup import version
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.section import build_letters_section
from tidemill.web.pages import Pages
from tidemill.web.peers.peers import Peers
from tidemill.web.recorded.archive import Archive
from tidemill.web.recorded.section import build_recorded_section
from tidemill.web.sections import Health, PageAbout, UiSection
from tidemill.web.server import WebServer
from tidemill.web.standalone.section import ABSENT, NO_LETTERS, build_standalone_section


def mount_sections(pages: Pages, settings: Settings, folder: Path, *, letters_of: Path | None) -> list[UiSection]:
    """Return the sections; see `build_server`."""
    archive = Archive(Reader(folder), settings.debug.max_ui_rows)
    has_letters = letters_of is not None
    absent = ABSENT if has_letters else f"{ABSENT}{NO_LETTERS}"
    recorded = build_recorded_section(archive, pages, absent, Peers(settings.debug.peers, lambda: archive.identity))
    sections = [build_standalone_section(pages, has_letters=has_letters), recorded]
    if has_letters:
        sections.append(build_letters_section(LetterBox(settings, config=letters_of), pages, archive.max_rows))
    return sections


def describe_about(settings: Settings, folder: Path) -> PageAbout:
    """Return the description of the process for the head of every page."""
    links = [(link.name, link.url) for link in settings.debug.custom_links]
    return PageAbout("recordings in", str(folder), "", version(), links, settings.cluster_name, is_read_only=True)


def build_server(
    listener: socket.socket, key: str | None, settings: Settings, folder: Path, *, letters_of: Path | None
) -> WebServer:
    """Return the server.

    Args:
        listener: A listening socket.
        key: The key in the printed address; None if there are users or tokens.
        settings: Users and tokens, and the location of dead letters.
        folder: The folder of the recordings.
        letters_of: The configuration file of the pipeline whose dead letters are shown; None: none are shown.
    """

    def mount(pages: Pages) -> Sequence[UiSection]:
        return mount_sections(pages, settings, folder, letters_of=letters_of)

    health = Health(find_dead=list, find_unready=list)
    return WebServer(listener, settings.debug, key, describe_about(settings, folder), health, mount)
