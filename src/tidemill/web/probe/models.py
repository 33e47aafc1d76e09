"""Models of the REST API for probes; the page shows the same. Times are seconds since a probe began."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from tidemill.core.recorder.key_text import read_key
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link import probe_report
from tidemill.runtime.link.probe_report import MAX_PROBE_BYTES
from tidemill.web.probe.desk import ProbeState, measure
from tidemill.web.problems import RequestProblem

_MAX_HEADERS = 200
_MAX_CHARS = 4 * MAX_PROBE_BYTES
Words = Annotated[str, Field(max_length=_MAX_CHARS)]


class PastedHeader(BaseModel):
    """A header of a pasted message."""

    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, Field(min_length=1, max_length=1024)]
    value: Words | None = Field(default=None, description="Written like keys; null: a header without a value.")


class ProbeOrder(BaseModel):
    """A message to probe: a recorded one, or a pasted one."""

    model_config = ConfigDict(extra="forbid")
    recorded: bool = Field(
        default=False,
        description="Read the message at this partition and offset from the topic; then the other fields must be "
        "absent.",
    )
    partition: int = Field(default=0, ge=0, le=2**31 - 1)
    offset: int = Field(default=0, ge=0, le=2**63 - 2)
    key: Words | None = Field(default=None, description="Write a byte as \\xNN, and a backslash as two.")
    value: Words | None = Field(default=None, description="null: a message without a value (a tombstone).")
    encoding: Literal["text", "base64"] = Field(default="text", description="The encoding of the value.")
    headers: Annotated[list[PastedHeader], Field(max_length=_MAX_HEADERS)] = []
    timestamp: Annotated[float, Field(ge=0, le=253_402_300_799)] | None = Field(
        default=None, description="The message's time, in seconds since the epoch; null: none."
    )


class Text(BaseModel):
    """A text with secrets masked."""

    text: str
    is_cut: bool = Field(description="Whether the text is truncated.")


class HookCallView(BaseModel):
    """A call of a hook."""

    hook: str
    about: str = Field(description="The task that the hook was called for; '': none.")
    at: float
    seconds: float | None = Field(description="null: the hook has not returned.")
    trace: Text = Field(description="The traceback of its exception; if it has not returned, the stack where it waits.")


class AttemptView(BaseModel):
    """An attempt of a task."""

    attempt: int
    at: float
    seconds: float | None = Field(description="null: the probe ended first, and stopped the attempt.")
    kind: str = Field(description="ok, or the kind of the error; '': the attempt was still running.")
    exit_code: int | None
    pid: int | None
    error: Text
    stdout: Text = Field(description="The last part of the output.")
    stderr: Text = Field(description="The last part of the output.")


class ProbedTaskView(BaseModel):
    """A task."""

    task_id: str
    parent: str = Field(description="The task that this one replaced; '': none.")
    args: list[str]
    labels: dict[str, str]
    state: str = Field(description="ok, failed, replaced, running, waiting, or hook (its hook has not returned).")
    is_precomputed: bool
    attempts: list[AttemptView]


class Payload(BaseModel):
    """A payload that a sink would have received."""

    sink: str
    hook: str
    task_id: str
    body: Text


class ProbedLetterView(BaseModel):
    """A dead letter that would have been written."""

    kind: str
    error: Text
    task_id: str


class ProbeReportView(BaseModel):
    """The result of a probe."""

    status: str = Field(description="done, failed or unfinished.")
    text: str = Field(description="The status in words.")
    seconds: float
    stages: list[HookCallView]
    tasks: list[ProbedTaskView]
    payloads: list[Payload]
    sinks: dict[str, int] = Field(description="How many payloads each sink would have received.")
    letters: list[ProbedLetterView]
    cache_writes: int = Field(description="How many writes hooks made to the cache; other processes do not see them.")
    left_out: int = Field(description="How many stages, tasks, attempts, payloads and letters are not shown.")


class ProbeView(BaseModel):
    """A probe: the running one, or the last one of this process."""

    number: int
    topic: str
    partition: int
    offset: int
    recorded: bool = Field(description="Whether the message was read from its topic.")
    size_bytes: int
    by: str
    began_at: float = Field(description="Seconds since the epoch.")
    ended_at: float | None = Field(description="Seconds since the epoch; null while the probe runs.")
    problem: str = Field(description="Why the probe failed; '' if it did not.")
    report: ProbeReportView | None = Field(description="null while the probe runs, or if it failed.")


def read_pasted(order: ProbeOrder, topic: str) -> SourceMessage:
    """Return a pasted message.

    Raises:
        Problem: The order does not describe a valid message.
    """
    try:
        headers = tuple(
            (header.name, None if header.value is None else read_key(header.value)) for header in order.headers
        )
        return SourceMessage(
            topic,
            order.partition,
            order.offset,
            None if order.key is None else read_key(order.key),
            _read_value(order),
            headers,
            -1 if order.timestamp is None else int(order.timestamp * 1000),
        )
    except UnicodeEncodeError as error:
        raise RequestProblem(422, f"the text cannot be encoded: {error.reason} (position {error.start})") from error


def _read_value(order: ProbeOrder) -> bytes | None:
    if order.value is None or order.encoding == "text":
        return None if order.value is None else order.value.encode()
    try:
        return base64.b64decode(order.value, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestProblem(422, f"value is not base64: {error}") from error


def check_size(message: SourceMessage) -> None:
    """Reject a message that is too large to probe.

    Raises:
        Problem: The message is too large.
    """
    size = measure(message)
    if size > MAX_PROBE_BYTES:
        raise RequestProblem(413, f"the message is {size:,} bytes long; a probe accepts up to {MAX_PROBE_BYTES:,}")


def describe_probe(state: ProbeState) -> ProbeView:
    message = state.message
    return ProbeView(
        number=state.number,
        topic=message.topic,
        partition=message.partition,
        offset=message.offset,
        recorded=state.recorded,
        size_bytes=measure(message),
        by=state.by,
        began_at=state.began_at,
        ended_at=state.ended_at,
        problem=state.problem,
        report=None if state.report is None else _describe_report(state.report),
    )


def _describe_report(report: probe_report.ProbeReport) -> ProbeReportView:
    return ProbeReportView.model_validate(report, from_attributes=True)
