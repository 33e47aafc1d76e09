"""A recording of a pipeline, written by the writer that drivers use."""

from __future__ import annotations

import time
from pathlib import Path

from tests.letters import letter, write
from tests.recorder.rows import message, messages, task, tasks
from tests.until import wait_until
from tests.web.scripted_pipeline import SCRIPT, SECRET

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.deadletters.letter import LetterKind
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable
from tidemill.recorder.writing.writer import RecordWriter

COUNT = 250
TOPIC = "orders"
#: The message with everything: a retry, a failure, a refused delivery, a letter.
FAILED = 240
#: The message whose tasks ended well, and whose only payload was dead-lettered.
REFUSED = 245
KEY = f"A-17 {SCRIPT}"
ERROR_CLASS = f"exit code # {SCRIPT}"


def write_letters(folder: Path) -> Path:
    """Write dead letters into a folder, and return it."""
    letters = [
        letter(
            offset,
            letter_id=f"letter-{offset}",
            timestamp=f"2026-05-01T12:00:{offset:02d}+00:00",
            error=f"exit code 3 {SCRIPT}",
            kind=LetterKind.DELIVERY if offset % 4 == 0 else LetterKind.TASK,
            sink_type="postgres" if offset % 4 == 0 else "",
            sink_name="db" if offset % 4 == 0 else "",
            task_id=f"task-{offset} {SCRIPT}",
            args=["--order", SCRIPT],
            stderr=f"Traceback {SCRIPT}",
            original_payloads=[f'{{"data": "{SCRIPT}"}}'],
        )
        for offset in range(12)
    ]
    write(folder, letters)
    return folder


def record(folder: Path) -> int:
    """Write a recording below a folder; returns the time of its last message, in microseconds."""
    last = int(time.time() * 1_000_000) - 60_000_000
    start = last - COUNT * 1_000_000

    def at(offset: int, milliseconds: int) -> int:
        return start + offset * 1_000_000 + milliseconds * 1000

    rows = [
        message(
            offset,
            offset % 4,
            key=KEY.encode() if offset % 50 == FAILED % 50 else f"customer-{offset % 7}".encode(),
            record_at=at(offset, -300),
            consumed_at=at(offset, 0),
            arranged_at=at(offset, 12),
            tasks_done_at=at(offset, 480),
            resolved_at=at(offset, 700 if offset != FAILED else 5_000),
            committed_at=None if offset == FAILED else at(offset, 900),
            status="failed" if offset % 80 == 0 else "done",
            error=ERROR_CLASS if offset % 80 == 0 else None,
            attempts=3 if offset == FAILED else 1,
        )
        for offset in range(COUNT)
    ]
    ran = [
        task(
            f"task-{offset}",
            [offset],
            offset % 4,
            labels=[("tenant", "acme" if offset % 3 else SCRIPT)],
            args=["--order", str(offset), SCRIPT],
            queued_at=at(offset, 13 + 1000 * (attempt - 1)),
            started_at=at(offset, 40 + 1000 * (attempt - 1)),
            ended_at=at(offset, 470 + 1000 * (attempt - 1)),
            kind="exit" if offset == FAILED else "ok",
            exit_code=3 if offset == FAILED else 0,
            attempt=attempt,
            stderr=f"Traceback {SCRIPT}".encode() if offset == FAILED else None,
            error=f"exit code 3: {SCRIPT}" if offset == FAILED else None,
        )
        for offset in range(COUNT)
        for attempt in ((1, 2, 3) if offset == FAILED else (1,))
    ]
    events = [
        RecordedEvent(
            at(offset, 475 + 1000 * number),
            kind,
            TOPIC,
            offset % 4,
            offset,
            f"task-{offset}",
            sink,
            f"exit code 3 {SCRIPT}",
            ERROR_CLASS,
            {"attempt": number + 1},
        )
        for offset in range(0, COUNT, 80)
        for number, (kind, sink) in enumerate(
            [
                (EventKind.TASK_RETRY, None),
                (EventKind.TASK_RETRY, None),
                (EventKind.TASK_FAILED, None),
                (EventKind.SINK_ERROR, "sinks.postgres.db"),
                (EventKind.DEAD_LETTERED, None),
            ]
        )
    ]
    events.append(
        RecordedEvent(
            at(REFUSED, 600),
            EventKind.DEAD_LETTERED,
            TOPIC,
            REFUSED % 4,
            REFUSED,
            sink="sinks.postgres.db",
            text=f"value too long {SCRIPT}",
            data={"letter_id": "letter-4"},
        )
    )
    events.append(RecordedEvent(last, EventKind.ACTION, text="release", data={"by": "ann"}))
    settings = DebugSettings(db_dir=str(folder))
    config = {"kafka": {"client_config": {"sasl.password": "***"}}}
    with RecordWriter(settings, "order-workers", "worker-1", config=config) as writer:
        writer.put_rows("engine", 0, 1, RowTable.MESSAGES, messages(*rows))
        writer.put_rows("engine", 0, 2, RowTable.TASKS, tasks(*ran))
        writer.put_events("engine", 0, 3, events)
        wait_until(lambda: writer.statistics.rows == len(rows) + len(ran), 30)
    assert SECRET not in str(config)
    return last
