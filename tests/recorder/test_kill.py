"""A driver that is killed again and again: what was confirmed is found once, before and after it is sealed."""

from __future__ import annotations

import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests.until import wait_until

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.recorder.reading.queries import EventQuery, MessageQuery
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.writer import RecordWriter

#: Offsets of a run begin at its number times this.
RUN = 1_000_000
DRIVER = f"""
    import sys, time
    from tests.recorder.rows import START, message, messages
    from tidemill.config.sections.debug_settings import DebugSettings
    from tidemill.core.recorder.sealing import SealPolicy
    from tidemill.recorder.format.events import EventKind, RecordedEvent
    from tidemill.recorder.format.schema import RowTable
    from tidemill.recorder.writing.writer import RecordWriter

    first = int(sys.argv[2]) * {RUN}
    settings = DebugSettings(db_dir=sys.argv[1], rotation_interval_minutes=0.004, flush_interval_seconds=0.01)
    stored = lambda engine_id, seq: print(seq, flush=True)
    with RecordWriter(settings, "g", "w", stored=stored, policy=SealPolicy(max_rows=40)) as writer:
        for number in range(100_000):
            rows = [message(first + number * 10 + row) for row in range(10)]
            writer.put_rows("e", 0, 2 * number + 2, RowTable.MESSAGES, messages(*rows))
            event = RecordedEvent(START, EventKind.TASK_FAILED, "orders", 0, first + number, text=f"error {{number}}")
            writer.put_events("e", 0, 2 * number + 3, [event])
            time.sleep(0.004)
"""


def run_and_kill(folder: Path, number: int, seconds: float) -> tuple[set[int], set[int]]:
    """Run a driver and kill it; returns the offsets of messages and of events that it confirmed."""
    output = folder.with_name(f"{folder.name}-{number}.txt")
    with output.open("wb") as file:
        process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(DRIVER), folder, str(number)], stdout=file)
    try:
        wait_until(lambda: output.stat().st_size)
        time.sleep(seconds)
    finally:
        process.kill()
        process.wait()
    seqs = [int(line) for line in output.read_text().split("\n")[:-1]]
    batches = [number * RUN + (seq // 2 - 1) * 10 for seq in seqs if seq % 2 == 0]
    events = {number * RUN + (seq - 3) // 2 for seq in seqs if seq % 2}
    return {first + row for first in batches for row in range(10)}, events


def check(folder: Path, messages: set[int], events: set[int]) -> None:
    """What was confirmed is found, and nothing is found twice."""
    reader = Reader(folder)
    found: dict[str, list[int | None]] = {"messages": [], "events": []}
    cursor = None
    while True:
        page = reader.find_messages(MessageQuery(), cursor, limit=1_000)
        assert page.problems == []
        found["messages"] += [row.offset for row in page.rows]
        if (cursor := page.cursor) is None:
            break
    while True:
        listed = reader.find_events(EventQuery(), cursor, limit=1_000)
        assert listed.problems == []
        found["events"] += [row.event.offset for row in listed.rows]
        if (cursor := listed.cursor) is None:
            break
    for name, confirmed in (("messages", messages), ("events", events)):
        assert len(found[name]) == len(set(found[name])), f"{name} were found twice"
        assert confirmed <= set(found[name]), f"confirmed {name} are missing"


@pytest.mark.long
@pytest.mark.timeout(300)  # at a load of 24 it takes 76 s
def test_what_a_driver_confirmed_survives_its_kill_at_any_moment(tmp_path: Path):
    rng = random.Random(7)
    folder = tmp_path / "recordings"
    messages: set[int] = set()
    events: set[int] = set()
    for number in range(5):
        more_messages, more_events = run_and_kill(folder, number, rng.random() * 1.5)
        messages |= more_messages
        events |= more_events
    check(folder, messages, events)
    with RecordWriter(DebugSettings(db_dir=str(folder)), "g", "other"):
        wait_until(lambda: not list(folder.rglob("*.open")))
        check(folder, messages, events)
    assert not list(folder.rglob("*.tmp"))
