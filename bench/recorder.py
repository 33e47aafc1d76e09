"""What the flight recorder costs in the driver, and how fast it answers: from received batches to sealed segments, then
searches over all of them.

Run: `python -m bench.recorder [--messages N] [--dir DIR]`. JSON lines out: first the writing (CPU time of the process
per message without what makes the batches, bytes on disk, memory), then each kind of question (milliseconds, p50 and
p95, elapsed and of CPU). One message in a hundred failed, with an event; keys are all different; everything that was
recorded is counted again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.compute as pc

from tidemill.config.debug_settings import DebugSettings
from tidemill.config.settings import Settings
from tidemill.recorder.events import EventKind, RecordedEvent
from tidemill.recorder.queries import EventQuery, MessageQuery, TaskQuery
from tidemill.recorder.reader import Reader
from tidemill.recorder.schema import RowTable, encode_rows, messages_schema, tasks_schema
from tidemill.recorder.writer import RecordWriter
from tidemill.web.access.hashes import hash_token
from tidemill.web.access.logins import Logins
from tidemill.web.access.origins import Origins
from tidemill.web.app import create_app
from tidemill.web.pages import Pages
from tidemill.web.sections import Health
from tidemill.web.standalone.start import describe_about, mount_sections

PARTITIONS = 8
#: What fits into a frame of 128 KiB.
BATCH = 8_000
START = 1_800_000_000_000_000
#: Microseconds between two messages: 70,000 a second.
GAP = 14
QUESTIONS = 60


def make_batch(first: int, count: int, rng: random.Random) -> pa.RecordBatch:
    """Return messages with numbers from `first` on: consumed in hundreds, with some noise in all times."""
    numbers = pa.array(range(first, first + count), pa.int64())
    at = pc.add(pc.multiply(numbers, GAP), START)

    def noisy(spread: int) -> pa.Array:
        return pa.array([rng.randrange(spread) for _ in range(count)], pa.int64())

    consumed = pc.multiply(pc.divide(at, 1_400), 1_400)
    failed = pc.equal(pc.subtract(numbers, pc.multiply(pc.divide(numbers, 100), 100)), 0)
    done = pc.add(consumed, pc.add(noisy(400), 3_000))
    ones = pa.array([1] * count, pa.int32())
    columns = {
        "topic": pa.array(["orders"] * count),
        "partition": pc.cast(pc.subtract(numbers, pc.multiply(pc.divide(numbers, PARTITIONS), PARTITIONS)), pa.int32()),
        "offset": pc.divide(numbers, PARTITIONS),
        "key": pc.cast(pc.binary_join_element_wise("customer-", pc.cast(numbers, pa.string()), ""), pa.binary()),
        "record_at": pc.multiply(pc.divide(pc.subtract(at, 50_000), 1_000), 1_000),
        "consumed_at": consumed,
        "arranged_at": pc.add(consumed, 700),
        "tasks_done_at": done,
        "resolved_at": pc.add(pc.multiply(pc.divide(done, 500), 500), 900),
        "committed_at": pa.nulls(count, pa.int64()),
        "window": pc.divide(numbers, 100),
        "status": pc.if_else(failed, "failed", "done"),
        "tasks": ones,
        "precomputed": ones,
        "attempts": ones,
        "payloads": ones,
        "error": pc.if_else(failed, "exit: exit code #", pa.scalar(None, pa.string())),
    }
    schema = messages_schema()
    arrays = [
        column.dictionary_encode() if pa.types.is_dictionary(field.type) else column
        for field, column in zip(schema, columns.values(), strict=True)
    ]
    return pa.record_batch(arrays, schema=schema)


def make_events(first: int, count: int) -> list[RecordedEvent]:
    """Return the events of the failed ones among these messages."""
    return [
        RecordedEvent(
            START + number * GAP,
            EventKind.TASK_FAILED,
            "orders",
            number % PARTITIONS,
            number // PARTITIONS,
            f"task-{number}",
            text=f"exit: exit code 3: customer {number} has no address in region {number % 977}",
            error_class="exit: exit code #: customer # has no address",
        )
        for number in range(first, first + count)
        if number % 100 == 0
    ]


def make_tasks(first: int, count: int) -> pa.RecordBatch:
    """Return the task of each failed message; a hundredth of them has a label in common, all have another one."""
    rows = [
        {
            "task_id": f"task-{number}",
            "topic": "orders",
            "partition": number % PARTITIONS,
            "offsets": [number // PARTITIONS],
            "args": ["--order", str(number)],
            "labels": [("tenant", f"t-{number // 100 % 100}"), ("step", "invoice")],
            "slot": 1,
            "pid": 4711,
            "queued_at": START + number * GAP,
            "started_at": START + number * GAP + 200,
            "ended_at": START + number * GAP + 900,
            "exit_code": 3,
            "kind": "exit",
            "attempt": 1,
        }
        for number in range(first, first + count)
        if number % 100 == 0
    ]
    return pa.RecordBatch.from_pylist(rows, schema=tasks_schema())


def memory_mb() -> float:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def record(folder: Path, messages: int) -> Iterator[dict[str, object]]:
    """Record so many messages; yields what it cost."""
    settings = DebugSettings(db_dir=str(folder), retention_max_bytes=0, retention_max_events=0)
    rng = random.Random(1)
    made = seq = 0
    spent_here = 0.0
    memory = {}
    encode_rows(make_batch(0, 100, rng))
    before, began = memory_mb(), time.process_time()
    with RecordWriter(settings, "bench", "host-1") as writer:
        while made < messages:
            here = time.thread_time()
            body = encode_rows(make_batch(made, BATCH, rng))
            events = make_events(made, BATCH)
            writer.put_rows("engine", 0, seq + 1, RowTable.MESSAGES, body, BATCH)
            writer.put_events("engine", 0, seq + 2, events)
            writer.put_rows("engine", 0, seq + 3, RowTable.TASKS, encode_rows(make_tasks(made, BATCH)))
            made, seq = made + BATCH, seq + 3
            spent_here += time.thread_time() - here
            while made - writer.statistics.rows > 20 * BATCH:
                time.sleep(0.002)
            for mark in (1_000_000, 2_000_000, messages):
                if made >= mark and mark not in memory:
                    memory[mark] = round(memory_mb() - before, 1)
    spent = time.process_time() - began - spent_here
    files = [path for path in folder.rglob("*") if path.is_file()]
    segments = sum(path.stat().st_size for path in files if path.name.startswith("messages-"))
    yield {
        "bench": "recorder write",
        "messages": made,
        "lost": writer.statistics.lost_rows + writer.statistics.lost_events,
        "cpu_us_per_message": round(spent / made * 1e6, 3),
        "bytes_per_message": round(segments / made, 2),
        "index_bytes_per_message": round(sum(p.stat().st_size for p in files if p.suffix == ".idx") / made, 2),
        "database_bytes_per_event": round(sum(p.stat().st_size for p in files if p.suffix == ".db") * 100 / made, 1),
        "memory_mb_above": memory,
    }


def ask(reader: Reader, messages: int) -> Iterator[dict[str, object]]:
    """Ask each kind of question a few times; what is known to be there has to be found."""
    rng = random.Random(2)

    def number() -> int:
        return rng.randrange(messages)

    def at(number: int) -> int:
        return START + number * GAP

    def count(query: MessageQuery, wanted: Callable[[int], bool], limit: int = 100) -> None:
        found = len(reader.find_messages(query, limit=limit).rows)
        assert wanted(found), (query, found)

    def place(number: int) -> MessageQuery:
        return MessageQuery(topic="orders", partition=number % PARTITIONS, offset=number // PARTITIONS)

    def key(number: int) -> MessageQuery:
        return MessageQuery(key=f"customer-{number}".encode())

    def page() -> None:
        first = reader.find_messages(MessageQuery(statuses=("failed",)))
        assert len(reader.find_messages(MessageQuery(statuses=("failed",)), first.cursor).rows) == 100

    def text(words: str, wanted: int) -> None:
        assert len(reader.find_events(EventQuery(text=words)).rows) == wanted, words

    def count_tasks(query: TaskQuery, wanted: int) -> None:
        assert len(reader.find_tasks(query).rows) == wanted, query

    def label_pages() -> None:
        query = MessageQuery(label=f"tenant=t-{number() % 100}")
        first = reader.find_messages(query, limit=labelled // 2)
        assert len(reader.find_messages(query, first.cursor, labelled // 2).rows) == labelled // 2

    labelled = min(100, messages // 10_000)
    questions: dict[str, Callable[[], object]] = {
        "offset, hit": lambda: count(place(number()), lambda found: found == 1),
        "offset, miss": lambda: count(place(messages * 2), lambda found: found == 0),
        "key, hit": lambda: count(key(number()), lambda found: found == 1),
        "key, miss": lambda: count(MessageQuery(key=b"nobody-%d" % number()), lambda found: found == 0),
        "newest": lambda: count(MessageQuery(), lambda found: found == 100),
        "failed": lambda: count(MessageQuery(statuses=("failed",)), lambda found: found == 100),
        "failed, two pages": page,
        "rejected, miss": lambda: count(MessageQuery(statuses=("rejected",)), lambda found: found == 0),
        "slower than 1 s, miss": lambda: count(MessageQuery(min_seconds=1), lambda found: found == 0),
        "a second": lambda: count(
            MessageQuery(since_us=at(middle := number()), until_us=at(middle) + 1_000_000), lambda found: found > 0
        ),
        "a partition, failed, a time": lambda: count(
            MessageQuery(partition=0, statuses=("failed",), until_us=at(number()) + 1_000_000), lambda found: found > 0
        ),
        "error text, hit": lambda: text(f"customer {number() // 100 * 100} has", 1),
        "error text, many": lambda: text("has no address", 100),
        "error text, miss": lambda: text(f"unknown planet {number()}", 0),
        "messages by error text": lambda: count(
            MessageQuery(error=f"customer {number() // 100 * 100} has"), lambda found: found == 1
        ),
        "task id, hit": lambda: count_tasks(TaskQuery(task_id=f"task-{number() // 100 * 100}"), 1),
        "task id, miss": lambda: count_tasks(TaskQuery(task_id=f"nobody-{number()}"), 0),
        "tasks by label": lambda: count_tasks(TaskQuery(label=f"tenant=t-{number() % 100}"), labelled),
        "tasks by label, miss": lambda: count_tasks(TaskQuery(label=f"tenant=nobody-{number()}"), 0),
        "messages by label": lambda: count(
            MessageQuery(label=f"tenant=t-{number() % 100}"), lambda found: found == labelled
        ),
        "messages by label of all": lambda: count(MessageQuery(label="step=invoice"), lambda found: found == 100),
        "messages by label, second page": label_pages,
        "messages by task id": lambda: count(
            MessageQuery(task_id=f"task-{number() // 100 * 100}"), lambda found: found == 1
        ),
        "messages by label, miss": lambda: count(MessageQuery(label="tenant=nobody"), lambda found: found == 0),
        "failures by class": lambda: reader.list_failures(),
        "trace": lambda: reader.trace("orders", (one := number()) % PARTITIONS, one // PARTITIONS),
        "recordings": lambda: reader.list_recordings(),
    }
    for name, question in questions.items():
        took, used = [], []
        for _ in range(QUESTIONS):
            began, before = time.perf_counter(), time.thread_time()
            question()
            took.append((time.perf_counter() - began) * 1000)
            used.append((time.thread_time() - before) * 1000)
        yield {"bench": f"recorder find: {name}", **summarize(took, used)}


async def ask_api(folder: Path, messages: int) -> list[dict[str, object]]:
    """Ask pages and API for the same, in this process and without a socket; the CPU is that of all its threads."""
    rng = random.Random(3)
    settings = Settings.model_validate({"debug": {"tokens": {"bench": {"hash": hash_token("bench")}}}})
    pages = Pages(describe_about(settings, folder))
    sections = mount_sections(pages, settings, folder, has_letters=False)
    logins = Logins(None, {}, settings.debug.tokens)
    app = create_app(sections, pages, logins, Origins("127.0.0.1"), Health(list, list), 0)
    headers = {"Authorization": "Bearer bench", "Accept": "text/html"}

    def number() -> int:
        return rng.randrange(messages)

    paths: dict[str, Callable[[], str]] = {
        "newest messages": lambda: "/api/v1/messages",
        "failed messages": lambda: "/api/v1/messages?status=failed",
        "a message, hit": lambda: f"/api/v1/messages/orders/{(one := number()) % PARTITIONS}/{one // PARTITIONS}",
        "by key, hit": lambda: f"/api/v1/messages?key=customer-{number()}",
        "by key, miss": lambda: f"/api/v1/messages?key=nobody-{number()}",
        "by label": lambda: f"/api/v1/messages?label=tenant%3Dt-{number() % 100}",
        "by error text": lambda: f"/api/v1/messages?error=customer+{number() // 100 * 100}+has",
        "newest tasks": lambda: "/api/v1/tasks",
        "newest events": lambda: "/api/v1/events",
        "events by text, miss": lambda: f"/api/v1/events?text=planet+{number()}",
        "failures": lambda: "/api/v1/failures",
        "recordings": lambda: "/api/v1/recordings",
        "runs": lambda: "/api/v1/runs",
        "page of messages": lambda: "/messages",
        "page of tasks": lambda: "/tasks",
        "page of runs": lambda: "/runs",
    }
    lines: list[dict[str, object]] = []
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers
    ) as client:
        for name, path in paths.items():
            took, used, size = [], [], 0
            for _ in range(QUESTIONS):
                began, before = time.perf_counter(), time.process_time()
                answer = await client.get(path())
                took.append((time.perf_counter() - began) * 1000)
                used.append((time.process_time() - before) * 1000)
                size = max(size, len(answer.content))
                assert answer.status_code == 200, (name, answer.text)
            lines.append({"bench": f"web: {name}", "bytes": size, **summarize(took, used)})
    return lines


def summarize(took: list[float], used: list[float]) -> dict[str, object]:
    """Return what is said of milliseconds, elapsed and of CPU."""
    return {
        "first_ms": round(took[0], 1),
        "p50_ms": round(statistics.median(took), 1),
        "p95_ms": round(sorted(took)[int(len(took) * 0.95)], 1),
        "cpu_p50_ms": round(statistics.median(used), 1),
        "cpu_p95_ms": round(sorted(used)[int(len(used) * 0.95)], 1),
    }


def main() -> None:
    """Record, ask, and count what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as name:
        folder = Path(name)
        for line in record(folder, options.messages):
            print(json.dumps(line), flush=True)
        before = memory_mb()
        reader = Reader(folder)
        for line in ask(reader, options.messages):
            print(json.dumps(line), flush=True)
        for line in asyncio.run(ask_api(folder, options.messages)):
            print(json.dumps(line), flush=True)
        found = sum(info.messages for info in reader.list_recordings())
        print(
            json.dumps({"bench": "recorder reader", "found": found, "memory_mb_above": round(memory_mb() - before, 1)})
        )
        assert found >= options.messages


if __name__ == "__main__":
    main()
