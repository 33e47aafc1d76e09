"""Machine-readable errors: application/problem+json (RFC 9457)."""

from __future__ import annotations

import http
import json
from collections.abc import Mapping

from starlette.responses import Response

from tidemill.core.wording import to_one_line

MEDIA_TYPE = "application/problem+json"


def answer_problem(status: int, text: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the response.

    Args:
        status: The HTTP status.
        text: What is wrong, and what to do.
        headers: Further headers.
    """
    try:
        title = http.HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    # Text from users or libraries may contain line breaks.
    document = {"type": "about:blank", "title": title, "status": status, "detail": to_one_line(text)}
    return Response(json.dumps(document), status, dict(headers or {}), MEDIA_TYPE)


class RequestProblem(Exception):
    """A request is rejected or cannot be answered.

    Args:
        status: The HTTP status.
        text: What is wrong, and what to do.
        headers: Further headers of the response.
    """

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})

    @property
    def response(self) -> Response:
        """The response that reports this problem."""
        return answer_problem(self.status, self.text, self.headers)
