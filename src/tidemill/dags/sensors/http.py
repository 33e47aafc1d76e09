"""A sensor that waits for a response of a URL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from tidemill.dags.arguments import check_duration
from tidemill.dags.sensors.base import BaseSensorOperator
from tidemill.triggers.base import StartTriggerArgs
from tidemill.triggers.builtin.http import HttpTrigger


class HttpSensor(BaseSensorOperator):
    """Waits until a URL responds as expected; returns URL, status and body.

    Args:
        url: An http:// or https:// URL.
        method: The HTTP method.
        query: The query parameters.
        headers: The request headers; write secrets as `{"env": NAME}`.
        json: A body to send as JSON.
        status: The expected status, or several.
        where: A condition on the JSON of the response, as for `HttpTrigger`.
        request_timeout: How long a request may take, as a timedelta or in seconds.
        kwargs: The arguments of `BaseSensorOperator`. With `start_from_trigger=True` no worker runs before the response
            is as expected.
    """

    template_fields = ("url", "query", "headers", "json")

    def __init__(
        self,
        *,
        url: str,
        method: str = "GET",
        query: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        json: Any = None,
        status: int | Sequence[int] = 200,
        where: Mapping[str, Any] | None = None,
        request_timeout: timedelta | float = 10.0,
        **kwargs: Any,
    ) -> None:
        """Store the arguments; the trigger checks them after they are rendered."""
        super().__init__(**kwargs)
        self.url = url
        self.method = method
        self.query = query
        self.headers = headers
        self.json = json
        self.status = status
        self.where = where
        duration = check_duration(f"task {self.task_id!r}", "request_timeout", request_timeout)
        self.request_timeout = duration.total_seconds()

    def execute(self, context: Any) -> Any:
        """Defer until the response is as expected."""
        self.wait_for(HttpTrigger(**self._list_arguments()))

    def make_start_args(self) -> StartTriggerArgs:
        """Return how the sensor starts in a trigger; see `BaseOperator.make_start_args`."""
        return self.start_trigger_args or self.start_with(HttpTrigger, self._list_arguments())

    def _list_arguments(self) -> dict[str, Any]:
        return {
            "url": self.url,
            "method": self.method,
            "params": self.query,
            "headers": self.headers,
            "json": self.json,
            "status": self.status,
            "where": self.where,
            "poll_seconds": self.poke_interval,
            "timeout_seconds": self.request_timeout,
        }
