"""The web UI of recordings, without a pipeline."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.types import ASGIApp
from tests.web.recordings import COUNT, FAILED, record, write_letters
from tests.web.scripted_pipeline import SECRET, SETTINGS
from tests.web.serving import KEY, ORIGIN, PORT

from tidemill.config.settings import Settings
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.pages import Pages
from tidemill.web.sections import Health
from tidemill.web.standalone.start import WebContent, describe_about, mount_sections


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recordings") / "db"
    record(path)
    return path


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_letters(tmp_path_factory.mktemp("letters"))


def make_app(folder: Path, letters: Path | None = None) -> ASGIApp:
    settings = Settings.model_validate(SETTINGS | ({"dlq": {"path": str(letters)}} if letters else {}))
    shown = WebContent(folder, None if letters is None else Path("/etc/orders.yaml"))
    pages = Pages(describe_about(settings, shown))
    sections = mount_sections(pages, settings, shown)
    logins, origins = Logins(KEY, {}, {}), Origins("127.0.0.1")
    return create_app(sections, pages, logins, origins, Health(list, list), PORT)


@asynccontextmanager
async def connect(app: ASGIApp, *, known: bool = True) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 50_000))
    async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
        if known:
            await client.get(f"/login?key={KEY}")
        yield client


PATHS = [
    ("/runs", "worker-1"),
    ("/messages", "customer-1"),
    (f"/messages/orders/0/{FAILED}", "postgres.db"),
    ("/tasks", f"task-{COUNT - 1}"),
    ("/failures", "exit code #"),
    ("/events", "dead lettered"),
    ("/recordings", "order-workers"),
]


@pytest.mark.parametrize(("path", "text"), PATHS)
async def test_recorded_pages_are_those_of_a_pipeline(folder: Path, path: str, text: str) -> None:
    async with connect(make_app(folder)) as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert text in answer.text
    assert SECRET not in answer.text


async def test_the_first_page_says_what_is_absent_and_why(folder: Path) -> None:
    async with connect(make_app(folder)) as client:
        answer = await client.get("/", follow_redirects=True)
    assert answer.url.path == "/runs"
    assert "open the web UI of a running pipeline" in answer.text
    assert "tidemill web CONFIG" in answer.text
    for path in ("/configuration", "/letters"):
        assert f'href="{path}"' not in answer.text


@pytest.mark.parametrize("path", ["/configuration", "/live", "/streams", "/probe", "/letters"])
async def test_what_needs_a_pipeline_says_so(folder: Path, path: str) -> None:
    async with connect(make_app(folder)) as client:
        page = await client.get(path, headers={"Accept": "text/html"})
        document = await client.get(f"/api/v1{path}")
    assert (page.status_code, document.status_code) == (404, 404)
    assert "a running pipeline" in page.text
    assert "a running pipeline" in document.json()["detail"]


async def test_nothing_can_be_changed(folder: Path) -> None:
    async with connect(make_app(folder)) as client:
        page = (await client.get("/runs")).text
        csrf = page.partition('data-csrf="')[2].partition('"')[0]
        headers = {"X-CSRF-Token": csrf, "Origin": ORIGIN}
        answers = [await client.post(f"/api/v1/actions/{name}", headers=headers) for name in ("drain", "release")]
        answers += [
            await client.post(path, headers=headers) for path in ("/api/v1/redrives", "/api/v1/redrives/1/send")
        ]
    assert csrf
    assert [answer.status_code for answer in answers] == [404] * 4
    assert "data-action" not in page


async def test_the_letters_of_a_configuration_are_shown(folder: Path, letters: Path) -> None:
    async with connect(make_app(folder, letters)) as client:
        page = (await client.get("/letters")).text
        letter = (await client.get("/letters/letter-5")).text
        runs = (await client.get("/runs")).text
    assert "letter-5" in page
    assert "/redrives" not in page + letter
    assert "tidemill dlq redrive /etc/orders.yaml --id letter-5" in letter
    assert 'href="/letters"' in runs
    assert "tidemill web CONFIG" not in runs


async def test_nobody_sees_anything_without_the_key_or_by_another_name(folder: Path) -> None:
    async with connect(make_app(folder), known=False) as client:
        page = await client.get("/messages")
        document = await client.get("/api/v1/messages")
        foreign = await client.get("/messages", headers={"Host": "evil.example"})
        health = await client.get("/healthz")
    assert (page.status_code, document.status_code, foreign.status_code) == (303, 401, 421)
    assert health.status_code == 200
