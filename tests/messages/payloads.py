"""What hooks can return that is wrong, whose messages are collected."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

from tidemill.sinks.payloads import (
    CollectResult,
    FilePayload,
    HttpPayload,
    KafkaPayload,
    MongoPayload,
    PostgresPayload,
    RedisPayload,
)

#: The sinks that refuse the payloads, as their sections.
SINKS: dict[str, Any] = {
    "kafka": {"out": {"topic": "results"}},
    "filesystem": {"files": {"base_path": "out"}},
    "postgres": {
        "db": {
            "dsn": "postgresql://app:hunter2@127.0.0.1:1/db",
            "statements": {"count": {"sql": "UPDATE t SET n = $1", "parameters": ["n"]}},
        }
    },
    "mongo": {"docs": {"uri": "mongodb://127.0.0.1:1/?serverSelectionTimeoutMS=200", "database": "d"}},
    "http": {"api": {"url": "http://127.0.0.1:1/items?a=1"}},
    "redis": {"cache": {"url": "redis://127.0.0.1:1/0", "scripts": {"twice": "return 2"}}},
}

NUL, SURROGATE = "a\0b", "a\ud800b"

#: By the type of the sink.
PAYLOADS: dict[str, tuple[Any, ...]] = {
    "kafka": (
        KafkaPayload(data=object()),
        KafkaPayload(data={1: object()}),
        KafkaPayload(key=5, data="x"),  # type: ignore[arg-type]
        KafkaPayload(data="x", headers={"": "x"}),
        KafkaPayload(data="x", headers=["ab"]),  # type: ignore[list-item]
        KafkaPayload(data="x", headers={"n": 5}),  # type: ignore[dict-item]
        KafkaPayload(data="x", partition=-1),
        KafkaPayload(data="x", timestamp=datetime.datetime(2026, 5, 1)),
        KafkaPayload(data="x", timestamp=-5),
    ),
    "filesystem": (
        FilePayload(path="", data="x"),
        FilePayload(path="/etc/passwd", data="x"),
        FilePayload(path="../x", data="x"),
        FilePayload(path=NUL, data="x"),
        FilePayload(path=Path("x"), data="x"),  # type: ignore[arg-type]
        FilePayload(path="x", data=b"a\nb"),
        FilePayload(path="x", data="x", op="write"),  # type: ignore[arg-type]
    ),
    "postgres": (
        PostgresPayload(),
        PostgresPayload(table="items; DROP TABLE items", data={"n": 1}),
        PostgresPayload(table="items", data={}),
        PostgresPayload(table="items", data="text"),
        PostgresPayload(table="items", data=b"[1]"),
        PostgresPayload(table="items", data={"no column": 1}),
        PostgresPayload(table="items", data={"n": NUL}),
        PostgresPayload(table="items", data={"n": SURROGATE}),
        PostgresPayload(table="items", data={"n": object()}),
        PostgresPayload(table="items", data={"n": 1}, op="replace"),  # type: ignore[arg-type]
        PostgresPayload(table="items", data={"n": 1}, op="upsert"),
        PostgresPayload(table="items", data={"n": 1}, op="update"),
        PostgresPayload(table="items", data={"n": 1}, op="delete"),
        PostgresPayload(table="items", op="delete", where={}),
        PostgresPayload(table="items", data={"n": 1}, where={"n": 1}),
        PostgresPayload(table="items", data={"n": 1}, conflict=5),  # type: ignore[arg-type]
        PostgresPayload(table="items", data={"n": 1}, op="upsert", conflict="k"),
        PostgresPayload(statement="cuont", data={"n": 1}),
        PostgresPayload(statement="count", data={"m": 1}),
        PostgresPayload(statement="count", table="items", data={"n": 1}),
    ),
    "mongo": (
        MongoPayload(data={"n": 1}),
        MongoPayload(collection="a$b", data={"n": 1}),
        MongoPayload(collection="items", data={"n": object()}),
        MongoPayload(collection="items", data="text"),
        MongoPayload(collection="items", data={"n": 1}, filter={"n": 1}),
        MongoPayload(collection="items", data={"n": 1}, op="upsert"),
        MongoPayload(collection="items", op="delete", filter={}),
        MongoPayload(collection="items", data={"n": 1}, op="delete", filter={"n": 1}),
        MongoPayload(collection="items", data={"$set": {"n": 1}, "m": 2}, op="update", filter={"n": 1}),
        MongoPayload(collection="items", data={"$set": {"n": 1}}, op="replace", filter={"n": 1}),
        MongoPayload(collection="items", data={}, op="update", filter={"n": 1}),
        MongoPayload(collection="items", data={"n": 1}, op="merge"),  # type: ignore[arg-type]
    ),
    "http": (
        HttpPayload(data={"n": object()}),
        HttpPayload(data={"rates": [1.5, float("inf")]}),
        HttpPayload(data={"n": 1}, method="FETCH"),
        HttpPayload(data={"n": 1}, method="GET"),
        HttpPayload(data={"n": 1}, path="../x"),
        HttpPayload(data={"n": 1}, path="x" * 9_000),
        HttpPayload(data={"n": 1}, query={"a": 2}),
        HttpPayload(data={"n": 1}, query={"b": object()}),
        HttpPayload(data={"n": 1}, query={"b": float("nan")}),
        HttpPayload(data={"n": 1}, headers={"Host": "x"}),
        HttpPayload(data={"n": 1}, headers={"a b": "x"}),
        HttpPayload(data={"n": 1}, headers={"A": "1", "a": "2"}),
        HttpPayload(data={"n": 1}, headers={"a": "x\ny"}),
        HttpPayload(data={"n": 1}, body="xml"),  # type: ignore[arg-type]
        HttpPayload(data={"n": 1}, idempotency_key="a b"),
        HttpPayload(data={"n": SURROGATE}),
    ),
    "redis": (
        RedisPayload(data="x"),
        RedisPayload(key="k", data=object()),
        RedisPayload(key="k", data="x", op="append"),  # type: ignore[arg-type]
        RedisPayload(key="k", data="x", ttl=0),
        RedisPayload(key="k", data="x", op="delete"),
        RedisPayload(key="k", op="delete", ttl=5),
        RedisPayload(key="k", op="expire"),
        RedisPayload(key="k", data="x", op="incrby"),
        RedisPayload(key="k", data=2**70, op="incrby"),
        RedisPayload(key="k", data="x", op="incrbyfloat"),
        RedisPayload(key="k", data=float("inf"), op="incrbyfloat"),
        RedisPayload(key="k", data={}, op="hset"),
        RedisPayload(key="k", data=[], op="push"),
        RedisPayload(key="k", data=[object()], op="sadd"),
        RedisPayload(key="k", data=["a"], op="zadd"),
        RedisPayload(key="k", data={"a": "b"}, op="zadd"),
        RedisPayload(key="k", data=[1], op="ltrim"),
        RedisPayload(key="k", data=["a"], op="script"),
        RedisPayload(key="k", data=["a"], op="script", script="thrice"),
        RedisPayload(key="k", data="a", op="script", script="twice"),
        RedisPayload(key="k", data=["a"], op="script", script="twice", ttl=5),
        RedisPayload(key="k", data="x", script="twice"),
    ),
}

#: What hooks can return instead of tasks.
TASKS: tuple[Any, ...] = (
    None,
    "task",
    [1],
)

#: Fields of tasks that are refused when the task is created.
TASK_FIELDS: tuple[dict[str, Any], ...] = (
    {"task_id": 5},
    {"args": "-v"},
    {"args": [1]},
    {"source_offsets": ["1"]},
    {"binary_path": Path("x")},
    {"stdin": {"a": 1}},
    {"timeout_seconds": "5"},
    {"timeout_seconds": 0},
    {"env": {"A": 1}},
    {"labels": ["a"]},
    {"precomputed": "x"},
    {"parent_task_id": 5},
)

ACTIONS: tuple[Any, ...] = (None, "ignore", 5, [5])

#: What hooks can return instead of a result, or inside of one.
RESULTS: tuple[Any, ...] = (
    {"kafka": []},
    CollectResult(kafka="x"),  # type: ignore[arg-type]
    CollectResult(kafka=[{"data": 1}]),  # type: ignore[list-item]
    CollectResult(kafka=[KafkaPayload(sink="other", data=1)]),
    CollectResult(redis=[RedisPayload(key="k")]),
    CollectResult(files=[FilePayload(path="x")]),
    CollectResult(kafka=[KafkaPayload(sink=5, data=1)]),  # type: ignore[arg-type]
)
