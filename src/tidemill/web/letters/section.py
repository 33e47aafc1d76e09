"""The pages and the API of dead letters. They are sent again with `tidemill dlq redrive`."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from fastapi.responses import Response
from starlette.requests import Request

from tidemill.core.deadletters.redrive import Criteria
from tidemill.deadletters.letter import LetterKind
from tidemill.web.letters.letter_box import LetterBox
from tidemill.web.letters.models import LetterPage, WholeLetter
from tidemill.web.pages import Pages
from tidemill.web.problems import Problem
from tidemill.web.recorded.filters import parse_time
from tidemill.web.sections import Link, Section
from tidemill.web.workers import BlockingRoute

PAGE_ROWS = 100
_KINDS = [kind.value for kind in LetterKind]
_MILLION = 1_000_000
Text = Annotated[str, Query(max_length=1024)]


def read_criteria(
    letter_id: Annotated[str, Query(alias="id", max_length=64, description="What its id begins with.")] = "",
    kind: Annotated[str, Query(max_length=20, description=", ".join(_KINDS))] = "",
    sink: Annotated[str, Query(max_length=200, description="name or type.name")] = "",
    key: Text = "",
    text: Annotated[str, Query(max_length=1024, description="In error, stderr, arguments, payloads, messages.")] = "",
    since: Annotated[str, Query(max_length=40, description="2026-05-01T12:00, or 15m, 2h, 1d before now.")] = "",
    until: Annotated[str, Query(max_length=40)] = "",
) -> Criteria:
    """Return which letters an address asks for."""
    if kind and kind not in _KINDS:
        raise Problem(422, f"kind: expected one of {', '.join(_KINDS)}, and not {kind!r}")
    now = time.time()
    times = (parse_time("since", since, now), parse_time("until", until, now))
    since_seconds, until_seconds = (None if at is None else at / _MILLION for at in times)
    return Criteria(
        (letter_id,) if letter_id else (),
        (kind,) if kind else (),
        (sink,) if sink else (),
        since_seconds,
        until_seconds,
        (key,) if key else (),
        text,
    )


Filters = Annotated[Criteria, Depends(read_criteria)]


def build_section(box: LetterBox, pages: Pages, max_rows: int) -> Section:
    """Return the section of dead letters.

    Args:
        box: The letters.
        pages: Renders pages.
        max_rows: The most rows of an answer.
    """
    router = APIRouter(route_class=BlockingRoute)
    api = APIRouter(route_class=BlockingRoute, tags=["dead letters"])

    @router.get("/letters")
    def show_letters(request: Request, criteria: Filters) -> Response:
        page, problem = None, ""
        try:
            page = box.find(criteria, min(PAGE_ROWS, max_rows))
        except Problem as error:
            problem = error.text
        values: dict[str, Any] = {"page": page, "problem": problem, "kinds": _KINDS, "first": request.query_params.get}
        given = bool(request.query_params)
        return pages.answer(request, "letters/letters.html", given=given, limit=PAGE_ROWS, **values)

    @router.get("/letters/{letter_id}")
    def show_letter(request: Request, letter_id: str) -> Response:
        return pages.answer(request, "letters/letter.html", letter=box.read(letter_id))

    @api.get("/letters", summary="Dead letters, the newest first")
    def find_letters(
        criteria: Filters,
        limit: Annotated[int, Query(ge=1, description="The most rows; at most debug.max_ui_rows.")] = PAGE_ROWS,
    ) -> LetterPage:
        return box.find(criteria, min(limit, max_rows))

    @api.get("/letters/{letter_id}", summary="A dead letter with everything in it")
    def read_letter(letter_id: str) -> WholeLetter:
        return box.read(letter_id)

    return Section([Link("Dead letters", "/letters")], router, api)
