"""Formats the history of a message: a tree for people, a document for programs.

Invariant: control characters in keys, labels, arguments and errors never reach a terminal.
"""

from __future__ import annotations

import base64
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.core.recorder.key_text import write_key
from tidemill.core.times import format_utc
from tidemill.core.wording import format_count
from tidemill.recorder.format.schema import MAX_KEY_BYTES
from tidemill.recorder.reading.queries import (
    RecordedEventRow,
    RecordedMessageRow,
    RecordedTaskRow,
    Story,
    Trace,
    show_status,
)
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.log.console import escape_control

#: The number of characters shown of an error, an argument list or an output; --json prints all.
_SHOWN = 400
_EVENTS = {
    "task_failed": "the task failed",
    "task_retry": "the task is retried",
    "task_replaced": "the task was replaced",
    "sink_error": "the sink rejected payloads",
    "sink_skipped": "payloads were skipped",
    "dead_lettered": "a dead letter was written",
}
#: A line of a tree: time, text, and details below it.
_Line = tuple[int, str, list[str]]


def describe_trace(trace: Trace) -> str:
    """Return the histories of a message as trees, oldest first, without control characters."""
    blocks = [_describe_story(story) for story in trace.stories]
    if trace.events or trace.tasks:
        lines = sorted([*map(_event_line, trace.events), *map(_task_line, trace.tasks)], key=lambda line: line[0])
        start = lines[0][0]
        title = "not finished, or its row was lost" if not trace.stories else "afterwards"
        blocks.append("\n".join([title, *_draw(lines, start)]))
    return "\n\n".join(blocks)


def _describe_story(story: Story) -> str:
    row = story.message
    replacements = len({task.task_id for task in story.tasks if task.parent is not None})
    status = show_status(row.status, is_dead_lettered=story.is_dead_lettered)
    lines = [
        *_stage_lines(row, max(row.tasks - replacements, 0), status),
        *map(_task_line, story.tasks),
        *map(_event_line, story.events),
    ]
    if story.committed_us is not None:
        how = "committed" if story.committed_exactly else "committed at this time or earlier"
        lines.append((story.committed_us, how, []))
    lines.sort(key=lambda line: line[0])
    start = row.consumed_at or lines[0][0]
    took = (
        "" if row.resolved_at is None or row.consumed_at is None else f" in {_span(row.resolved_at - row.consumed_at)}"
    )
    where = (
        f"bounded run {row.recording}, range {row.engine}" if story.bounded else f"{row.recording}, engine {row.engine}"
    )
    title = f"{row.topic}:{row.partition}:{row.offset} {status}{took}, {where}"
    key = [] if row.key is None else [f"key {_show_key(row.key)}" if row.key else "an empty key"]
    tail = [] if story.bounded or story.committed_us is not None else ["no commit is recorded within 10 minutes"]
    return "\n".join(map(escape_control, [title, *key, *_draw(lines, start), *tail]))


def _stage_lines(row: RecordedMessageRow, arranged: int, status: str) -> Iterator[_Line]:
    """Yield the stages of a message that was arranged into this many tasks; `row.tasks` also counts replacements."""
    tasks = format_count(arranged, "task") + (f" ({row.precomputed} precomputed)" if row.precomputed else "")
    # Without tasks, `transform` may have handled the message, and there is no stage for the end of tasks.
    returned = "arranged" if row.tasks else "arrange or transform returned, without tasks for it"
    stages = (
        (row.record_at, "written to the topic"),
        (row.consumed_at, "consumed"),
        (row.arranged_at, f"arranged into {tasks}" if row.status != "rejected" and row.tasks else returned),
        (row.tasks_done_at if row.tasks else None, "tasks done"),
        (row.resolved_at, _describe_end(row, status)),
    )
    for at, text in stages:
        if at is not None:
            yield at, text, []


def _describe_end(row: RecordedMessageRow, status: str) -> str:
    error = f": {_cut(row.error)}" if row.error else ""
    payloads = f", {format_count(row.payloads, 'payload')}" if row.payloads else ""
    return f"{status}{payloads}{error}"


