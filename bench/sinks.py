"""Each sink with known results against a bare loop over the same client, JSON lines out: `python -m bench.sinks [...]`.

Per round and in turn: the bare loop with the sink's own batch size, the pipeline with the file sink, and the same
pipeline, with the same data, with the sink. The bar is 85 % of the slower one of the first two.
"""

from __future__ import annotations

import abc
import asyncio
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import asyncpg
import confluent_kafka as ck
import httpx
import pymongo
from bench.harness import Bench, chosen, report, tree_cpu_seconds
from bench.pipeline import LINES
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from redis import asyncio as aioredis
from tests.sinks.servers import MongoServer, ValkeyServer, wait_for_port
from tests.store.server import PostgresServer

from tidemill.core.delivery.sql_plan import RowOperation, Shape, build_statement
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.mongo import MongoSink
from tidemill.sinks.postgres import PostgresSink
from tidemill.sinks.redis import RedisSink

Rows = Sequence[tuple[str, bytes]]


class Target(abc.ABC):
    """A server, and how it is written to without tidemill."""

    #: Its handler, and the one that puts the same data into a file.
    handler: str
    to_files = "KnownRecord"
    #: Messages per round.
    count = 300_000

    @abc.abstractmethod
    def section(self) -> dict[str, Any]:
        """The sink's section of the configuration."""

    @abc.abstractmethod
    async def bare(self, rows: Rows) -> None:
        """Write the rows by a loop over the client."""

    @abc.abstractmethod
    async def stored(self) -> int:
        """Count what is there, then remove it."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop the server."""


def batches(rows: Rows, size: int) -> list[Rows]:
    return [rows[at : at + size] for at in range(0, len(rows), size)]


class Postgres(Target):
    handler = "KnownRow"

    def __init__(self, bench: Bench) -> None:
        self._server = PostgresServer(free_port())
        asyncio.run(self._run("CREATE ROLE app LOGIN SUPERUSER PASSWORD 'hunter2'"))
        asyncio.run(self._run("CREATE TABLE lines (id text PRIMARY KEY, line text)"))
        self._dsn = self._server.tcp_url("postgres")

    async def _run(self, sql: str) -> Any:
        connection = await asyncpg.connect(self._server.url())
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    def section(self) -> dict[str, Any]:
        return {"postgres": {"out": {"dsn": self._dsn}}}

    async def bare(self, rows: Rows) -> None:
        connection = await asyncpg.connect(self._dsn, max_cacheable_statement_size=0)
        shape = Shape(RowOperation.UPSERT, "lines", ("id", "line"), ("id",))
        for batch in batches(rows, PostgresSink.max_batch_count):
            values = [value for name, line in batch for value in (name, line.decode())]
            await connection.execute(build_statement(shape, len(batch)), *values)
        await connection.close()

    async def stored(self) -> int:
        count = int(await self._run("SELECT count(*) FROM lines"))
        await self._run("TRUNCATE lines")
        return count

    def close(self) -> None:
        self._server.remove()


class Mongo(Target):
    handler = "KnownDocument"

    def __init__(self, bench: Bench) -> None:
        self._server = MongoServer("-Xmx1g", "-XX:+UseSerialGC")

    def section(self) -> dict[str, Any]:
        return {"mongo": {"out": {"uri": f"mongodb://127.0.0.1:{self._server.port}/", "database": "bench"}}}

    async def bare(self, rows: Rows) -> None:
        client: AsyncMongoClient[Any] = AsyncMongoClient(port=self._server.port)
        for batch in batches(rows, MongoSink.max_batch_count):
            writes = [pymongo.InsertOne({"_id": name, "line": line.decode()}) for name, line in batch]
            await client.bench.lines.bulk_write(writes, ordered=True)
        await client.close()

    async def stored(self) -> int:
        client: AsyncMongoClient[Any] = AsyncMongoClient(port=self._server.port)
        count = await client.bench.lines.count_documents({})
        await client.bench.lines.drop()
        await client.close()
        return count

    def close(self) -> None:
        self._server.close()


class Http(Target):
    handler = "KnownRequest"
    count = 5_000

    def __init__(self, bench: Bench) -> None:
        self._port = free_port()
        self._before = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.http_target", str(self._port)], stdin=subprocess.PIPE
        )
        wait_for_port(self._port, self._process)
        self._url = f"http://127.0.0.1:{self._port}/"

    def section(self) -> dict[str, Any]:
        return {"http": {"out": {"url": self._url}}}

    async def bare(self, rows: Rows) -> None:
        async with httpx.AsyncClient(headers={"content-type": "application/json"}, verify=False) as client:
            for name, line in rows:
                answer = await client.post(self._url, content=line, headers={"idempotency-key": name})
                answer.raise_for_status()

    async def stored(self) -> int:
        async with httpx.AsyncClient() as client:
            total = int((await client.get(self._url)).text)
        count, self._before = total - self._before, total
        return count

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


