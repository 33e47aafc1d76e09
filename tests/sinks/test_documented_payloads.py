"""The payloads that the documentation shows are taken by real servers, and do what it says."""

from __future__ import annotations

import asyncio
import json
import typing
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import yaml
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from redis import asyncio as aioredis
from tests.docs.snippets import ROOT, blocks
from tests.sinks.servers import HttpDouble, MongoServer, ValkeyServer
from tests.store.server import PostgresServer

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.sink_settings import (
    FilesystemSinkSettings,
    HttpSinkSettings,
    KafkaSinkSettings,
    MongoSinkSettings,
    PostgresSinkSettings,
    RedisSinkSettings,
)
from tidemill.sinks.base import Sink
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.http import HttpSink
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.mongo import MongoSink
from tidemill.sinks.payloads import MongoPayload, RedisPayload
from tidemill.sinks.postgres import PostgresSink
from tidemill.sinks.redis import RedisSink
from tidemill.testing import deliver

PAGE = ROOT / "docs/how-to/deliver-to-databases-and-services.md"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """Return what the Python of the page defines."""
    names: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks(PAGE):
        if block.info == "python":
            exec(block.code, names)
    return names


async def delivered(sink: Sink, payloads: list[Any]) -> None:
    await sink.connect()
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    await sink.close()


async def test_rows_of_postgresql(shown: dict[str, Any], postgres: PostgresServer, database: str) -> None:
    connection = await asyncpg.connect(postgres.url(database))
    try:
        await connection.execute(
            "CREATE TABLE orders (id int UNIQUE, state text, items jsonb, cancelled timestamptz); CREATE SCHEMA shop;"
            "CREATE TABLE shop.totals (id int, region text, total int, UNIQUE (id, region));"
            "CREATE TABLE totals (region text PRIMARY KEY, n int)"
        )
        section = yaml.safe_load(
            next(block.code for block in blocks(PAGE) if "postgres:" in block.code and block.info == "yaml")
        )
        options = {**section["sinks"]["postgres"]["orders"], "dsn": postgres.url(database), "pool_min": 1}
        sink = PostgresSink("db", PostgresSinkSettings(**options))
        await delivered(sink, shown["rows"])
        assert await connection.fetchval("SELECT n FROM totals WHERE region = 'north'") == 1
        (order,) = await connection.fetch("SELECT state, items FROM orders")
        assert (order["state"], json.loads(order["items"])) == ("paid", ["cup", "saucer"])
        assert await connection.fetchval("SELECT total FROM shop.totals") == 7
    finally:
        await connection.close()


async def test_the_table_that_on_ready_makes_is_the_one_that_the_first_handler_fills(
    shown: dict[str, Any], postgres: PostgresServer, database: str
) -> None:
    sink = PostgresSink("db", PostgresSinkSettings(dsn=postgres.url(database), pool_min=1))
    await sink.connect()
    for _ in range(2):  # another engine, another start
        await shown["Orders"]().on_ready(None, {"postgres.orders": sink})
    assert list(await deliver(sink, shown["run"].payloads["postgres.orders"])) == [None]
    assert await sink.pool.fetchval("SELECT total FROM orders WHERE id = 1") == 7
    await sink.close()


async def test_documents_of_mongodb(shown: dict[str, Any], mongo: MongoServer) -> None:
    async with AsyncMongoClient[dict[str, Any]](port=mongo.port) as client:
        there = client["documented"]
        await there.carts.insert_one({"order": 1})
        await there.lines.insert_many([{"order": 1}, {"order": 1}, {"order": 2}])
        await there.holds.insert_many([{"order": 1}, {"order": 1}, {"order": 2}])
        settings = MongoSinkSettings(uri=f"mongodb://127.0.0.1:{mongo.port}", database="documented")
        await delivered(MongoSink("db", settings), shown["documents"])
        assert await there.orders.find().to_list() == [{"_id": 1, "state": "paid"}]
        assert [each["orders"] for each in await there.totals.find({"region": "north"}).to_list()] == [1]
        assert await there.carts.count_documents({}) == 0
        assert await there.lines.count_documents({"state": "paid"}) == 2
        assert await there.holds.count_documents({}) == 1
        assert await there.latest.find().to_list() == [{"_id": "north", "order": 1, "state": "paid"}]
        known = typing.get_args(typing.get_type_hints(MongoPayload)["op"])
        assert {document.op for document in shown["documents"]} == set(known)


