"""Explains why a server without a pipeline lacks some pages."""

from __future__ import annotations

from fastapi.responses import RedirectResponse, Response
from starlette.requests import Request

from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.sections import UiSection

ABSENT = (
    "This server shows recordings only. For engines, partitions, sinks, the live page, the configuration and actions, "
    "open the web UI of a running pipeline; `tidemill status` shows its address."
)
NO_LETTERS = " To see dead letters, pass a configuration: `tidemill web CONFIG`."
_PAGES = ("/configuration", "/metrics-queries", "/live", "/streams", "/probe", "/redrives")
_API = ("/overview", "/series", "/configuration", "/metrics-queries", "/live", "/streams")


def build_standalone_section(pages: Pages, *, has_letters: bool) -> UiSection:
    """Return the section.

    Args:
        pages: Renders pages.
        has_letters: Whether another section shows dead letters.
    """
    router, api = Routes(), Routes(include_in_schema=False)

    @router.get("/")
    async def show_first(request: Request) -> Response:
        query = f"?{request.url.query}" if request.url.query else ""
        return RedirectResponse(pages.url(f"/runs{query}"), 303)

    async def refuse() -> Response:
        raise RequestProblem(404, ABSENT)

    async def refuse_letters() -> Response:
        raise RequestProblem(404, f"{ABSENT}{NO_LETTERS}")

    for path in _PAGES:
        router.add(path, refuse)
    for path in _API:
        api.add(path, refuse)
    for path in ("/actions/{rest:path}", "/redrives", "/redrives/{rest:path}", "/probe"):
        api.add(path, refuse, methods=["GET", "POST"])
    if not has_letters:
        router.add("/letters", refuse_letters)
        api.add("/letters", refuse_letters)
    return UiSection([], router, api)
