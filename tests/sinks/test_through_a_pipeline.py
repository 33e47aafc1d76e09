"""Sinks behind a whole engine: a handler's payloads in real targets, offsets committed only then."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from redis import asyncio as aioredis
from tests.faults import FaultyProxy
from tests.sinks.servers import HttpDouble, MongoServer, ValkeyServer
from tests.store.server import PostgresServer

from tidemill import (
    CollectResult,
    ExecutorResult,
    ExecutorTask,
    FilePayload,
    Handler,
    HttpPayload,
    MessageGroup,
    MongoPayload,
    PostgresPayload,
    PrecomputedResult,
    RedisPayload,
    Settings,
)
from tidemill.core.errors import SinkNotConfiguredError
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.tasks.resident import build_executor
from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import EngineSummary, StopReason
from tidemill.sinks.base import SinksByName
from tidemill.sinks.build import build_sinks
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSource


class Known(Handler[Any, Any]):
    """One task per message whose result is known already."""

    async def arrange(self, messages: Sequence[SourceMessage], pending: Any) -> list[ExecutorTask]:
        return [
            ExecutorTask(
                f"t{each.partition}-{each.offset}",
                source_offsets=[each.offset],
                precomputed=PrecomputedResult(str(each.offset)),
            )
            for each in messages
        ]


class Run:
    """An engine over scripted messages and the sinks that are configured."""

    def __init__(self, handler: Handler[Any, Any], count: int, **config: Any) -> None:
        self.settings = Settings.model_validate(config)
        messages = [SourceMessage("t", n % 2, n // 2, None, b"x") for n in range(count)]
        self.ends = {("t", 0): (count + 1) // 2, ("t", 1): count // 2}
        self.source = ScriptedSource(messages)
        self.letters = ScriptedDeadLetters()
        self.outbox = Outbox(
            build_sinks(self.settings),
            self.letters,
            handler.on_delivery_error,
            self.settings.delivery,
            group=self.settings.kafka.consumer_group,
        )
        self.engine = Engine(
            self.settings,
            handler,
            EngineIdentity("test", 0, "sinks", "g", 1),
            self.source,
            self.outbox,
            self.letters,
            build_executor(self.settings.executor, "sinks"),
        )

    async def to_end(self, seconds: float = 30.0) -> EngineSummary:
        """Run until everything is committed."""

        async def at_once() -> None:
            pass

        task = asyncio.ensure_future(self.engine.run(at_once))
        async with asyncio.timeout(seconds):
            while not task.done() and any(self.source.committed.get(each) != end for each, end in self.ends.items()):
                await asyncio.sleep(0.005)
        self.engine.drain()
        return await task


class ToPostgres(Known):
    async def on_ready(self, config: Settings, sinks: Any) -> None:
        await sinks["postgres.db"].pool.execute("CREATE TABLE results (id text PRIMARY KEY, n int CHECK (n <> 13))")

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        data = {"id": result.task.task_id, "n": int(result.stdout)}
        return CollectResult(postgres=[PostgresPayload(table="results", data=data, op="upsert", conflict="id")])


async def test_a_pipeline_delivers_to_postgresql_and_dead_letters_what_it_refuses(
    postgres: PostgresServer, database: str
) -> None:
    run = Run(ToPostgres(), 1_001, sinks={"postgres": {"db": {"dsn": postgres.tcp_url(database)}}})
    summary = await run.to_end()
    assert summary.reason is StopReason.DRAINED
    connection = await asyncpg.connect(postgres.url(database))
    ids = [row["id"] for row in await connection.fetch("SELECT id FROM results")]
    await connection.close()
    assert sorted(ids) == sorted(f"t{n % 2}-{n // 2}" for n in range(1_001) if n // 2 != 13)
    assert [letter.sink_type for letter in run.letters.letters] == ["postgres"] * 2
    assert "CheckViolationError" in (run.letters.letters[0].error or "")
    stats = run.outbox.statistics().sinks["sinks.postgres.db"]
    assert stats.delivered_payloads == 999
    assert stats.dead_lettered == 2
    assert stats.last_error is not None
    assert stats.last_delivered_at is not None
    assert stats.last_error_at is not None
    assert 0 < stats.delivered_count < 999


class ToAll(Known):
    async def on_ready(self, config: Settings, sinks: Any) -> None:
        await sinks["postgres.db"].pool.execute("CREATE TABLE IF NOT EXISTS results (id text PRIMARY KEY, n int)")

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        name, data = result.task.task_id, {"id": result.task.task_id, "n": int(result.stdout)}
        return CollectResult(
            postgres=[PostgresPayload(table="results", data=data, op="upsert", conflict="id")],
            mongo=[MongoPayload(collection="results", data=data, op="upsert", filter={"id": name})],
            http=[HttpPayload(data=data, idempotency_key=name)],
            redis=[RedisPayload(key=name, data=data)],
            files=[FilePayload(path="results.jsonl", data=data)],
        )


@pytest.mark.timeout(300)  # at a load of 24 it takes 55 s, on a slow machine twice that
async def test_every_sink_gets_every_result_while_each_of_them_is_down_for_a_while(
    postgres: PostgresServer,
    database: str,
    valkey: ValkeyServer,
    mongo: MongoServer,
    http_double: HttpDouble,
    proxy: Callable[[int], FaultyProxy],
    tmp_path: Path,
) -> None:
    assert postgres.port
    count = 1_500
    between = {
        "postgres": proxy(postgres.port),
        "mongo": proxy(mongo.port),
        "http": proxy(http_double.port),
        "redis": proxy(valkey.port),
    }
    client = aioredis.Redis(port=valkey.port)
    await client.flushall()
    run = Run(
        ToAll(),
        count,
        sinks={
            "postgres": {"db": {"dsn": postgres.tcp_url(database, between["postgres"].port)}},
            "mongo": {"docs": {"uri": f"mongodb://127.0.0.1:{between['mongo'].port}/", "database": database}},
            "http": {"api": {"url": f"http://127.0.0.1:{between['http'].port}/", "concurrency": 4}},
            "redis": {"cache": {"url": f"redis://127.0.0.1:{between['redis'].port}/", "key_prefix": "r:"}},
            "filesystem": {"log": {"base_path": str(tmp_path)}},
        },
        delivery={"retry_backoff": {"max_seconds": 0.2}, "breaker": {"open_seconds": 0.2}},
    )

    def done(section: str) -> int:
        return run.outbox.statistics().sinks[section].delivered_payloads

    async def fail_in_turn() -> None:
        while not done("sinks.http.api"):
            await asyncio.sleep(0.005)
        for each in between.values():
            await asyncio.to_thread(each.down)
            await asyncio.sleep(0.1)
            await asyncio.to_thread(each.up)

    failing = asyncio.ensure_future(fail_in_turn())
    await run.to_end(240)
    await failing
    ids = {f"t{n % 2}-{n // 2}" for n in range(count)}
    assert not run.letters.letters
    connection = await asyncpg.connect(postgres.url(database))
    assert {row["id"] for row in await connection.fetch("SELECT id FROM results")} == ids
    await connection.close()
    documents: AsyncMongoClient[Any] = AsyncMongoClient(port=mongo.port)
    assert {each["id"] for each in await documents[database].results.find().to_list()} == ids
    await documents.close()
    assert {key.decode() for key in await client.keys("r:*")} == {f"r:{name}" for name in ids}
    await client.aclose()
    assert {request.headers["idempotency-key"] for request in http_double.requests} == ids
    assert {json.loads(line)["id"] for line in (tmp_path / "results.jsonl").read_text().splitlines()} == ids
    assert sum(run.outbox.statistics().sinks[section].error_count for section in run.outbox.statistics().sinks) > 0


class ToHttp(Known):
    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        return CollectResult(http=[HttpPayload(data="task"), HttpPayload(data="task")])

    async def on_message_complete(self, group: MessageGroup) -> CollectResult:
        return CollectResult(http=[HttpPayload(data="message"), HttpPayload(data="own", idempotency_key="mine")])

    async def on_window_complete(self, results: Any, messages: Any) -> CollectResult:
        return CollectResult(http=[HttpPayload(data="window")])


async def test_requests_have_the_same_keys_when_the_same_messages_are_reprocessed(http_double: HttpDouble) -> None:
    async def keys(**config: Any) -> Counter[str]:
        http_double.requests.clear()
        sinks = {"http": {"api": {"url": f"http://127.0.0.1:{http_double.port}/"}}}
        # One message per window: which messages share a window is up to their arrival.
        run = Run(ToHttp(), 6, sinks=sinks, executor={"window_size": 1}, **config)
        await run.to_end()
        return Counter(request.headers["idempotency-key"] for request in http_double.requests)

    first = await keys()
    assert first.pop("mine") == 6
    assert len(first) == 6 * 4
    assert set(first.values()) == {1}
    again = await keys()
    assert again.pop("mine") == 6
    assert again == first
    other = await keys(kafka={"consumer_group": "others"})
    assert set(other) & set(first) == set()


async def test_a_sink_that_is_down_at_the_start_is_named_and_the_others_are_closed(
    postgres: PostgresServer, database: str
) -> None:
    run = Run(
        ToPostgres(),
        10,
        sinks={
            "postgres": {"db": {"dsn": postgres.tcp_url(database)}},
            "redis": {"cache": {"url": f"redis://:hunter2@127.0.0.1:{free_port()}/"}},
        },
    )
    summary = await run.to_end()
    assert summary.reason is StopReason.FAILED
    assert "sinks.redis.cache: redis://***@" in (summary.error or "")
    assert "hunter2" not in (summary.error or "")
    connection = await asyncpg.connect(postgres.url(database))
    own = await connection.fetchval("SELECT count(*) FROM pg_stat_activity WHERE datname = $1", database)
    await connection.close()
    assert own == 1
    assert run.outbox.name_sinks()["postgres.db"].pool is None


async def test_a_handler_gets_its_sinks_by_type_and_name(tmp_path: Path) -> None:
    found: list[SinksByName] = []

    class Ready(Known):
        async def on_ready(self, config: Settings, sinks: SinksByName) -> None:
            found.append(sinks)

    await Run(Ready(), 10, sinks={"filesystem": {"log": {"base_path": str(tmp_path)}}}).to_end()
    (sinks,) = found
    assert list(sinks) == ["filesystem.log"]
    assert sinks.get("postgres.main") is None
    with pytest.raises(SinkNotConfiguredError, match=r"sinks\.postgres\.main is not configured.*filesystem\.log"):
        sinks["postgres.main"]
