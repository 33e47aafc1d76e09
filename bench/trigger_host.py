"""What a trigger host costs: idle triggers, durable events from `yield` to commit, and memory over a long stream.

    python -m bench.trigger_host [idle] [durable] [memory] [recorded]
        [--triggers 10000] [--events 200000] [--stream 1000000] [--rounds 3]

JSON lines out. Each measurement runs in a process of its own, so that the memory is its own. Bars: 10,000 idle triggers
are hosted within 1 s, take at most 2 KiB each beyond the trigger's own state and at most 0.5 % of a core; at least
10,000 events a second are stored durably, in SQLite and in PostgreSQL (512-byte payloads, 100 triggers, all rows read
back); memory stays flat over 1,000,000 events of a shared stream with one slow subscriber.

`recorded` runs all of them with the recorder and without, in turn; the bars are the same.

A trigger's own state is what it takes without a host: the object, its generator, and what that waits for.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.config.settings import Settings
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.reporting.recording import record_host
from tidemill.services.triggerer.lists.sessions import Ownership
from tidemill.store.database import Database
from tidemill.store.engines.opening import open_store
from tidemill.store.queries.triggers.events import list_events
from tidemill.store.records import TriggerSpec
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamProducer

PAYLOAD_BYTES = 512
PRODUCERS = 100
IDLE_SECONDS = 10.0
#: A slow subscriber rests so long after every so many events.
REST_SECONDS = 0.002
REST_EVERY = 20


def resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def say(bench: str, **row: Any) -> None:
    print(json.dumps({"bench": f"trigger_host {bench}", **row}), flush=True)


def payload(number: int) -> dict[str, Any]:
    """Return what is PAYLOAD_BYTES long as JSON."""
    frame = len(f'{{"number":{number},"text":""}}')
    return {"number": number, "text": "x" * (PAYLOAD_BYTES - frame)}


class Idle(BaseTrigger):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "bench.trigger_host.Idle", {"number": self.number}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.get_running_loop().create_future()
        yield TriggerEvent(None)


class Firing(BaseTrigger):
    """Fires as fast as it is let."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "bench.trigger_host.Firing", {"count": self.count}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for number in range(self.count):
            yield TriggerEvent(payload(number), identity=str(number) if number % 2 else None)


class Numbers(SharedStreamProducer):
    """Yields numbers as a client does that is given messages in batches; keeps how far it was advanced."""

    count = 0
    advanced = 0

    async def open_stream(self) -> AsyncIterator[tuple[int, int]]:
        for number in range(Numbers.count):
            yield number, number
            if number % 250 == 249:
                await asyncio.sleep(0)
        await asyncio.get_running_loop().create_future()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        assert all(item.outcome.is_clean for item in batch)
        Numbers.advanced += len(batch)


class Selecting(BaseEventTrigger):
    """Fires each event whose number a divisor divides; a slow one rests now and then."""

    def __init__(self, divisor: int, slow: bool = False) -> None:
        super().__init__()
        self.divisor = divisor
        self.slow = slow

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "bench.trigger_host.Selecting", {"divisor": self.divisor, "slow": self.slow}

    def shared_stream_key(self) -> str:
        return "numbers"

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return Numbers()

    async def filter_shared_stream(self, shared_stream: AsyncIterator[int]) -> AsyncIterator[TriggerEvent]:
        async for number in shared_stream:
            if self.slow and number % REST_EVERY == 0:
                await asyncio.sleep(REST_SECONDS)
            if number % self.divisor == 0:
                yield TriggerEvent(number)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise NotImplementedError
        yield


def spec(name: str, cls: type[BaseTrigger], **kwargs: Any) -> TriggerSpec:
    return TriggerSpec(name, f"bench.trigger_host.{cls.__name__}", json.dumps(kwargs, sort_keys=True), "never")


# -- idle


async def own_state(count: int) -> float:
    """Return the bytes of a trigger that waits without a host."""
    before = resident_bytes()
    waiting = []
    for number in range(count):
        trigger = Idle(number)
        events = trigger.run()
        step = anext(events)
        step.send(None)  # type: ignore[attr-defined]  # the awaitable of an async generator
        waiting.append((trigger, events, step))
    return (resident_bytes() - before) / count


async def idle(count: int, folder: Path) -> None:
    specs = [spec(f"idle-{number}", Idle, number=number) for number in range(count)]
    database = await open_store(f"sqlite:///{folder}/idle.db")
    # What comes with the first trigger is not what each takes.
    host = await host_of(database)
    await host.start([spec("first", Idle, number=-1)])
    await asyncio.sleep(0.1)
    before = resident_bytes()
    began, started_cpu = time.perf_counter(), time.process_time()
    await host.reload([spec("first", Idle, number=-1), *specs])
    hosted_seconds = time.perf_counter() - began
    await asyncio.sleep(0.5)
    hosted_cpu = time.process_time() - started_cpu
    assert host.running == count + 1
    each = (resident_bytes() - before) / count
    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.sleep(IDLE_SECONDS)
    share = (time.process_time() - cpu) / (time.perf_counter() - wall)
    await stop(host)
    await database.close()
    own = float(subprocess.check_output([*command(), "own", f"--triggers={count}"]))
    say(
        "idle",
        recorded=is_recorded(),
        triggers=count,
        hosted_seconds=round(hosted_seconds, 2),
        hosted_cpu_seconds=round(hosted_cpu, 2),
        bytes_each=round(each),
        own_bytes_each=round(own),
        host_bytes_each=round(each - own),
        share_of_a_core=round(share, 4),
    )


# -- durable


