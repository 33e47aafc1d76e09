"""Formats DAGs, runs and tasks: tables for people, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import typer

from tidemill.cli.terminal.tables import Column, find_width, format_age, format_table
from tidemill.cli.triggers.triggers_view import find_last_words
from tidemill.core.tasks.instance import format_instance
from tidemill.core.times import format_iso, format_utc
from tidemill.core.wording import shorten
from tidemill.runtime.store_clock import STORE_CLOCK

if TYPE_CHECKING:
    from tidemill.store.calls.callback_calls import CallbackRecord
    from tidemill.store.calls.dag_calls import DagRecord
    from tidemill.store.calls.instance_calls import HistoryRecord, MapCounts, StreamAbout, TaskRecord
    from tidemill.store.calls.run_calls import RunRecord
    from tidemill.store.calls.service_calls import FileDifference
    from tidemill.store.calls.stream_calls import EventEnvelope
    from tidemill.store.calls.xcom_calls import XComRecord

T = TypeVar("T")

#: Longer texts are truncated in tables.
_MAX_SHOWN = 200
_MAX_CURSOR = 40

_DAG_COLUMNS = (
    Column("DAG", cut=True),
    Column("STATE"),
    Column("SCHEDULE", cut=True),
    Column("NEXT", optional=True),
    Column("FILE", optional=True, cut=True),
    Column("TAGS", detail=True),
)
_RUN_COLUMNS = (
    Column("DAG", cut=True),
    Column("RUN", cut=True),
    Column("STATE"),
    Column("AGE", right=True),
    Column("TOOK", right=True),
    Column("BY", optional=True, cut=True),
    Column("REASON", detail=True),
)
TASK_COLUMNS = (
    Column("TASK", cut=True),
    Column("STATE"),
    Column("TRY", right=True),
    Column("SINCE", right=True),
    Column("OPERATOR", optional=True, cut=True),
    Column("POOL", optional=True),
    Column("ELEMENTS, OR ERROR", detail=True),
)
_ELEMENT_COLUMNS = (
    Column("INDEX", right=True),
    Column("LABEL", optional=True, cut=True),
    Column("STATE"),
    Column("TRY", right=True),
    Column("SINCE", right=True),
    Column("TOOK", right=True),
    Column("ERROR", detail=True),
)
_CALLBACK_COLUMNS = (
    Column("CALLBACK"),
    Column("OF", cut=True),
    Column("STATE"),
    Column("SINCE", right=True),
    Column("ERROR", detail=True),
)
_HISTORY_COLUMNS = (
    Column("TIME"),
    Column("FROM"),
    Column("TO"),
    Column("WHY", cut=True),
    Column("BY", optional=True, cut=True),
    Column("DETAIL", detail=True),
)
_EVENT_COLUMNS = (
    Column("SEQ", right=True),
    Column("TRIGGER RUN", right=True),
    Column("AGE", right=True),
    Column("LAST", optional=True),
    Column("IDENTITY", optional=True),
    Column("PAYLOAD", detail=True),
)
_XCOM_COLUMNS = (Column("TASK", cut=True), Column("KEY", cut=True), Column("VALUE", detail=True))


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """How records are listed.

    Attributes:
        columns: The columns of a table.
        build_row: Returns the cells of a record.
        encode: Returns a record as a JSON document.
    """

    columns: Sequence[Column]
    build_row: Callable[[T], Sequence[str]]
    encode: Callable[[T], dict[str, Any]]


def show_rows(pages: Iterable[Sequence[T]], listing: Listing[T], *, as_json: bool, nothing: str) -> None:
    """Print rows as they are read, as JSON or as a table per page.

    Args:
        pages: The rows.
        listing: How they are listed.
        as_json: Whether to print JSON.
        nothing: The text to print if there are no rows, unless JSON is printed.
    """
    shown = False
    for rows in pages:
        if rows:
            for line in _build_lines(rows, listing, as_json=as_json):
                typer.echo(line)
            shown = True
    if not shown and not as_json:
        typer.echo(nothing)


def _build_lines(rows: Sequence[T], listing: Listing[T], *, as_json: bool) -> Iterator[str]:
    if as_json:
        return (json.dumps(listing.encode(row)) for row in rows)
    return format_table(listing.columns, [listing.build_row(row) for row in rows], find_width())


def format_clock(microseconds: int) -> str:
    """Return a time for tables, in UTC."""
    return format_utc(microseconds)[:19]


def encode_dag(dag: DagRecord) -> dict[str, Any]:
    return {
        "dag": dag.dag_id,
        "label": dag.label or dag.dag_id,
        "file": dag.file,
        "version": dag.version,
        "active": dag.active,
        "paused": dag.paused,
        "schedule": dag.schedule or None,
        "next": format_iso(dag.next_us),
        "tags": list(dag.tags),
    }


def build_dag_row(dag: DagRecord) -> tuple[str, ...]:
    state = "paused" if dag.paused else "active"
    following = "" if dag.next_us is None else format_clock(dag.next_us)
    return (
        dag.dag_id,
        state if dag.active else "inactive",
        dag.schedule or "none",
        following,
        dag.file,
        ", ".join(dag.tags),
    )


def encode_run(run: RunRecord) -> dict[str, Any]:
    return {
        "dag": run.dag_id,
        "run": run.run_id,
        "kind": run.kind,
        "state": run.state,
        "reason": run.reason,
        "version": run.version,
        "logical_date": format_iso(run.logical_us),
        "created": format_iso(run.created_us),
        "started": format_iso(run.started_us),
        "ended": format_iso(run.ended_us),
        "conf": json.loads(run.conf),
        "by": run.by,
    }


def _build_run_row(run: RunRecord) -> tuple[str, ...]:
    now_us = STORE_CLOCK.now_us()
    took = ""
    if run.started_us is not None:
        took = format_seconds(((run.ended_us or now_us) - run.started_us) / 1e6)
    age = format_age((now_us - run.created_us) / 1e6)
    return run.dag_id, run.run_id, run.state, age, took, run.by, run.reason or ""


def format_seconds(seconds: float) -> str:
    """Return a duration in one unit.

    Example:
        >>> format_seconds(0.5), format_seconds(75)
        ('0.5s', '1m')
    """
    return f"{max(0.0, seconds):.1f}s" if seconds < 60 else format_age(seconds)


def encode_task(task: TaskRecord) -> dict[str, Any]:
    return {
        "dag": task.dag_id,
        "run": task.run_id,
        "task": task.task_id,
        "map_index": task.map_index,
        "state": task.state,
        "epoch": task.epoch,
        "try": task.tries,
        "max_tries": task.max_tries,
        "operator": task.operator,
        "queue": task.queue,
        "pool": task.pool,
        "pool_slots": task.pool_slots,
        "priority": task.priority,
        "since": format_iso(task.since_us),
        "started": format_iso(task.started_us),
        "ended": format_iso(task.ended_us),
        "due": format_iso(task.due_us),
        "worker": task.worker,
        "trigger": task.trigger,
        "error": task.error,
        "label": task.label,
        "elements": None if task.elements is None else _encode_counts(task.elements),
        "stream": None if task.stream is None else _encode_stream(task.stream),
    }


def _encode_stream(stream: StreamAbout) -> dict[str, Any]:
    values = {name: getattr(stream, name) for name in stream.__struct_fields__ if name != "checkpoint"}
    return {**values, "cursor": stream.checkpoint}


def format_stream(task: TaskRecord) -> str:
    """Return the counts of a task's stream in one line; '' for other tasks."""
    stream = task.stream
    if stream is None:
        return ""
    rate = "" if stream.rate is None else f", {stream.rate:.1f}/s"
    cursor = "" if stream.checkpoint is None else f", cursor {shorten(stream.checkpoint, _MAX_CURSOR)}"
    error = "" if stream.error is None else f", {find_last_words(stream.error)}"
    counts = f"{stream.received:,} received, {stream.handled:,} handled, {stream.undelivered:,} undelivered"
    carried = f", {stream.carried:,} of earlier tries undelivered" if stream.carried else ""
    discarded = f", {stream.discarded:,} discarded ({stream.discarded_for})" if stream.discarded else ""
    return f"{counts}{carried}{discarded}{rate}{cursor}{error}"


