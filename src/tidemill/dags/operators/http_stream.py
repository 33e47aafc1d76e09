"""Operators that stream the pages of an API: each page becomes an element while the next ones are still read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_duration
from tidemill.dags.attempt.streaming import DeliveredEvent
from tidemill.dags.operator import BaseOperator
from tidemill.dags.operators.http_pages import HttpPagesTrigger, JsonPath, is_start


class HttpStreamOperator(BaseOperator):
    """Reads an API page by page in a trigger, and emits each page as an element.

    Map a task over `output`: its elements run while pages still arrive. The XCom is the sequence of all pages. A retry
    continues after the last page that was emitted; a task that is cleared begins from the first page.

    Args:
        url: The URL of the first page; with a connection, it may be a path.
        query: The query parameters of the first page.
        headers: The request headers; write secrets as `{"env": NAME}`.
        http_conn_id: A connection with the host, credentials and headers; see `HttpPagesTrigger`.
        next_url: The path of the next page's URL in the JSON of a page: names and array indexes, as a list or separated
            by dots.
        next_cursor: The path of the next page's cursor, instead; with neither of them, the `Link` header is followed.
        cursor_param: The query parameter that gets the cursor.
        request_timeout: How long a request may take, as a timedelta or in seconds.
        max_retries: How many requests for a page may fail in a row after the first one.
        max_pages: The number of pages after which the stream ends; None: no limit.
        page_filter: Called with the body of each page, in a worker; the element is what it returns, and None is left
            out.
        timeout: How long reading all pages may take, as a timedelta or in seconds; None: no limit.
        kwargs: The arguments of `BaseOperator`.
    """

    template_fields = ("url", "query", "headers")
    ui_color = "#f4e7f7"

    def __init__(
        self,
        *,
        url: str,
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        http_conn_id: str | None = None,
        next_url: JsonPath | None = None,
        next_cursor: JsonPath | None = None,
        cursor_param: str = "cursor",
        request_timeout: timedelta | float = 60.0,
        max_retries: int = 8,
        max_pages: int | None = None,
        page_filter: Callable[[Any], Any] | None = None,
        timeout: timedelta | float | None = None,
        **kwargs: Any,
    ) -> None:
        """Store the arguments; the trigger checks them after they are rendered."""
        super().__init__(**kwargs)
        self.url = url
        self.query = query
        self.headers = headers
        self.http_conn_id = http_conn_id
        self.next_url = next_url
        self.next_cursor = next_cursor
        self.cursor_param = cursor_param
        self.max_retries = max_retries
        self.max_pages = max_pages
        self.page_filter = page_filter
        self.timeout = timeout
        duration = check_duration(f"task {self.task_id!r}", "request_timeout", request_timeout)
        self.request_timeout = duration.total_seconds()

    def execute(self, context: Any) -> Any:
        """Defer to the trigger that reads the pages."""
        trigger = HttpPagesTrigger(
            self.url,
            params=self.query,
            headers=self.headers,
            conn_id=self.http_conn_id,
            next_url=self.next_url,
            next_cursor=self.next_cursor,
            cursor_param=self.cursor_param,
            timeout_seconds=self.request_timeout,
            max_retries=self.max_retries,
            max_pages=self.max_pages,
            start=_find_start(context),
        )
        self.defer(trigger=trigger, timeout=self.timeout)

    def handle_trigger_events(self, events: Sequence[DeliveredEvent], context: Any) -> None:
        """Emit the pages."""
        stream = context["stream"]
        for event in events:
            page = event.payload["body"]
            element = page if self.page_filter is None else self.page_filter(page)
            if element is not None:
                # A triggerer that takes the trigger over reads all pages again.
                stream.emit(element, event.identity)
        last = events[-1].payload
        stream.checkpoint({"number": last["number"] + 1, "next": last["next"]})


def _find_start(context: Any) -> Any:
    """Return where an earlier try has stopped; None: begin from the first page."""
    stream = context.get("stream")
    cursor = None if stream is None else stream.cursor
    return cursor if is_start(cursor) else None


class GraphStreamOperator(HttpStreamOperator):
    """Reads the pages of an OData API such as Microsoft Graph, which name the next page in `@odata.nextLink`.

    Args:
        kwargs: The arguments of `HttpStreamOperator`, without those about the next page.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(next_url=("@odata.nextLink",), **kwargs)
