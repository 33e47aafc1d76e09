"""How many events a second are stored durably: from `add` to the commit that its `done` tells of, all rows read back.

Run: `python -m bench.store_events [sqlite] [postgresql] [--events N] [--rate R]`. JSON lines out, one per run: first as
fast as it goes, then at a rate, which says what the delay is when there is room. 512-byte payloads of 100 triggers,
every second one with an identity; the process that adds also makes the payloads and reads the answers. The floor is
how long one forced write to this disk takes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import tempfile
import time
from pathlib import Path

from tests.store.helpers import new_session
from tests.store.server import PostgresServer

from tidemill.core.triggers.event_plan import EventStored
from tidemill.core.triggers.group_commit import CommitLimits
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.engines.opening import open_store
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers.events import list_trigger_events
from tidemill.store.queries.triggers.triggers import claim_triggers, register_triggers
from tidemill.store.records import TriggerSpec

TRIGGERS = 100
PAYLOAD_BYTES = 512


def payload(trigger_id: int, number: int) -> str:
    text = f'{{"trigger":{trigger_id},"number":{number},"text":"'
    return f'{text}{"x" * (PAYLOAD_BYTES - len(text) - 2)}"}}'


def forced_write_ms(folder: Path) -> float:
    """Return the median time of appending and forcing 64 KiB."""
    times = []
    fd = os.open(folder / "forced", os.O_CREAT | os.O_WRONLY)
    for _ in range(50):
        began = time.perf_counter()
        os.write(fd, b"x" * 65536)
        os.fdatasync(fd)
        times.append(time.perf_counter() - began)
    os.close(fd)
    return sorted(times)[25] * 1000


async def read_back(database, ids: list[int], per_trigger: int) -> int:
    """Read every row, and check that it is the one that was added."""
    total = 0
    for trigger_id in ids:
        after: int | None = None
        number = 0
        while True:
            page = await database.read(
                lambda connection, trigger_id=trigger_id, after=after: list_trigger_events(
                    connection, trigger_id, after=after, limit=1000
                )
            )
            for row in page.rows:
                assert row.sequence_index == number
                assert row.payload == payload(trigger_id, number)
                number += 1
            if page.next is None:
                break
            after = page.next
        assert number == per_trigger, (trigger_id, number, per_trigger)
        total += number
    return total


async def measure(name: str, url: str, events: int, rate: float | None) -> None:
    database = await open_store(url)
    now_us = time.time_ns() // 1000
    specs = [TriggerSpec(f"trigger-{number}", "bench.Trigger") for number in range(TRIGGERS)]
    records = await database.write(lambda connection: register_triggers(connection, specs, "bench", now_us))
    ids = [record.id for record in records]
    store = EventStore(DatabaseEvents(database))
    session = await new_session(database)
    tokens = await database.write(lambda connection: claim_triggers(connection, ids, session, now_us))
    store.start()
    latencies: list[float] = []
    clock = time.perf_counter

    def stored(began: float):
        def done(outcome) -> None:
            assert isinstance(outcome, EventStored)
            latencies.append(clock() - began)

        return done

    before = resource.getrusage(resource.RUSAGE_SELF)
    began = clock()
    per_trigger = events // TRIGGERS
    for number in range(per_trigger):
        await store.wait_open()
        for trigger_id in ids:
            identity = f"{number}" if number % 2 else None
            store.add(trigger_id, tokens[trigger_id], payload(trigger_id, number), identity, stored(clock()))
        if rate is not None:
            await asyncio.sleep(max(0.0, began + (number + 1) * TRIGGERS / rate - clock()))
        else:
            await asyncio.sleep(0)
    await store.wait_settled()
    seconds = clock() - began
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    await store.close(10)
    rows = await read_back(database, ids, per_trigger)
    await database.close()
    latencies.sort()
    print(
        json.dumps(
            {
                "bench": "store_events",
                "database": name,
                "offered_per_second": rate,
                "events": rows,
                "events_per_second": round(rows / seconds),
                "cpu_us_per_event": round(used / rows * 1e6, 1),
                "latency_p50_ms": round(latencies[len(latencies) // 2] * 1000, 1),
                "latency_p99_ms": round(latencies[len(latencies) * 99 // 100] * 1000, 1),
                "linger_ms": CommitLimits().linger_seconds * 1000,
            }
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("databases", nargs="*", default=["sqlite", "postgresql"])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--rate", type=float, default=5_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        floor = forced_write_ms(Path(folder))
        print(json.dumps({"bench": "forced_write", "ms": round(floor, 2)}), flush=True)
        for rate in (None, arguments.rate):
            events = arguments.events if rate is None else arguments.events // 4
            if "sqlite" in arguments.databases:
                asyncio.run(measure("sqlite", f"sqlite:///{folder}/{rate}.db", events, rate))
            if "postgresql" in arguments.databases:
                server = PostgresServer()
                try:
                    asyncio.run(measure("postgresql", server.url(), events, rate))
                finally:
                    server.remove()


if __name__ == "__main__":
    main()
