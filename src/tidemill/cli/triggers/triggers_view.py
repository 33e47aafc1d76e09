"""Formats triggers, events and streams: tables for people, JSON for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tidemill.cli.terminal.tables import Column, format_age, format_table, wrap
from tidemill.core.times import format_iso
from tidemill.core.wording import format_count, shorten

if TYPE_CHECKING:
    from tidemill.store.records import EventRecord, TriggerRecord

#: Longer errors and payloads are truncated in tables.
_MAX_SHOWN = 200

_TRIGGER_COLUMNS = (
    Column("NAME", cut=True),
    Column("STATE"),
    Column("EVENTS", right=True),
    Column("AGE", right=True),
    Column("RESTART", optional=True),
    Column("RUNS IN", optional=True),
    Column("LIST", optional=True),
    Column("REASON OR ERROR", detail=True),
)
_EVENT_COLUMNS = (
    Column("ID", right=True),
    Column("TRIGGER", cut=True),
    Column("SEQ", right=True),
    Column("AGE", right=True),
    Column("IDENTITY", optional=True),
    Column("PAYLOAD", detail=True),
)
_LANE_COLUMNS = (
    Column("LANE", cut=True),
    Column("OUTSTANDING", right=True),
    Column("OLDEST", right=True),
    Column("AGE", right=True),
    Column("HELD BY", detail=True),
)


def encode_trigger(record: TriggerRecord) -> str:
    return json.dumps(
        {
            "name": record.spec.name,
            "state": record.state.value,
            "events": record.next_index,
            "restart": record.spec.restart,
            "since": format_iso(record.changed_us),
            "reason": record.reason,
            "error": record.error,
            "list": record.list,
            "session": record.session,
        }
    )


def encode_event(record: EventRecord) -> str:
    """Return an event as one line of JSON, with the payload as fired."""
    return json.dumps(
        {
            "id": record.id,
            "trigger": record.trigger_name,
            "trigger_run_id": record.trigger_id,
            "sequence_index": record.sequence_index,
            "is_last": record.is_last,
            "time": format_iso(record.created_us),
            "identity": record.identity,
            "payload": json.loads(record.payload),
        }
    )


def format_triggers(records: Sequence[TriggerRecord], width: int | None) -> Iterator[str]:
    """Yield the lines of a table of triggers.

    Args:
        records: The triggers.
        width: The maximum line length; None: no limit.
    """
    now = time.time()
    # The list differs only if one store serves several lists.
    several = len({record.list for record in records}) > 1
    rows = [
        (
            record.spec.name,
            record.state.value,
            f"{record.next_index:,}",
            format_age(now - record.changed_us / 1e6),
            record.spec.restart,
            record.session or "",
            (record.list or "") if several else "",
            shorten(record.reason or find_last_words(record.error or ""), _MAX_SHOWN),
        )
        for record in records
    ]
    return format_table(_TRIGGER_COLUMNS, rows, width)


def format_events(records: Sequence[EventRecord], width: int | None) -> Iterator[str]:
    """Yield the lines of a table of events.

    Args:
        records: The events.
        width: The maximum line length; None: no limit.
    """
    now = time.time()
    rows = [
        (
            str(record.id),
            record.trigger_name,
            str(record.sequence_index),
            format_age(now - record.created_us / 1e6),
            shorten(record.identity or "", _MAX_SHOWN),
            shorten(record.payload, _MAX_SHOWN),
        )
        for record in records
    ]
    return format_table(_EVENT_COLUMNS, rows, width)


def format_host(report: dict[str, Any], width: int | None) -> Iterator[str]:
    """Yield the lines that describe a host and its shared streams.

    Args:
        report: The host's report.
        width: The maximum line length; None: no limit.
    """
    yield from wrap(_describe_host(report), width)
    for stream in report["streams"]:
        full = stream["full_seconds"]
        subscribers = format_count(len(stream["subscribers"]), "subscriber")
        text = f"{stream['key']}: {subscribers}, {stream['outstanding']} outstanding"
        yield from wrap(text if full is None else f"{text}; full, polling paused for {format_age(full)}", width)
        for name, seconds in stream["failed"].items():
            yield from wrap(f"{name} failed {format_age(seconds)} ago but has not ended", width, indent="  ")
        if stream["lanes"]:
            rows = [_build_lane_row(lane) for lane in stream["lanes"]]
            inner = None if width is None else width - 2
            yield from (f"  {line}" for line in format_table(_LANE_COLUMNS, rows, inner))


def find_last_words(error: str) -> str:
    """Return the last line of a traceback that contains text; an exception group ends with a line of its frame."""
    line = next((each for each in reversed(error.splitlines()) if any(map(str.isalnum, each))), "")
    return line.strip(" |")


def _describe_host(report: dict[str, Any]) -> str:
    holder = report["waits_for"]
    if holder is not None:
        age = format_age(time.time() - datetime.fromisoformat(holder["since"]).timestamp())
        return (
            f"process {report['pid']} is on standby; process {holder['process']} on {holder['host']} has run the list "
            f"{holder['list']} for {age}"
        )
    if report["store"] is None:
        return f"process {report['pid']} is starting"
    return f"process {report['pid']}: {format_count(report['running'], 'trigger')}, store {report['store']}"


def _build_lane_row(lane: dict[str, Any]) -> tuple[str, ...]:
    return (
        lane["lane"] or "-",
        str(lane["outstanding"]),
        str(lane["head"]),
        format_age(lane["age_seconds"]),
        ", ".join(lane["holders"]) or "no trigger; it is being acknowledged",
    )