def _task_line(task: RecordedTaskRow) -> _Line:
    labels = "".join(f" {name}={value}" for name, value in task.labels.items())
    details = [f"command line {_cut(shlex.join(task.args))}"] if task.args else []
    waited = task.started_at is not None and task.queued_at is not None
    if waited:
        assert task.started_at is not None
        assert task.queued_at is not None
        details.append(f"waited {_span(task.started_at - task.queued_at)}")
    if task.started_at is not None and task.ended_at is not None:
        where = "" if task.pid is None else f", process {task.pid}"
        slot = "" if task.slot is None else f" in slot {task.slot}"
        details.append(f"ran {_span(task.ended_at - task.started_at)}{slot}{where}")
    code = "" if task.exit_code is None else f", exit code {task.exit_code}"
    details.append(f"{'succeeded' if task.kind == 'ok' else f'failed ({task.kind})'}{code}")
    if task.error:
        details.append(f"error {_cut(task.error)}")
    for name, output in (("stdin", task.stdin), ("stdout", task.stdout), ("stderr", task.stderr)):
        if output:
            details.append(f"{name} {_cut(redact_text(show_bytes(output)))}")
    if task.parent:
        details.append(f"replaces task {task.parent}")
    at = task.started_at or task.queued_at or task.ended_at or 0
    return at, f"task {task.task_id}, try {task.attempt}{labels}", details


def _event_line(row: RecordedEventRow) -> _Line:
    event = row.event
    about = [event.sink, None if event.task_id is None else f"task {event.task_id}"]
    data = [f"{name} {value}" for name, value in event.data.items()]
    text = ", ".join([_EVENTS.get(event.kind, event.kind.value), *(each for each in about if each), *data])
    return event.at_us, text, [_cut(event.text)] if event.text else []


def _draw(lines: Sequence[_Line], start: int) -> Iterator[str]:
    for number, (at, text, details) in enumerate(lines):
        last = number == len(lines) - 1
        when = format_utc(at) if number == 0 else _relative(at - start)
        yield f"{'└' if last else '├'}─ {when}  {text}"
        for index, detail in enumerate(details):
            corner = "└" if index == len(details) - 1 else "├"
            yield f"{' ' if last else '│'}  {corner}─ {' '.join(detail.split())}"


def _relative(microseconds: int) -> str:
    return f"{'-' if microseconds < 0 else '+'}{_span(abs(microseconds))}"


def _span(microseconds: int) -> str:
    """Return a duration in a suitable unit."""
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:.1f} ms"
    return f"{microseconds / 1_000_000:.2f} s"


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]} ... ({len(text)} characters)"


def _show_key(key: bytes) -> str:
    cut = f" ... (only the first {MAX_KEY_BYTES} bytes of keys are recorded)" if len(key) >= MAX_KEY_BYTES else ""
    return f"{write_key(key)}{cut}"


def show_bytes(data: bytes) -> str:
    r"""Return bytes as text; bytes that are not UTF-8 are escaped.

    Example:
        >>> show_bytes(b"caf\xe9")
        'caf\\xe9'
    """
    return data.decode("utf-8", "backslashreplace")


def describe_nothing(what: str, where: str, span: tuple[int | None, int | None]) -> str:
    """Say that nothing was found, and which period is recorded."""
    first, last = span
    if first is None or last is None:
        return f"{escape_control(what)} is not recorded; there are no messages in {where}"
    return (
        f"{escape_control(what)} is not recorded in {where}, which has messages from {format_utc(first)} to "
        f"{format_utc(last)} (UTC)"
    )


def describe_open(opened: tuple[str, OpenMessage]) -> str:
    """Return the current stage of an open message and its worker, without control characters."""
    worker, message = opened
    engine = "" if message.engine is None else f", engine {message.engine}"
    position = f"{message.topic}:{message.partition}:{message.offset}"
    return escape_control(f"{position} is open, worker {worker}{engine}: {message.text}")


def encode_traces(
    traces: Sequence[Trace],
    opened: Sequence[tuple[str, OpenMessage]] = (),
    *,
    more: bool,
    span: tuple[int | None, int | None],
) -> str:
    """Return histories and open messages as one JSON document.

    Bytes are text; bytes that are not UTF-8 are added as base64.

    Args:
        traces: The histories.
        opened: The open messages, each with its worker.
        more: Whether there are further histories.
        span: The times of the oldest and the newest recorded message, in UTC microseconds.
    """
    document = {
        "messages": [_to_json(msgspec.to_builtins(trace, builtin_types=(bytes,))) for trace in traces],
        "open": [{"worker": worker, **_drop_unknown(msgspec.to_builtins(message))} for worker, message in opened],
    }
    kept = dict(zip(("kept_from_us", "kept_to_us"), span, strict=True))
    return json.dumps({**document, "more": more, **kept})


def _drop_unknown(message: dict[str, Any]) -> dict[str, Any]:
    stage = {name: value for name, value in message["stage"].items() if value not in (None, "")}
    return {**message, "stage": stage}


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        made: dict[str, Any] = {}
        for name, item in value.items():
            made[name] = _to_json(item)
            if isinstance(item, bytes) and made[name] != item.decode("utf-8", "replace"):
                made[f"{name}_base64"] = base64.b64encode(item).decode()
        return made
    if isinstance(value, list):
        return [_to_json(item) for item in value]
    return show_bytes(value) if isinstance(value, bytes) else value
