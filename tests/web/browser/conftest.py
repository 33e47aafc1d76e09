"""One browser for all tests of this folder, which run in one process: it takes longer to start than most of them.

The event loop of its client runs in the thread of the tests, so it ends before tests of other folders begin.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

FOLDER = Path(__file__).parent
#: The browser while there is one, and what ends it.
_open: list[tuple[Browser, contextlib.ExitStack]] = []


@pytest.fixture(scope="module")
def browser() -> Browser:
    """The system's chromium: the one without windows, which takes half the CPU time, or the whole of it."""
    if not _open:
        found = shutil.which("chromium-headless-shell") or shutil.which("chromium")
        assert found is not None, (
            "chromium is missing; scripts/test installs it (apt install chromium-headless-shell fonts-dejavu-core)"
        )
        with contextlib.ExitStack() as stack:
            playwright = stack.enter_context(sync_playwright())
            browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
            stack.callback(browser.close)
            _open.append((browser, stack.pop_all()))
    return _open[0][0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the browser after the last test that needs it."""
    if _open and (nextitem is None or FOLDER not in nextitem.path.parents):
        _open.pop()[1].close()
