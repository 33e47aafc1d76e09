"""The hook of the site finds what a page would request elsewhere; scripts/test builds the site with it."""

from __future__ import annotations

import importlib.util
import logging
import types
from pathlib import Path

import pytest
from tests.docs.snippets import ROOT

spec = importlib.util.spec_from_file_location("site_hook", ROOT / "scripts/site_hook.py")
assert spec is not None
assert spec.loader is not None
site_hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site_hook)


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://cdn.example/lunr.js"></script>',
        "<script src=//cdn.example/lunr.js></script>",
        '<link rel="stylesheet" href="https://fonts.example/css?family=Roboto">',
        '<link rel="preconnect" href="https://fonts.example" crossorigin>',
        '<img alt="build" src="http://badges.example/build.svg">',
        "<style>@import 'https://fonts.example/roboto.css';</style>",
        "body { background: url(//images.example/sea.png) }",
    ],
)
def test_what_a_browser_requests_elsewhere_is_found(html: str) -> None:
    (address,) = site_hook.find_requests(html)
    assert "example" in address


@pytest.mark.parametrize(
    "html",
    [
        '<a href="https://kafka.apache.org">Kafka</a>',
        '<script src="../assets/javascripts/bundle.js"></script>',
        '<link rel="canonical" href="https://docs.example/index.html">',
        '<img src="data:image/png;base64,AAAA">',
        "body { background: url(sea.png) }",
    ],
)
def test_links_and_what_is_in_the_site_are_not_requests_elsewhere(html: str) -> None:
    assert list(site_hook.find_requests(html)) == []


def test_a_page_that_requests_something_elsewhere_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "how-to").mkdir()
    (tmp_path / "how-to/index.html").write_text('<img src="https://badges.example/build.svg">')
    with caplog.at_level(logging.WARNING):
        site_hook.on_post_build({"site_dir": str(tmp_path)})
    assert caplog.messages == ["how-to/index.html requests https://badges.example/build.svg; keep it in the site"]


def test_a_code_block_keeps_its_language_only() -> None:
    page = "```sh background\ntidemill broker\n```\n\n```yaml triggers\n- name: a\n```\n\n```python\n1\n```\n"
    expected = page.replace("sh background", "sh").replace("yaml triggers", "yaml")
    assert site_hook.on_page_markdown(page) == expected


def test_code_in_a_table_shows_its_bars() -> None:
    page = "| `--to source\\|sink` | a \\| b |\n`x\\|y`\n"
    assert site_hook.on_page_markdown(page) == "| `--to source|sink` | a \\| b |\n`x\\|y`\n"


@pytest.mark.parametrize(("url", "path"), [("index.html", "assets/worker.js"), ("a/b.html", "../assets/worker.js")])
def test_the_search_in_pages_on_disk_uses_the_file_of_the_site(url: str, path: str) -> None:
    theme = '<script src="https://unpkg.com/iframe-worker/shim"></script>'
    page = types.SimpleNamespace(url=url)
    assert site_hook.on_post_page(theme, page) == f'<script src="{path}"></script>'
    assert site_hook.on_post_template(theme) == '<script src="/assets/worker.js"></script>'
    assert (ROOT / "docs/assets/worker.js").is_file()