def _encode_counts(counts: MapCounts) -> dict[str, Any]:
    return {name: getattr(counts, name) for name in counts.__struct_fields__}


def format_elements(task: TaskRecord, run_started_us: int | None = None) -> str:
    """Return the counts of a mapped task and its rate in one line; '' for other tasks."""
    from tidemill.web.dags.element_counts import compute_rate, format_counts, format_rate

    if task.elements is None:
        return ""
    rate = format_rate(compute_rate(task, run_started_us, STORE_CLOCK.now_us()))
    return f"{format_counts(task.elements)}{f', {rate}' if rate else ''}"


def _build_element_row(task: TaskRecord) -> tuple[str, ...]:
    took = ""
    if task.started_us is not None and task.ended_us is not None:
        took = format_seconds((task.ended_us - task.started_us) / 1e6)
    return (
        str(task.map_index),
        task.label or "",
        task.state,
        f"{task.tries}/{task.max_tries}" if task.tries else "",
        format_age(STORE_CLOCK.now_us() / 1e6 - task.since_us / 1e6),
        took,
        shorten(find_last_words(task.error or ""), _MAX_SHOWN),
    )


def build_task_row(task: TaskRecord) -> tuple[str, ...]:
    error = shorten(find_last_words(task.error or ""), _MAX_SHOWN)
    return (
        format_instance(task.task_id, task.map_index),
        task.state,
        f"{task.tries}/{task.max_tries}" if task.tries else "",
        format_age(STORE_CLOCK.now_us() / 1e6 - task.since_us / 1e6),
        task.operator,
        task.pool,
        "; ".join(text for text in (format_elements(task), format_stream(task), error) if text),
    )


