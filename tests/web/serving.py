"""Asks the web UI of a scripted pipeline, in this process and without a socket."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
from starlette.types import ASGIApp
from tests.web.scripted_pipeline import ScriptedPipeline

from tidemill.spark.live.readiness import find_unready
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.redrive_desk import RedriveDesk
from tidemill.web.letters.redrive_section import build_redrive_section
from tidemill.web.letters.section import build_letters_section
from tidemill.web.pages import Pages
from tidemill.web.pipeline.section import PipelineView, build_pipeline_section
from tidemill.web.pipeline.start import describe_about, open_archive
from tidemill.web.probe.desk import ProbeDesk
from tidemill.web.probe.section import build_probe_section
from tidemill.web.recorded.section import build_recorded_section
from tidemill.web.sections import Health, UiSection
from tidemill.web.values.section import ValueReader, build_values_section
from tidemill.web.workers import Workers

ORIGIN = "http://127.0.0.1:8080"
KEY = "the-key-of-the-address"
PORT = 8080


def make_app(pipeline: ScriptedPipeline, more: Sequence[UiSection] = (), workers: Workers | None = None) -> ASGIApp:
    """Return the application, as a server builds it, with further sections if a test has some."""
    watched, debug = pipeline.watched(), pipeline.settings.debug
    origins = Origins(debug.host, debug.debug_url, tuple(debug.allowed_hosts))
    pages = Pages(describe_about(watched), origins.prefix)
    archive = open_archive(watched)
    view = PipelineView(watched, pages, archive)
    view.sample()
    logins = Logins(None if debug.users or debug.tokens else KEY, debug.users, debug.tokens)
    health = Health(list, lambda: find_unready(pipeline.run, pipeline.progress(), pipeline.orphans))
    sections = [build_pipeline_section(view, pages), build_recorded_section(archive, pages, peers=view.peers)]
    sections.append(build_letters_section(LetterBox(watched.settings), pages, archive.max_rows))
    desk = RedriveDesk(watched.settings, view.note_action)
    sections.append(build_redrive_section(desk, watched.settings, pages))
    reader = ValueReader(watched.settings)
    sections.append(build_values_section(reader, pages))
    probes = ProbeDesk(watched.engines, view.note_action)
    sections.append(build_probe_section(probes, reader, watched.settings, pages))
    return create_app([*sections, *more], pages, logins, origins, health, PORT, workers)


@asynccontextmanager
async def connect(pipeline: ScriptedPipeline, app: ASGIApp | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that is not logged in."""
    transport = httpx.ASGITransport(app or make_app(pipeline), client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        yield client


@asynccontextmanager
async def log_in(pipeline: ScriptedPipeline, app: ASGIApp | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client that has used the key, and has what a page's changes need."""
    async with connect(pipeline, app) as client:
        await client.get(f"/login?key={KEY}")
        page = await client.get("/")
        found = re.search(r'data-csrf="([^"]+)"', page.text)
        assert found is not None, page.text
        client.headers.update({"X-CSRF-Token": found[1], "Origin": ORIGIN})
        yield client
