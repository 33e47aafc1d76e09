"""A hook of mkdocs: makes the pages fit for the site, and fails the build if one would request something elsewhere."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

log = logging.getLogger("mkdocs.hooks.site_hook")  # in strict mode a warning fails the build

#: What tests do with a block ("sh background") is of no use to a highlighter.
_FENCE = re.compile(r"^(\s*```\w+) [\w ]+$", re.MULTILINE)
#: In a table, code has its bars escaped for other readers of Markdown; here they are shown as they are.
_ROW, _CODE = re.compile(r"^\|.*$", re.MULTILINE), re.compile(r"`[^`]+`")
_ELEMENT = re.compile(r"<(?:script|img|iframe|source|video|audio|embed|link)\b[^>]*>", re.IGNORECASE)
_ADDRESS = re.compile(r"""\b(?:src|srcset|href|data)=["']?([^"'\s>]+)""", re.IGNORECASE)
#: What the theme would fetch from elsewhere, for the search in pages that are opened from disk, and what it gets.
_SHIM, _WORKER = "https://unpkg.com/iframe-worker/shim", "assets/worker.js"
_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", re.IGNORECASE)


def find_requests(html: str) -> Iterator[str]:
    """Yield the addresses elsewhere that a browser requests when it shows a page; links are not requested."""
    for element in _ELEMENT.findall(html):
        if "canonical" not in element:
            yield from (found for found in _ADDRESS.findall(element) if urlsplit(found).netloc)
    yield from _STYLE.findall(html)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Reduce the first line of each code block to its language, and show bars in tables without their escapes."""

    def unescape(row: re.Match[str]) -> str:
        return _CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0])

    return _ROW.sub(unescape, _FENCE.sub(r"\1", markdown))


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Let a page use the site's own file instead of one from elsewhere."""
    return output.replace(_SHIM, "../" * page.url.count("/") + _WORKER)


def on_post_template(output_content: str, **_: Any) -> str:
    """Do the same for the page that is shown for a wrong address, whose paths begin at the root of the site."""
    return output_content.replace(_SHIM, f"/{_WORKER}")


def on_post_build(config: dict[str, Any], **_: Any) -> None:
    """Warn of every address elsewhere that a page or a style sheet of the site requests."""
    site = Path(config["site_dir"])
    for file in sorted([*site.rglob("*.html"), *site.rglob("*.css")]):
        for address in find_requests(file.read_text(encoding="utf-8")):
            log.warning("%s requests %s; keep it in the site", file.relative_to(site), address)
