"""What tests with a browser share: looks, pages that are logged in, and what went wrong in them.

`TIDEMILL_SCREENSHOTS=DIR` keeps pictures.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, Request
from tests.web.scripted_pipeline import ScriptedPipeline

WIDE, NARROW = (1280, 850), (390, 844)
#: Both widths and themes; the short run has one of the four, that at full length two, which have each of them.
EVERY_LOOK = pytest.mark.parametrize(
    ("size", "theme"),
    [
        (NARROW, "dark"),
        pytest.param(WIDE, "light", marks=pytest.mark.long),
        pytest.param(WIDE, "dark", marks=pytest.mark.nightly),
        pytest.param(NARROW, "light", marks=pytest.mark.nightly),
    ],
)
#: Both widths; the short run has the one that has less room, and most other tests the other one.
EACH_WIDTH = pytest.mark.parametrize("size", [pytest.param(WIDE, marks=pytest.mark.long), NARROW])
#: Waits of the browser, in milliseconds: enough for a machine that is very busy.
PATIENCE = 90_000


@dataclass
class Served:
    """A pipeline with its web UI."""

    pipeline: ScriptedPipeline
    address: str
    #: The page to which the address leads.
    first: str = "/"

    @property
    def base(self) -> str:
        parts = urlsplit(self.address)
        return f"{parts.scheme}://{parts.netloc}"


@dataclass
class Watch:
    """What went wrong in a page."""

    base: str
    wrong: list[str] = field(default_factory=list)

    def follow(self, page: Page) -> None:
        page.on(
            "console", lambda said: self.wrong.append(f"{said.type}: {said.text}") if said.type == "error" else None
        )
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("request", self._check)

    def _check(self, request: Request) -> None:
        if not request.url.startswith((f"{self.base}/", "data:")):
            self.wrong.append(f"a request elsewhere: {request.url}")


@contextlib.contextmanager
def opened(browser: Browser, served: Served, size: tuple[int, int], theme: str) -> Iterator[tuple[Page, Watch]]:
    """Yield a page that is logged in."""
    context = browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=theme, timezone_id="America/New_York"
    )  # type: ignore[arg-type]
    context.set_default_timeout(PATIENCE)
    page, watch = context.new_page(), Watch(served.base)
    watch.follow(page)
    page.goto(served.address)
    page.wait_for_url(f"{served.base}{served.first}")
    try:
        yield page, watch
    finally:
        context.close()


def keep_picture(page: Page, name: str) -> None:
    """Keep a picture of a page if pictures are wanted: to draw one is most of what a page costs."""
    if folder := os.environ.get("TIDEMILL_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True)
