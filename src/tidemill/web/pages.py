"""Builds pages from templates. The templates escape all text; no code here assembles markup."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request
from starlette.responses import HTMLResponse

from tidemill.web.access.logins import UserIdentity
from tidemill.web.formats import FILTERS, make_visible
from tidemill.web.sections import NavigationLink, PageAbout

_FOLDER = Path(__file__).parent
STATIC_FOLDER = _FOLDER / "static"


class Pages:
    """Renders templates.

    Args:
        about: Describes the process, for the head of every page.
        prefix: The path in front of every path of the server, as in '/tidemill'; may be ''.
    """

    def __init__(self, about: PageAbout, prefix: str = "") -> None:
        self.about = about
        self.prefix = prefix
        self.links: Sequence[NavigationLink] = ()
        #: The topic whose messages can be read; '': none.
        self.value_topic = ""
        #: The topic whose messages can be probed; '': none.
        self.probe_topic = ""
        self._digests: dict[str, str] = {}
        self._templates = Environment(
            loader=FileSystemLoader(_FOLDER / "templates"),
            autoescape=True,
            finalize=make_visible,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._templates.filters |= FILTERS
        self._templates.globals |= {"about": about, "url": self.url, "static": self._link_static, "prefix": prefix}
        self._templates.globals["has_page"] = self._has_page
        self._templates.globals["value_topic"] = lambda: self.value_topic
        self._templates.globals["probe_topic"] = lambda: self.probe_topic

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Make a section's function available to templates as a filter."""
        self._templates.filters[name] = function

    def url(self, path: str) -> str:
        """Return a path of this server as browsers request it, prefix included."""
        return f"{self.prefix}{path}"

    def _has_page(self, path: str) -> bool:
        return any(link.path == path for link in self.links)

    def _link_static(self, name: str) -> str:
        # The digest in the address lets browsers cache the file forever.
        if name not in self._digests:
            self._digests[name] = hashlib.sha256((STATIC_FOLDER / name).read_bytes()).hexdigest()[:12]
        return f"{self.prefix}/static/{name}?v={self._digests[name]}"

    def render(self, template: str, **values: Any) -> str:
        """Return a rendered template, such as a fragment of a page."""
        return self._templates.get_template(template).render(values)

    def answer(self, request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
        """Return the response with a whole page.

        Args:
            request: The request to answer.
            template: The page's template.
            status: The HTTP status.
            values: Variables of the template.
        """
        identity: UserIdentity | None = getattr(request.state, "identity", None)
        own = {"identity": identity, "links": self.links if identity else (), "path": request.url.path}
        return HTMLResponse(self.render(template, **own, **values), status)
