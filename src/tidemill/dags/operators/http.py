"""An operator that sends an HTTP request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_duration
from tidemill.dags.exceptions import DagError, TaskError
from tidemill.dags.operator import BaseOperator
from tidemill.triggers.builtin.arguments import resolve_environment


class HttpOperator(BaseOperator):
    """Sends an HTTP request; returns the body of the response, decoded if it is JSON and as text otherwise.

    Args:
        url: An http:// or https:// URL.
        method: The HTTP method.
        query: The query parameters.
        headers: The request headers; write secrets as `{"env": NAME}`.
        json: A body to send as JSON.
        data: A body to send as text or bytes, instead of `json`.
        request_timeout: How long the request may take, as a timedelta or in seconds.
        response_check: Called with the response (`httpx.Response`); the task fails if it returns False.
        response_filter: Called with the response; its return value becomes the task's return value.
        kwargs: The arguments of `BaseOperator`.
    """

    template_fields = ("url", "query", "headers", "json", "data")
    ui_color = "#f4e7f7"

    def __init__(
        self,
        *,
        url: str,
        method: str = "GET",
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        json: Any = None,
        data: str | bytes | None = None,
        request_timeout: timedelta | float = 60.0,
        response_check: Callable[[Any], bool] | None = None,
        response_filter: Callable[[Any], Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        owner = f"task {self.task_id!r}"
        if json is not None and data is not None:
            raise DagError(f"{owner}: json and data are both set; leave one of them out")
        self.url = url
        self.method = method
        self.query = query
        self.headers = headers
        self.json = json
        self.data = data
        self.request_timeout = check_duration(owner, "request_timeout", request_timeout).total_seconds()
        self.response_check = response_check
        self.response_filter = response_filter

    def execute(self, context: Any) -> Any:
        """Send the request.

        Raises:
            TaskError: No response arrived, its status is an error, or `response_check` refused it.
        """
        try:
            import httpx
        except ModuleNotFoundError as error:
            raise TaskError("HttpOperator needs httpx; install tidemill[http]") from error
        try:
            answer = httpx.request(
                self.method,
                self.url,
                params=resolve_environment(self.query) if self.query else None,
                headers=resolve_environment(self.headers or {}),
                json=self.json,
                content=self.data,
                timeout=self.request_timeout,
                follow_redirects=True,
            )
        except httpx.HTTPError as error:
            raise TaskError(
                f"no response to {self.method} {self._shown_url()}: {error or type(error).__name__}"
            ) from error
        self.log.info("%s %s: %s", self.method, self._shown_url(), answer.status_code)
        if answer.is_error:
            raise TaskError(
                f"{self.method} {self._shown_url()} responded with {answer.status_code}: {answer.text[:500]}"
            )
        if self.response_check is not None and not self.response_check(answer):
            raise TaskError(f"response_check refused the response of {self._shown_url()}")
        if self.response_filter is not None:
            return self.response_filter(answer)
        is_json = answer.headers.get("content-type", "").partition(";")[0].strip().endswith("json")
        return answer.json() if is_json and answer.content else answer.text

    def _shown_url(self) -> str:
        """Return the URL without user and query, which may contain secrets."""
        import httpx

        return str(httpx.URL(self.url).copy_with(username=None, password=None, query=None))