async def test_requests(shown: dict[str, Any], http_double: HttpDouble) -> None:
    sink = HttpSink("api", HttpSinkSettings(url=f"http://127.0.0.1:{http_double.port}/orders"))
    await delivered(sink, shown["requests"])
    request, *others = http_double.requests
    assert (request.body, request.headers["idempotency-key"]) == (b'{"id":1,"total":7}', "order-1")
    assert [(each.method, each.path, each.body) for each in others] == [
        ("PUT", "/orders/1?notify=true", b'{"total":7}'),
        ("DELETE", "/orders/1", b""),
        ("POST", "/orders", b"customer=ada+l&item=1&item=2"),
    ]


async def test_commands_of_redis(shown: dict[str, Any], valkey: ValkeyServer) -> None:
    url = f"redis://127.0.0.1:{valkey.port}/7"
    async with aioredis.Redis.from_url(url, decode_responses=True) as client:
        await client.flushdb()
        await client.set("shop:cart:1", "full")
        await client.set("shop:session:1", "x")
        await client.hset("shop:cart:2", mapping={"cup": 1, "saucer": 2, "plate": 3})
        await client.sadd("shop:open-regions", '"south"', '"north"')
        await client.zadd("shop:waiting", {"order-1": 1, "order-2": 2})
        (section,) = [block for block in blocks(PAGE) if block.info == "yaml" and "count_once" in block.code]
        scripts = yaml.safe_load(section.code)["sinks"]["redis"]["cache"]["scripts"]
        settings = RedisSinkSettings(url=url, key_prefix="shop:", scripts=scripts)
        for _ in range(2):  # as after a crash
            await delivered(RedisSink("cache", settings), [each for each in shown["commands"] if each.op == "script"])
        await delivered(RedisSink("cache", settings), shown["commands"])
        assert await client.hget("shop:counts", "orders") == "1"
        assert await client.get("shop:revenue") == "7.5"
        assert 0 < await client.ttl("shop:session:1") <= 600
        assert await client.hgetall("shop:cart:2") == {"plate": "3"}
        assert await client.smembers("shop:open-regions") == {'"north"'}
        assert await client.zrange("shop:waiting", 0, -1) == ["order-2"]
        assert await client.get("shop:order:1") == '{"state":"paid"}'
        assert 0 < await client.ttl("shop:order:1") <= 3600
        assert await client.exists("shop:cart:1") == 0
        assert await client.hgetall("shop:order:1:fields") == {"state": "paid", "total": "7"}
        assert 0 < await client.ttl("shop:order:1:fields") <= 3600
        assert await client.smembers("shop:regions") == {'"north"', '"south"'}
        assert await client.zscore("shop:by-total", "order-1") == 7
        assert await client.get("shop:paid") == "1"
        assert await client.lrange("shop:queue", 0, -1) == ['{"order":1}']
        assert [fields for _, fields in await client.xrange("shop:log")] == [{"order": "1", "state": "paid"}]
        known = typing.get_args(typing.get_type_hints(RedisPayload)["op"])
        assert {command.op for command in shown["commands"]} == set(known)


@pytest.mark.kafka
async def test_records(shown: dict[str, Any], embedded_kafka: Any) -> None:
    topic = await asyncio.to_thread(embedded_kafka.create_topic, "documented-results")
    settings = KafkaSinkSettings(topic=topic or "documented-results")
    await delivered(KafkaSink("results", settings, KafkaSettings(brokers=embedded_kafka.bootstrap)), shown["records"])


async def test_lines_of_files(shown: dict[str, Any], tmp_path: Path) -> None:
    await delivered(FilesystemSink("log", FilesystemSinkSettings(base_path=str(tmp_path))), shown["lines"])
    assert (tmp_path / "2026/orders.jsonl").read_text() == '{"id":1,"state":"paid"}\n'
    assert (tmp_path / "2026/orders/1.png").read_bytes() == b"\x89PNG\r\n"
