"""The page and the API that read a message's key, headers and value from its topic.

Only messages of the pipeline's own topic can be read. Invariant: at most two messages are read at a time, because each
read opens its own connection.
"""

from __future__ import annotations

import threading
from typing import Annotated

from fastapi import Path
from fastapi.responses import Response
from pydantic import BaseModel, Field
from starlette.requests import Request

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.deadletters.restore import SourceReader
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.web.pages import Pages
from tidemill.web.problems import RequestProblem
from tidemill.web.routes import Routes
from tidemill.web.sections import UiSection
from tidemill.web.values.shown_bytes import Shown, show
from tidemill.web.workers import BlockingRoute

_AT_ONCE = 2
_WAIT_SECONDS = 4.0
#: A message may have any number of headers.
_MAX_HEADERS = 200
Partition = Annotated[int, Path(ge=0, le=2**31 - 1)]
Offset = Annotated[int, Path(ge=0, le=2**63 - 2)]


class HeaderValue(BaseModel):
    """A header of a message."""

    name: str
    value: Shown


class MessageValue(BaseModel):
    """A message, as read from its topic."""

    topic: str
    partition: int
    offset: int
    timestamp: float | None = Field(description="Seconds since the epoch; null if the message has no timestamp.")
    key: Shown
    headers: list[HeaderValue]
    headers_error: str | None = Field(description="Why the headers cannot be read; null if they can.")
    headers_cut: int = Field(description="How many further headers are not shown.")
    value: Shown


class ValueReader:
    """Reads messages of a pipeline's topic.

    Args:
        settings: The pipeline's settings.
        wait_seconds: How long a read waits for other reads.
    """

    def __init__(self, settings: Settings, wait_seconds: float = _WAIT_SECONDS) -> None:
        self._settings = settings
        self._wait_seconds = wait_seconds
        self._slots = threading.BoundedSemaphore(_AT_ONCE)
        self.topic = settings.kafka.source_topic

    def read(self, topic: str, partition: int, offset: int) -> MessageValue:
        """Return a message in readable form.

        Raises:
            Problem: The message cannot be read, or no longer exists.
        """
        return _describe(self.fetch(topic, partition, offset))

    def fetch(self, topic: str, partition: int, offset: int) -> SourceMessage:
        """Return a message; see `read`."""
        if topic != self.topic:
            raise RequestProblem(404, f"only messages of {self.topic}, this pipeline's topic, can be read here")
        if not self._slots.acquire(timeout=self._wait_seconds):
            raise RequestProblem(429, "other messages are being read; try again in a moment", {"Retry-After": "2"})
        reader = SourceReader(self._settings)
        try:
            # Look up the range first: a consumer would wait forever for a partition that does not exist.
            known = reader.find_range(topic, partition)
            is_there = known is not None and known[0] <= offset < known[1]
            message = reader.read(topic, partition, offset) if is_there else None
            if message is None:
                raise _explain_absence(known, topic, partition, offset)
        except RemoteError as error:
            raise RequestProblem(503, str(error)) from error
        finally:
            reader.close()
            self._slots.release()
        return message


def _explain_absence(known: tuple[int, int] | None, topic: str, partition: int, offset: int) -> RequestProblem:
    position = f"{topic}:{partition}:{offset}"
    if known is None:
        return RequestProblem(404, f"there is no partition {partition} of {topic}")
    low, end = known
    if offset < low:
        return RequestProblem(410, f"{position} was removed by retention; the partition begins at offset {low} now")
    if offset >= end:
        return RequestProblem(404, f"{position} does not exist yet; the partition ends at offset {end}")
    return RequestProblem(410, f"there is no message at {position}; it was compacted away, or is a transaction marker")


def _describe(message: SourceMessage) -> MessageValue:
    return MessageValue(
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        timestamp=message.timestamp / 1000 if message.timestamp >= 0 else None,
        key=show(message.key),
        headers=[HeaderValue(name=name, value=show(value, name)) for name, value in message.headers[:_MAX_HEADERS]],
        headers_error=message.headers_error,
        headers_cut=max(0, len(message.headers) - _MAX_HEADERS),
        value=show(message.value),
    )


def build_values_section(reader: ValueReader, pages: Pages) -> UiSection:
    """Return the section.

    Args:
        reader: Reads messages.
        pages: Renders pages.
    """
    router = Routes(route_class=BlockingRoute)
    api = Routes(route_class=BlockingRoute, tags=["recordings"])
    pages.value_topic = reader.topic

    @router.get("/messages/{topic}/{partition}/{offset}/value")
    def show_value(request: Request, topic: str, partition: Partition, offset: Offset) -> Response:
        message, problem, status = None, "", 200
        try:
            message = reader.read(topic, partition, offset)
        except RequestProblem as error:
            # The page shows the problem in place of the message, also as a fragment of the message's page.
            problem, status = error.text, error.status
        if request.headers.get("hx-request"):
            status = 200
        position = {"topic": topic, "partition": partition, "offset": offset}
        return pages.answer(request, "values/value.html", status, message=message, problem=problem, position=position)

    @api.get(
        "/messages/{topic}/{partition}/{offset}/value",
        summary="A message's key, headers and value, from its topic",
        description="Returns up to 1 MiB of the value. 410: the message was removed from its topic.",
    )
    def read_value(topic: str, partition: Partition, offset: Offset) -> MessageValue:
        return reader.read(topic, partition, offset)

    return UiSection([], router, api)