class Redis(Target):
    handler = "KnownKey"
    to_files = "Known"

    def __init__(self, bench: Bench) -> None:
        self._server = ValkeyServer()

    def section(self) -> dict[str, Any]:
        return {"redis": {"out": {"url": f"redis://127.0.0.1:{self._server.port}/0"}}}

    async def bare(self, rows: Rows) -> None:
        client = aioredis.Redis(port=self._server.port)
        for batch in batches(rows, RedisSink.max_batch_count):
            pipeline = client.pipeline(transaction=False)
            for name, line in batch:
                pipeline.execute_command("SET", name, line)
            await pipeline.execute()
        await client.aclose()

    async def stored(self) -> int:
        client = aioredis.Redis(port=self._server.port)
        count = int(await client.dbsize())
        await client.flushall()
        await client.aclose()
        return count

    def close(self) -> None:
        self._server.kill()


class Kafka(Target):
    handler = "KnownTopic"
    to_files = "Known"

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._before = 0
        bench.broker.create_topic("out", partitions=4)

    def section(self) -> dict[str, Any]:
        return {"kafka": {"out": {"topic": "out"}}}

    async def bare(self, rows: Rows) -> None:
        brokers = self._bench.broker.bootstrap
        producer = ck.Producer({"bootstrap.servers": brokers, "enable.idempotence": True, "linger.ms": 1})
        for batch in batches(rows, KafkaSink.max_batch_count):
            for name, line in batch:
                producer.produce("out", line, name)
            producer.flush()

    async def stored(self) -> int:
        total = self._bench.readable("out")
        count, self._before = total - self._before, total
        return count

    def close(self) -> None:
        """Nothing: the broker is the bench's own."""


TARGETS: dict[str, type[Target]] = {"kafka": Kafka, "postgres": Postgres, "mongo": Mongo, "http": Http, "redis": Redis}


def measure(name: str, folder: Path, rounds: int = 5) -> None:
    """Compare one sink."""
    bench = Bench(folder, "in-file")
    target = TARGETS[name](bench)
    count = target.count
    values = [b"%07d %s" % (n, LINES[n % len(LINES)][:90]) for n in range(count)]
    speeds: dict[str, list[float]] = {"bare": [], "file": [], "sink": []}
    pipelines: dict[str, int] = {}
    cpu_us: dict[str, list[float]] = {"file": [], "sink": []}

    def through(group: str, messages: list[bytes]) -> float:
        bench.topic = f"in-{group}"
        bench.forget_probe()
        goal = bench.committed(group) + len(messages)
        start, cpu = time.monotonic(), tree_cpu_seconds(pipelines[group])
        bench.feed(messages)
        bench.wait_committed(group, goal)
        wall = time.monotonic() - start
        cpu_us[group].append((tree_cpu_seconds(pipelines[group]) - cpu) / len(messages) * 1e6)
        return wall

    try:
        bench.broker.create_topic("in-sink", partitions=bench.partitions)
        files = {"filesystem": {"out": {"base_path": str(folder / "out")}}}
        with bench.pipeline(target.to_files, "file", sinks=files) as to_files:
            bench.topic = "in-sink"
            with bench.pipeline(target.handler, "sink", sinks=target.section()) as to_sink:
                pipelines.update(file=to_files.pid, sink=to_sink.pid)
                # Both have servers and a JVM beside them, which warm up.
                for group in ("file", "sink"):
                    through(group, values[:500])
                    bench.wait_settled(group, 2)
                    through(group, values[: count // 2])
                asyncio.run(target.stored())
                for n in range(rounds):
                    # Names of its own each time: what is there already would cost less.
                    rows = [(f"bare-{n}-{number}", value) for number, value in enumerate(values)]
                    start = time.monotonic()
                    asyncio.run(target.bare(rows))
                    speeds["bare"].append(count / (time.monotonic() - start))
                    _check(name, asyncio.run(target.stored()), count)
                    speeds["file"].append(count / through("file", values))
                    speeds["sink"].append(count / through("sink", values))
                    _check(name, asyncio.run(target.stored()), count)
                    report(
                        bench=f"sinks.{name}", round=n, **{f"{each}_per_second": speeds[each][-1] for each in speeds}
                    )
    finally:
        target.close()
        bench.close()
    medians = {each: statistics.median(found) for each, found in speeds.items()}
    report(
        bench=f"sinks.{name}",
        messages=count,
        **medians,
        cpu_us={each: statistics.median(found) for each, found in cpu_us.items()},
        median_ratio=medians["sink"] / min(medians["bare"], medians["file"]),
        bar_ratio=0.85,
    )


def _check(name: str, found: int, count: int) -> None:
    if found < count:
        raise AssertionError(f"{name}: {found} results for {count} messages")


if __name__ == "__main__":
    for name in chosen(TARGETS):
        where = Path(tempfile.mkdtemp(prefix="tidemill-bench-"))
        try:
            measure(name, where)
        finally:
            shutil.rmtree(where, ignore_errors=True)
