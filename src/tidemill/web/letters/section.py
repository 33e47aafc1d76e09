"""The pages and the API of dead letters; `redrive_section` redrives them."""

from __future__ import annotations

import re
import time
from typing import Annotated, Any

from fastapi import Depends, Query
from fastapi.responses import Response
from starlette.requests import Request

from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.deadletters.letter import LetterKind
from tidemill.web.letters.letter_box import MAX_CURSOR_CHARS, MAX_ROWS, LetterBox, open_cursor
from tidemill.web.letters.models import LetterPage, WholeLetter
from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.recorded.filters import change_address, parse_time
from tidemill.web.routes import Routes
from tidemill.web.sections import NavigationLink, UiSection
from tidemill.web.workers import BlockingRoute

PAGE_ROWS = 100
_KINDS = [kind.value for kind in LetterKind]
_MILLION = 1_000_000
_AT = re.compile(r"(\d{1,9}):(\d{1,18})", re.ASCII)
Text = Annotated[str, Query(max_length=1024)]
CursorText = Annotated[
    str, Query(alias="cursor", max_length=MAX_CURSOR_CHARS, description="The cursor of the previous page.")
]
At = Annotated[str, Query(max_length=40, description="The letter's position, as in lists; avoids a search.")]


def read_criteria(
    letter_id: Annotated[str, Query(alias="id", max_length=64, description="A prefix of the letter's id.")] = "",
    kind: Annotated[str, Query(max_length=20, description=", ".join(_KINDS))] = "",
    sink: Annotated[str, Query(max_length=200, description="The sink, as name or type.name.")] = "",
    key: Text = "",
    text: Annotated[
        str, Query(max_length=1024, description="A text in error, stderr, arguments, payloads or messages.")
    ] = "",
    since: Annotated[
        str, Query(max_length=40, description="A time such as 2026-05-01T12:00, or 15m, 2h, 1d ago.")
    ] = "",
    until: Annotated[str, Query(max_length=40)] = "",
) -> LetterCriteria:
    """Return the criteria for letters from query parameters."""
    if kind and kind not in _KINDS:
        raise RequestProblem(422, f"kind: expected one of {', '.join(_KINDS)}, not {kind!r}")
    now = time.time()
    times = (parse_time("since", since, now), parse_time("until", until, now))
    since_seconds, until_seconds = (None if at is None else at / _MILLION for at in times)
    return LetterCriteria(
        (letter_id,) if letter_id else (),
        (kind,) if kind else (),
        (sink,) if sink else (),
        since_seconds,
        until_seconds,
        (key,) if key else (),
        text,
    )


Filters = Annotated[LetterCriteria, Depends(read_criteria)]


def build_letters_section(box: LetterBox, pages: Pages, max_rows: int) -> UiSection:
    """Return the section of dead letters.

    Args:
        box: Reads the letters.
        pages: Renders pages.
        max_rows: The maximum number of rows in an answer.
    """
    router = Routes(route_class=BlockingRoute)
    api = Routes(route_class=BlockingRoute, tags=["dead letters"])

    @router.get("/letters")
    def show_letters(request: Request, criteria: Filters, cursor: CursorText = "") -> Response:
        page, problem, more = None, "", ""
        given = {name: request.query_params.getlist(name) for name in request.query_params}
        try:
            page = box.find(criteria, min(PAGE_ROWS, max_rows), open_cursor(cursor))
        except RequestProblem as error:
            if cursor:  # the request is for further rows only
                raise
            problem = error.text
        if page is not None and page.cursor is not None:
            more = pages.url(f"/letters?{change_address(given, cursor=page.cursor)}")
        values: dict[str, Any] = {"page": page, "problem": problem, "kinds": _KINDS, "more": more}
        # A page that is not full ran out of time and loads more rows by itself.
        hurry = page is not None and len(page.rows) < min(PAGE_ROWS, max_rows)
        values |= {"given": any(name != "cursor" for name in given), "is_first": not cursor, "hurry": hurry}
        values["query"] = change_address(given, cursor=None)
        return pages.answer(request, "letters/letters.html", first=request.query_params.get, **values)

    @router.get("/letters/{letter_id}")
    def show_letter(request: Request, letter_id: str, at: At = "") -> Response:
        return pages.answer(request, "letters/letter.html", letter=box.read(letter_id, _parse_position(at)))

    @api.get(
        "/letters",
        summary="Dead letters, newest first",
        description="A search ends within a second, possibly before it finds anything; continue it with `cursor`.",
    )
    def find_letters(
        criteria: Filters,
        cursor: CursorText = "",
        limit: Annotated[
            int, Query(ge=1, description=f"The maximum number of rows, up to debug.max_ui_rows and {MAX_ROWS}.")
        ] = PAGE_ROWS,
    ) -> LetterPage:
        return box.find(criteria, min(limit, max_rows), open_cursor(cursor))

    @api.get("/letters/{letter_id}", summary="A dead letter with all its contents")
    def read_letter(letter_id: str, at: At = "") -> WholeLetter:
        return box.read(letter_id, _parse_position(at))

    return UiSection([NavigationLink("Dead letters", "/letters")], router, api)


def _parse_position(text: str) -> tuple[int, int] | None:
    if not text:
        return None
    if (found := _AT.fullmatch(text)) is None:
        raise RequestProblem(422, f"at: expected partition:offset, not {text!r}")
    return int(found[1]), int(found[2])