async def read_back(database: Database, triggers: int, each: int) -> int:
    """Read every row, and check that it is the one that was fired."""
    expected = [json.dumps(payload(number), separators=(",", ":")) for number in range(each)]
    next_of: dict[str, int] = {}
    after: int | None = None
    while True:
        page = await database.read(lambda connection, after=after: list_events(connection, after=after, limit=5000))
        for row in page.rows:
            number = next_of.get(row.trigger_name, 0)
            assert (row.sequence_index, row.payload) == (number, expected[number])
            next_of[row.trigger_name] = number + 1
        if page.next is None:
            break
        after = page.next
    assert len(next_of) == triggers
    assert set(next_of.values()) == {each}
    return sum(next_of.values())


#: Where hosts note what happens.
BOOK = HostBook()
#: In which session each host runs.
OWNED: dict[ListHost, Ownership] = {}


async def host_of(database: Database) -> ListHost:
    ownership = Ownership(database, "bench")
    await ownership.acquire()
    host = ListHost(database, TriggererSettings(), ownership, book=BOOK)
    ownership.compare_tokens(lambda: host.tokens, host.hand_over)
    OWNED[host] = ownership
    return host


async def stop(host: ListHost) -> None:
    await host.stop()
    await OWNED.pop(host).release()


async def durable(name: str, url: str, events: int) -> None:
    each = events // PRODUCERS
    database = await open_store(url)
    host = await host_of(database)
    began, cpu = time.perf_counter(), time.process_time()
    await host.start([spec(f"fires-{number}", Firing, count=each) for number in range(PRODUCERS)])
    await host.wait_idle()  # a trigger has ended when all it fired is stored
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    await stop(host)
    rows = await read_back(database, PRODUCERS, each)
    await database.close()
    say(
        "durable",
        database=name,
        recorded=is_recorded(),
        triggers=PRODUCERS,
        payload_bytes=PAYLOAD_BYTES,
        events=rows,
        events_per_second=round(rows / seconds),
        cpu_us_per_event=round(used / rows * 1e6, 1),
    )


# -- memory


async def memory(count: int, folder: Path) -> None:
    database = await open_store(f"sqlite:///{folder}/memory.db")
    Numbers.count = count
    host = await host_of(database)
    began, cpu = time.perf_counter(), time.process_time()
    await host.start(
        [
            spec("all", Selecting, divisor=1),
            spec("few", Selecting, divisor=1000),
            spec("slow", Selecting, divisor=10, slow=True),
        ]
    )
    sizes: list[int] = []
    while Numbers.advanced < count:
        await asyncio.sleep(0.05)
        if Numbers.advanced >= (len(sizes) + 1) * count // 20:
            sizes.append(resident_bytes())
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    await stop(host)
    await database.close()
    # The first tenth fills pools and caches.
    settled = sizes[1:]
    say(
        "memory",
        recorded=is_recorded(),
        events=count,
        cpu_us_per_event=round(used / count * 1e6, 2),
        seconds=round(seconds, 1),
        events_per_second=round(count / seconds),
        mib_after_a_tenth=round(settled[0] / 2**20, 1),
        mib_at_most=round(max(settled) / 2**20, 1),
        mib_at_the_end=round(settled[-1] / 2**20, 1),
    )


def command() -> list[str]:
    return [sys.executable, "-m", "bench.trigger_host"]


def is_recorded() -> bool:
    return "tidemill.services.triggerer.lists.reporting.host_recorder" in sys.modules


def measure(what: str, arguments: argparse.Namespace) -> None:
    debug = {"enabled": arguments.with_recorder}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = Settings.model_validate({"debug": {**debug, "db_dir": f"{folder}/recordings"}})
        with record_host(settings, "bench", "bench", BOOK) as recorder:
            measure_one(what, arguments, folder)
        assert recorder is None or not recorder.writer.statistics.lost_events


def measure_one(what: str, arguments: argparse.Namespace, folder: Path) -> None:
    if what == "own":
        print(asyncio.run(own_state(arguments.triggers)))
    elif what == "idle":
        asyncio.run(idle(arguments.triggers, folder))
    elif what == "memory":
        asyncio.run(memory(arguments.stream, folder))
    elif what == "durable-sqlite":
        asyncio.run(durable("sqlite", f"sqlite:///{folder}/durable.db", arguments.events))
    else:
        from tests.store.server import PostgresServer

        server = PostgresServer()
        try:
            asyncio.run(durable("postgresql", server.url(), arguments.events))
        finally:
            server.remove()


ALL = ["idle", "durable-sqlite", "durable-postgresql", "memory"]
PARTS = {"idle": ["idle"], "durable": ["durable-sqlite", "durable-postgresql"], "memory": ["memory"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["idle", "durable", "memory"])
    parser.add_argument("--triggers", type=int, default=10_000)
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--stream", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--with-recorder", action="store_true")
    arguments = parser.parse_args()
    steps = {step for part in PARTS.values() for step in part} | {"own"}
    if len(arguments.what) == 1 and arguments.what[0] in steps - set(PARTS):
        measure(arguments.what[0], arguments)
        return
    options = [f"--{name}={getattr(arguments, name)}" for name in ("triggers", "events", "stream")]
    for part in arguments.what:
        if part == "recorded":
            for number in range(arguments.rounds):
                for step in ALL:
                    pair = ([], ["--with-recorder"]) if number % 2 else (["--with-recorder"], [])
                    for more in pair:
                        subprocess.run([*command(), step, *options, *more], check=True)
            continue
        for step in PARTS[part]:
            if len(PARTS[part]) == 1 and len(arguments.what) == 1:
                measure(step, arguments)
                continue
            subprocess.run([*command(), step, *options], check=True)


if __name__ == "__main__":
    # The host imports this module by its name: there are to be no two of it.
    from bench import trigger_host

    trigger_host.main()
