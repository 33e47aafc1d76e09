"""The page and the API of redrives: dry run, confirmation, progress, stop, and past redrives."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import Query
from fastapi.responses import Response
from starlette.requests import Request

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.deadletters.letter import LetterKind
from tidemill.deadletters.opening import open_letters
from tidemill.deadletters.redrive.history import read_history
from tidemill.web.letters.redrive_desk import RedriveDesk
from tidemill.web.letters.redrive_models import (
    MAX_IDS,
    Accepted,
    Confirmation,
    Past,
    RedriveList,
    RedriveReport,
    RedriveRequest,
    describe_criteria,
    describe_past,
    describe_redrive,
    read_order,
)
from tidemill.web.letters.section import Filters
from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.sections import UiSection
from tidemill.web.workers import BlockingRoute

_MAX_PAST = 200
_KINDS = [kind.value for kind in LetterKind]
_FIELDS = ("ids", "kinds", "sinks", "keys")


def _list_past(settings: Settings) -> list[Past]:
    try:
        with open_letters(settings, "tidemill-web") as box:
            return [describe_past(each) for each in read_history(settings, box).list_redrives()[:_MAX_PAST]]
    except ConfigError as error:
        raise RequestProblem(404, str(error)) from error
    except RemoteError as error:
        raise RequestProblem(503, str(error)) from error


def build_redrive_section(desk: RedriveDesk, settings: Settings, pages: Pages) -> UiSection:
    """Return the section of redrives.

    Args:
        desk: Runs redrives.
        settings: The pipeline's settings.
        pages: Renders the page.
    """
    return UiSection([], _build_pages(desk, settings, pages), _build_api(desk, settings), desk.close)


def _build_pages(desk: RedriveDesk, settings: Settings, pages: Pages) -> Routes:
    router = Routes(route_class=BlockingRoute)

    def describe_here() -> dict[str, Any]:
        return {"here": [describe_redrive(state) for state in desk.list_all()]}

    @router.get("/redrives")
    def show(
        request: Request,
        criteria: Filters,
        ids: Annotated[
            list[str] | None, Query(alias="letter", max_length=MAX_IDS, description="Ids of the selected letters.")
        ] = None,
        restart: Annotated[bool, Query(description="Also send letters that the same redrive has sent before.")] = False,
    ) -> Response:
        given = describe_criteria(criteria)
        given["ids"] = [*given.get("ids", ()), *(ids or ())][:MAX_IDS]
        fields = {name: "\n".join(given.get(name, ())) for name in _FIELDS}
        fields |= {name: given.get(name, "") for name in ("text", "since", "until")}
        past, problem = [], ""
        try:
            past = _list_past(settings)
        except RequestProblem as error:
            problem = error.text
        values: dict[str, Any] = {"fields": fields, "kinds": _KINDS, "past": past, "problem": problem}
        values["restart"] = restart
        values |= describe_here()
        return pages.answer(request, "letters/redrives.html", **values)

    @router.get("/redrives/state")
    async def show_state(request: Request, seen: Annotated[str, Query(max_length=400)] = "") -> Response:
        states = desk.list_all()
        if seen == name_version(states):
            return Response(status_code=204)
        return pages.answer(request, "letters/redrive_state.html", **describe_here())

    pages.add_filter("redrive_version", name_version)
    return router


def name_version(states: list[Any]) -> str:
    """Return a version of the page's state; it changes with the state.

    Example:
        >>> name_version([])
        '0'
    """
    if not states:
        return "0"
    newest = states[0]
    return f"{newest.redrive_id}-{newest.read}-{newest.letters}-{newest.ended}"


def _build_api(desk: RedriveDesk, settings: Settings) -> Routes:
    router = Routes(route_class=BlockingRoute, prefix="/redrives", tags=["dead letters"])

    @router.get("", summary="Redrives of this process, and all with a stored cursor")
    def list_redrives() -> RedriveList:
        return RedriveList(here=[describe_redrive(state) for state in desk.list_all()], past=_list_past(settings))

    @router.get("/{redrive_id}", summary="A redrive of this process and its progress")
    async def read_redrive(redrive_id: str) -> RedriveReport:
        return describe_redrive(desk.find(redrive_id))

    @router.post(
        "",
        status_code=202,
        summary="Start a redrive with a dry run, which counts letters and sends none",
        description="Confirm the count to send the letters. One redrive runs at a time.",
    )
    def count(request: Request, order: RedriveRequest) -> RedriveReport:
        return describe_redrive(desk.count(read_order(order, time.time()), request.state.identity.name))

    @router.post(
        "/{redrive_id}/send",
        status_code=202,
        summary="Send the letters that a dry run has counted",
        description="Sends no other letters. The position is saved in the cursor of `tidemill dlq redrive`.",
    )
    def send(request: Request, redrive_id: str, confirmed: Confirmation) -> Accepted:
        state = desk.send(redrive_id, confirmed.letters, request.state.identity.name)
        return Accepted(text=f"Redrive {state.number} has started.")

    @router.post("/stop", summary="Stop the running redrive after its current batch")
    def stop(request: Request) -> Accepted:
        state = desk.stop(request.state.identity.name)
        return Accepted(text=f"Redrive {state.number} stops after its current batch.")

    return router
