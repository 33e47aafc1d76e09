"""One browser for all tests of this folder, which run in one process: it takes longer to start than most of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, sync_playwright


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The system's chromium."""
    found = shutil.which("chromium")
    assert found is not None, "chromium is missing; scripts/test installs it (apt install chromium fonts-dejavu-core)"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()