def encode_callback(callback: CallbackRecord) -> dict[str, Any]:
    return {
        "id": callback.id,
        "callback": callback.name,
        "task": callback.task_id,
        "map_index": callback.map_index,
        "state": callback.state,
        "due": format_iso(callback.created_us),
        "ended": format_iso(callback.ended_us),
        "error": callback.error,
    }


def build_callback_row(callback: CallbackRecord) -> tuple[str, ...]:
    return (
        callback.name,
        "the run" if callback.task_id is None else format_instance(callback.task_id, callback.map_index),
        callback.state,
        format_age(STORE_CLOCK.now_us() / 1e6 - (callback.ended_us or callback.created_us) / 1e6),
        shorten(find_last_words(callback.error or ""), _MAX_SHOWN),
    )


def _encode_change(change: HistoryRecord) -> dict[str, Any]:
    return {
        "epoch": change.epoch,
        "from": change.before,
        "to": change.after,
        "input": change.given,
        "time": format_iso(change.at_us),
        "by": change.by,
        "detail": change.detail,
    }


def _build_change_row(change: HistoryRecord) -> tuple[str, ...]:
    why = change.given.partition(" ")[0]
    detail = shorten(find_last_words(change.detail or ""), _MAX_SHOWN)
    return format_clock(change.at_us), change.before, change.after, why, change.by, detail


def encode_difference(difference: FileDifference) -> dict[str, Any]:
    return {
        "file": difference.path,
        "difference": difference.difference,
        "host": difference.host,
        "service": difference.kind,
        "name": difference.name,
        "session": difference.session,
        "since": format_iso(difference.since_us),
    }


def describe_difference(difference: FileDifference) -> str:
    """Return a line about a file that differs between hosts."""
    who = f"the {difference.kind} {difference.name} on {difference.host}"
    age = format_age(STORE_CLOCK.now_us() / 1e6 - difference.since_us / 1e6)
    if difference.difference == "missing":
        return f"{difference.path}: {who} has lacked it for {age}; copy it to the DAG folder of that host"
    return f"{difference.path}: {who} has had another content for {age}; make the DAG folders equal"


def _encode_event(event: EventEnvelope) -> dict[str, Any]:
    """Return an event as a document, with its payload as text."""
    return {
        "trigger_run_id": event.trigger_run_id,
        "sequence_index": event.sequence_index,
        "payload": event.payload,
        "is_last": event.is_last,
        "identity": event.identity,
        "time": format_iso(event.created_us),
    }


def _build_event_row(event: EventEnvelope) -> tuple[str, ...]:
    return (
        str(event.sequence_index),
        str(event.trigger_run_id),
        format_age(STORE_CLOCK.now_us() / 1e6 - event.created_us / 1e6),
        "last" if event.is_last else "",
        shorten(event.identity or "", _MAX_SHOWN),
        shorten(event.payload, _MAX_SHOWN),
    )


def _encode_xcom(xcom: XComRecord) -> dict[str, Any]:
    """Return an XCom as a document, with its value as stored."""
    return {
        "task": xcom.task_id,
        "map_index": xcom.map_index,
        "key": xcom.key,
        "value": json.loads(xcom.value),
        "time": format_iso(xcom.created_us),
    }


def _build_xcom_row(xcom: XComRecord) -> tuple[str, ...]:
    return format_instance(xcom.task_id, xcom.map_index), xcom.key, shorten(xcom.value, _MAX_SHOWN)


DAGS = Listing(_DAG_COLUMNS, build_dag_row, encode_dag)
RUNS = Listing(_RUN_COLUMNS, _build_run_row, encode_run)
ELEMENTS = Listing(_ELEMENT_COLUMNS, _build_element_row, encode_task)
CALLBACKS = Listing(_CALLBACK_COLUMNS, build_callback_row, encode_callback)
CHANGES = Listing(_HISTORY_COLUMNS, _build_change_row, _encode_change)
EVENTS = Listing(_EVENT_COLUMNS, _build_event_row, _encode_event)
XCOMS = Listing(_XCOM_COLUMNS, _build_xcom_row, _encode_xcom)
