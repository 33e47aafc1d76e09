"""What the flight recorder costs in the driver, and how fast it answers: from received batches to sealed segments, then
searches over all of them.

Run: `python -m bench.recorder [--messages N] [--dir DIR]`. JSON lines out: first the writing (CPU time of the process
per message, which another one makes; bytes on disk; the most memory while each million was written), then each kind of
question to the API (milliseconds, p50 and p95, elapsed and of CPU). One message in a hundred failed, with an event and
a task; keys are all different; everything that was recorded is counted again at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
from bench.recorder_memory import memory_mb

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.config.settings import Settings
from tidemill.recorder.format.events import EventKind, RecordedEvent
from tidemill.recorder.format.schema import RowTable, encode_rows, messages_schema, tasks_schema
from tidemill.recorder.kept_memory import use_system_memory
from tidemill.recorder.reading.reader import Reader
from tidemill.recorder.writing.writer import RecordWriter
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


def feed(messages: int) -> None:
    """Write what engines would send to standard output: for each batch the rows of messages, the events, the tasks."""
    rng, encode = random.Random(1), msgspec.msgpack.Encoder().encode
    for first in range(0, messages, BATCH):
        parts = encode_rows(make_batch(first, BATCH, rng)), make_events(first, BATCH), make_tasks(first, BATCH)
        body = encode((parts[0], encode(parts[1]), encode_rows(parts[2])))
        sys.stdout.buffer.write(len(body).to_bytes(4, "big") + body)
    sys.stdout.buffer.flush()


def measure_bare() -> float:
    """Return the megabytes of a process that has loaded the settings, as a driver without all of this has."""
    code = "import bench.recorder_memory as memory, tidemill.config.settings; print(memory.memory_mb())"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)


def record(folder: Path, messages: int) -> Iterator[dict[str, object]]:
    """Record so many messages, which another process makes; yields what it cost."""
    settings = DebugSettings(db_dir=str(folder), retention_max_bytes=0, retention_max_events=0)
    taken = seq = 0
    memory: dict[int, float] = {}
    bare = measure_bare()
    command = [sys.executable, "-m", "bench.recorder", "--messages", str(messages), "--feed"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE) as engine,
        RecordWriter(settings, "bench", "host-1") as writer,
    ):
        assert engine.stdout is not None
        began = time.process_time()
        while taken < messages:
            size = int.from_bytes(engine.stdout.read(4), "big")
            rows, events, tasks = msgspec.msgpack.decode(engine.stdout.read(size), type=tuple[bytes, bytes, bytes])
            writer.put_rows("engine", 0, seq + 1, RowTable.MESSAGES, rows, BATCH)
            writer.put_events("engine", 0, seq + 2, msgspec.msgpack.decode(events, type=list[RecordedEvent]))
            writer.put_rows("engine", 0, seq + 3, RowTable.TASKS, tasks)
            taken, seq = taken + BATCH, seq + 3
            while taken - writer.statistics.rows > 4 * BATCH:
                time.sleep(0.002)
            million = (taken - 1) // 1_000_000 + 1
            memory[million] = max(memory.get(million, 0.0), round(memory_mb() - bare, 1))
        writer.add_event(RecordedEvent(START, EventKind.ACTION, text="the end"))
        while writer.statistics.events <= taken // 100:
            time.sleep(0.002)
        spent = time.process_time() - began
    files = [path for path in folder.rglob("*") if path.is_file()]
    segments = sum(path.stat().st_size for path in files if path.name.startswith("messages-"))
    yield {
        "bench": "recorder write",
        "messages": taken,
        "lost": writer.statistics.lost_rows + writer.statistics.lost_events,
        "cpu_us_per_message": round(spent / taken * 1e6, 3),
        "bytes_per_message": round(segments / taken, 2),
        "index_bytes_per_message": round(sum(p.stat().st_size for p in files if p.suffix == ".idx") / taken, 2),
        "database_bytes_per_event": round(sum(p.stat().st_size for p in files if p.suffix == ".db") * 100 / taken, 1),
        "all_bytes_per_message": round(sum(path.stat().st_size for path in files) / taken, 2),
        "memory_mb_above_by_million": memory,
    }


async def ask_api(folder: Path, messages: int) -> AsyncIterator[dict[str, object]]:
    """Ask pages and API, in this process and without a socket; the CPU is that of all its threads.

    What is known to be there has to be found. Of "later pages" each goes on where the one before it ended.
    """
    rng = random.Random(3)
    settings = Settings.model_validate({"debug": {"tokens": {"bench": {"hash": hash_token("bench")}}}})
    pages = Pages(describe_about(settings, folder))
    sections = mount_sections(pages, settings, folder, letters_of=None)
    logins = Logins(None, {}, settings.debug.tokens)
    app = create_app(sections, pages, logins, Origins("127.0.0.1"), Health(list, list), 0)
    headers = {"Authorization": "Bearer bench", "Accept": "text/html"}
    labelled = min(100, messages // 10_000)

    def number() -> int:
        return rng.randrange(messages)

    def failed() -> int:
        return number() // 100 * 100

    def second() -> str:
        at = (START + number() * GAP) // 1_000_000
        since, until = datetime.fromtimestamp(at, UTC), datetime.fromtimestamp(at + 1, UTC)
        return f"since={since:%Y-%m-%dT%H:%M:%S}&until={until:%Y-%m-%dT%H:%M:%S}"

    api = "/api/v1"
    questions: dict[str, tuple[Callable[[], str], int | None]] = {
        "newest messages": (lambda: f"{api}/messages", 100),
        "newest messages, later pages": (lambda: f"{api}/messages?", 100),
        "failed messages": (lambda: f"{api}/messages?status=failed", 100),
        "failed messages, later pages": (lambda: f"{api}/messages?status=failed&", 100),
        "rejected messages, miss": (lambda: f"{api}/messages?status=rejected", 0),
        "messages slower than 1 s, miss": (lambda: f"{api}/messages?min_seconds=1", 0),
        "messages of a second": (lambda: f"{api}/messages?{second()}", 100),
        "failed messages of a partition": (lambda: f"{api}/messages?partition=0&status=failed&{second()}", None),
        "a message, hit": (
            lambda: f"{api}/messages/orders/{(one := number()) % PARTITIONS}/{one // PARTITIONS}",
            None,
        ),
        "messages by offset, miss": (lambda: f"{api}/messages?topic=orders&partition=1&offset={2 * messages}", 0),
        "messages by key, hit": (lambda: f"{api}/messages?key=customer-{number()}", 1),
        "messages by key, miss": (lambda: f"{api}/messages?key=nobody-{number()}", 0),
        "messages by label": (lambda: f"{api}/messages?label=tenant%3Dt-{number() % 100}", labelled),
        "messages by label of all": (lambda: f"{api}/messages?label=step%3Dinvoice", 100),
        "messages by label of all, later pages": (lambda: f"{api}/messages?label=step%3Dinvoice&", 100),
        "messages by label, miss": (lambda: f"{api}/messages?label=tenant%3Dnobody", 0),
        "messages by task id, hit": (lambda: f"{api}/messages?task=task-{failed()}", 1),
        "messages by task id, miss": (lambda: f"{api}/messages?task=nobody-{number()}", 0),
        "messages by error text, hit": (lambda: f"{api}/messages?error=customer+{failed()}+has", 1),
        "messages by error text of all, later pages": (lambda: f"{api}/messages?error=has+no+address&", 100),
        "messages by error text, miss": (lambda: f"{api}/messages?error=planet+{number()}", 0),
        "newest tasks": (lambda: f"{api}/tasks", 100),
        "newest tasks, later pages": (lambda: f"{api}/tasks?", 100),
        "tasks by label": (lambda: f"{api}/tasks?label=tenant%3Dt-{number() % 100}", labelled),
        "tasks by label, miss": (lambda: f"{api}/tasks?label=tenant%3Dnobody", 0),
        "tasks by id, hit": (lambda: f"{api}/tasks?task=task-{failed()}", 1),
        "tasks by id, miss": (lambda: f"{api}/tasks?task=nobody-{number()}", 0),
        "newest events": (lambda: f"{api}/events", 100),
        "newest events, later pages": (lambda: f"{api}/events?", 100),
        "events by text, hit": (lambda: f"{api}/events?text=customer+{failed()}+has", 1),
        "events by text of all, later pages": (lambda: f"{api}/events?text=has+no+address&", 100),
        "events by text, miss": (lambda: f"{api}/events?text=planet+{number()}", 0),
        "failures": (lambda: f"{api}/failures", None),
        "recordings": (lambda: f"{api}/recordings", None),
        "runs": (lambda: f"{api}/runs", None),
        "page of messages": (lambda: "/messages", None),
        "page of tasks": (lambda: "/tasks", None),
        "page of runs": (lambda: "/runs", None),
    }
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", headers=headers
    ) as client:
        for name, (path, wanted) in questions.items():
            took, used, size, cursor = [], [], 0, None
            for _ in range(QUESTIONS):
                address = path() + (f"cursor={cursor}" if cursor else "")
                began, before = time.perf_counter(), time.process_time()
                answer = await client.get(address)
                took.append((time.perf_counter() - began) * 1000)
                used.append((time.process_time() - before) * 1000)
                size = max(size, len(answer.content))
                assert answer.status_code == 200, (name, answer.text)
                if wanted is not None:
                    found = answer.json()
                    assert len(found["rows"]) == wanted, (name, address, len(found["rows"]), found["problems"])
                    cursor = found["cursor"] if "later" in name else None
            yield {"bench": f"web: {name}", "bytes": size, **summarize(took, used)}


def summarize(took: list[float], used: list[float]) -> dict[str, object]:
    """Return what is said of milliseconds, elapsed and of CPU."""
    return {
        "first_ms": round(took[0], 1),
        "p50_ms": round(statistics.median(took), 1),
        "p95_ms": round(sorted(took)[int(len(took) * 0.95)], 1),
        "cpu_p50_ms": round(statistics.median(used), 1),
        "cpu_p95_ms": round(sorted(used)[int(len(used) * 0.95)], 1),
    }


async def ask(folder: Path, messages: int) -> None:
    """Ask everything, and count what was recorded; the process that wrote it answers, as a driver does."""
    use_system_memory()  # as who writes has it
    bare, most = measure_bare(), 0.0
    async for line in ask_api(folder, messages):
        most = max(most, memory_mb() - bare)
        print(json.dumps(line | {"memory_mb_above": round(memory_mb() - bare, 1)}), flush=True)
    found = sum(info.messages for info in Reader(folder).list_recordings())
    print(json.dumps({"bench": "recorder reader", "found": found, "memory_mb_above": round(most, 1)}))
    assert found >= messages


def main() -> None:
    """Record, ask, and count what was recorded."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000_000)
    parser.add_argument("--dir", type=Path, help="where to record; kept, and if something is there, asked")
    parser.add_argument("--feed", action="store_true", help="make what is recorded, and nothing else")
    options = parser.parse_args()
    if options.feed:
        feed(options.messages)
        return
    with contextlib.ExitStack() as stack:
        folder = options.dir or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if not folder.exists() or not any(folder.iterdir()):
            for line in record(folder, options.messages):
                print(json.dumps(line), flush=True)
        asyncio.run(ask(folder, options.messages))


if __name__ == "__main__":
    main()
