"""Assembles the application: login, health checks, the sections that a process mounts, and the guard around them."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.params import Depends
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Scope

from tidemill.web.access.guard import DOCS_PATH, Guard
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.api_page import describe_api
from tidemill.web.login import build_login
from tidemill.web.pages import STATIC_FOLDER, Pages
from tidemill.web.problems import RequestProblem, answer_problem
from tidemill.web.routes import Routes
from tidemill.web.sections import Health, UiSection
from tidemill.web.workers import WithWorkers, Workers

API = "/api/v1"
_KEPT = "public, max-age=31536000, immutable"


class _Static(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = _KEPT if scope["query_string"] else "no-cache"
        return response


def create_app(
    sections: Sequence[UiSection],
    pages: Pages,
    logins: Logins,
    origins: Origins,
    health: Health,
    port: int,
    workers: Workers | None = None,
) -> ASGIApp:
    """Return the application.

    Args:
        sections: The sections to mount; the first page of the first section is the home page.
        pages: Renders the pages.
        logins: Authenticates users and tokens.
        origins: Decides which host names and origins are allowed.
        health: Answers liveness and readiness probes.
        port: The port of the server; part of the cookie's name.
        workers: Runs blocking work; None: workers with the default limits.
    """
    cookie = f"tidemill_{port}"
    app = FastAPI(title="tidemill", version=pages.about.version, docs_url=None, redoc_url=None, openapi_url=None)
    links = [link for section in sections for link in section.links]
    pages.links = sorted(links, key=lambda link: link.is_last)
    _handle_errors(app, pages)
    _build_health(health).mount(app)
    build_login(logins, pages, cookie, is_secure=origins.is_secure).mount(app)
    for section in sections:
        section.api.mount(app, API, dependencies=[Depends(_refuse_unknown)])
        section.pages.mount(app, include_in_schema=False)
    _build_api_pages(app, pages).mount(app)
    app.mount("/static", _Static(directory=STATIC_FOLDER), name="static")
    return WithWorkers(Guard(app, logins, origins, cookie), workers or Workers())


def _build_health(health: Health) -> Routes:
    router = Routes(include_in_schema=False)
    # Probes have their own workers: slow pages must not make the process look dead.
    probes = Workers()

    def answer(reasons: list[str]) -> Response:
        return JSONResponse({"ok": not reasons, "reasons": reasons}, 503 if reasons else 200)

    @router.get("/healthz")
    async def check_life() -> Response:
        return answer(await probes.run(health.find_dead))

    @router.get("/readyz")
    async def check_readiness() -> Response:
        return answer(await probes.run(health.find_unready))

    return router


def _build_api_pages(app: FastAPI, pages: Pages) -> Routes:
    router = Routes(include_in_schema=False)

    @router.get("/api/openapi.json")
    async def show_document() -> Response:
        return JSONResponse(app.openapi())

    @router.get(DOCS_PATH)
    async def show_page(request: Request) -> Response:
        return pages.answer(request, "api.html", operations=describe_api(app.openapi()))

    return router


def _handle_errors(app: FastAPI, pages: Pages) -> None:
    def answer(request: Request, status: int, text: str, headers: dict[str, str] | None = None) -> Response:
        if request.url.path.startswith("/api/") or "text/html" not in request.headers.get("accept", ""):
            return answer_problem(status, text, headers)
        return pages.answer(request, "error.html", status, code=status, text=text)

    @app.exception_handler(HTTPException)
    async def answer_http(request: Request, error: HTTPException) -> Response:
        text = f"page not found: {request.url.path}" if error.status_code == 404 else str(error.detail)
        return answer(request, error.status_code, text, dict(error.headers or {}))

    @app.exception_handler(RequestProblem)
    async def answer_refusal(request: Request, error: RequestProblem) -> Response:
        return answer(request, error.status, error.text, error.headers)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(request: Request, error: RequestValidationError) -> Response:
        return answer(request, 422, "; ".join(_describe_invalid(details) for details in error.errors()))

    @app.exception_handler(Exception)
    async def answer_bug(request: Request, error: Exception) -> Response:
        return answer(request, 500, "internal error in tidemill; see the log of this process")


async def _refuse_unknown(request: Request) -> None:
    """Reject query parameters that the route does not declare; a mistyped filter would otherwise match everything."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute):
        return
    known = _list_parameters(route.dependant)
    for name in request.query_params:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(sorted(known)) or 'none'}"
            raise RequestProblem(422, f"unknown parameter {name[:100]!r}; {hint}")


def _list_parameters(dependant: Dependant) -> set[str]:
    names = {parameter.alias for parameter in dependant.query_params}
    return names.union(*map(_list_parameters, dependant.dependencies))


def _describe_invalid(details: dict[str, Any]) -> str:
    return f"{'.'.join(str(part) for part in details['loc'][1:]) or 'the request'}: {details['msg']}"
