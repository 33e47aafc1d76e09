"""The Redis sink against a real server."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pydantic
import pytest
from redis import asyncio as aioredis
from tests.faults import FaultyProxy
from tests.sinks.servers import ValkeyServer

from tidemill.config.sections.sink_settings import RedisSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks.base import Sink
from tidemill.sinks.payloads import RedisPayload
from tidemill.sinks.redis import RedisSink
from tidemill.testing.contract import NASTY, JsonSinkContract, Outage, deliver, deliver_at_last


def make_sink(port: int, who: str = "", **options: Any) -> RedisSink:
    return RedisSink("cache", RedisSinkSettings(url=f"redis://{who}127.0.0.1:{port}/0", **options))


class TestRedisContract(JsonSinkContract):
    secret = "hunter2"

    @pytest.fixture(autouse=True)
    async def _server(self, valkey: ValkeyServer, proxy: Callable[[int], FaultyProxy]) -> AsyncIterator[None]:
        self.between = proxy(valkey.port)
        self.client = aioredis.Redis(port=valkey.port)
        await self.client.flushall()
        await self.client.set("p:text", "x")
        yield
        await self.client.aclose()

    def make(self) -> Sink:
        return make_sink(self.between.port, "app:hunter2@", key_prefix="p:", scripts={"echo": "return ARGV[1]"})

    def make_unusable(self) -> Sink:
        return make_sink(self.between.port, "nobody:hunter2@")

    def payload(self, data: Any, key: str = "k") -> Any:
        return RedisPayload(key="list" if key == "k" else key, data=data, op="push")

    def bad_payload(self) -> Any:
        return RedisPayload(key="k", data="x", op="incrby")

    def refused_payload(self) -> Any:
        return RedisPayload(key="text", data=1, op="push")

    def outage(self) -> Outage:
        return self.between

    def nasty_payloads(self) -> Sequence[Any]:
        made: list[Any] = []
        for number, value in enumerate(NASTY):
            forms: list[tuple[Any, Any]] = [
                *((op, value) for op in ("set", "incrby", "incrbyfloat", "hdel", "sadd", "srem", "zrem", "ltrim")),
                *((op, [value]) for op in ("hdel", "push", "sadd", "srem", "zrem", "ltrim", "script")),
                *((op, {"f": value}) for op in ("set", "hset", "stream", "zadd")),
                *((op, {value: 1}) for op in ("hset", "stream", "zadd")),
                ("ltrim", (0, value)),
            ]
            made += [
                RedisPayload(key=f"n{number}{op}", data=data, op=op, script="echo" if op == "script" else "")
                for op, data in forms
            ]
            made += [RedisPayload(key=f"n{number}", op="expire", ttl=value)]
        return [*super().nasty_payloads(), *made]

    async def received(self, count: int) -> Sequence[bytes]:
        listed = await self.client.lrange("p:list", 0, -1)
        if listed:
            return list(listed)
        keys = [f"p:k{n}" for n in range(count)]
        return [(await self.client.lrange(key, 0, -1))[0] for key in keys]


@pytest.fixture
async def client(valkey: ValkeyServer) -> AsyncIterator[aioredis.Redis]:
    made = aioredis.Redis(port=valkey.port, decode_responses=True)
    await made.flushall()
    yield made
    await made.aclose()


@pytest.fixture
async def sink(valkey: ValkeyServer, client: aioredis.Redis) -> AsyncIterator[RedisSink]:
    made = make_sink(valkey.port, key_prefix="p:")
    await made.connect()
    yield made
    await made.close()


class Level(enum.StrEnum):
    HIGH = "high"


class Item(pydantic.BaseModel):
    n: int
    level: Level = Level.HIGH
    tags: list[str] = []
    none: None = None


async def test_every_operation_does_what_it_says_below_the_prefix(sink: RedisSink, client: aioredis.Redis) -> None:
    payloads = [
        RedisPayload(key="a", data=Item(n=1)),
        RedisPayload(key="gone", data=1),
        RedisPayload(key="gone", op="delete"),
        RedisPayload(key="count", op="incrby", data=5),
        RedisPayload(key="count", op="incrby", data=-2),
        RedisPayload(key="hash", op="hset", data=Item(n=3, tags=["x"])),
        RedisPayload(key="list", op="push", data={"n": 1}),
        RedisPayload(key="list", op="push", data=[{"n": 2}, b"raw"]),
        RedisPayload(key="members", op="sadd", data=["a", "b", "a"]),
        RedisPayload(key="scores", op="zadd", data={"x": 2.5, "y": 1}),
        RedisPayload(key="log", op="stream", data={"n": 1, "text": "t"}),
        RedisPayload(key=b"\xff", data=b"\xff"),
    ]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert json.loads(await client.get("p:a")) == {"n": 1, "level": "high", "tags": [], "none": None}
    assert await client.exists("p:gone") == 0
    assert await client.get("p:count") == "3"
    assert await client.hgetall("p:hash") == {"n": "3", "level": "high", "tags": '["x"]', "none": "null"}
    assert await client.lrange("p:list", 0, -1) == ['{"n":1}', '{"n":2}', "raw"]
    assert await client.smembers("p:members") == {'"a"', '"b"'}
    assert await client.zrange("p:scores", 0, -1, withscores=True) == [("y", 1.0), ("x", 2.5)]
    assert [fields for _, fields in await client.xrange("p:log")] == [{"n": "1", "text": "t"}]
    assert await client.exists(b"p:\xff") == 1


async def test_what_was_added_is_removed_trimmed_and_ended(sink: RedisSink, client: aioredis.Redis) -> None:
    payloads = [
        RedisPayload(key="h", op="hset", data={"a": 1, "b": 2, "c": 3, "d": 4}),
        RedisPayload(key="h", op="hdel", data="a"),
        RedisPayload(key="h", op="hdel", data=["b", b"c", "none"], ttl=100),
        RedisPayload(key="s", op="sadd", data=["a", {"n": 1}, b"raw"]),
        RedisPayload(key="s", op="srem", data=["a", {"n": 1}]),
        RedisPayload(key="z", op="zadd", data={"x": 1, "y": 2, "z": 3}),
        RedisPayload(key="z", op="zrem", data="x"),
        RedisPayload(key="z", op="zrem", data=(b"y",)),
        RedisPayload(key="l", op="push", data=[1, 2, 3, 4]),
        RedisPayload(key="l", op="ltrim", data=[-2, -1]),
        RedisPayload(key="f", op="incrbyfloat", data=1.5),
        RedisPayload(key="f", op="incrbyfloat", data=-1),
        RedisPayload(key="z", op="expire", ttl=100),
        RedisPayload(key="nothing", op="expire", ttl=100),
    ]
    for times in (1, 2):
        assert list(await deliver(sink, payloads)) == [None] * len(payloads)
        assert await client.hgetall("p:h") == {"d": "4"}
        assert await client.smembers("p:s") == {"raw"}
        assert await client.zrange("p:z", 0, -1) == ["z"]
        assert await client.lrange("p:l", 0, -1) == ["3", "4"], "kept to its length"
        assert float(await client.get("p:f")) == 0.5 * times
        for key in ("p:h", "p:z"):
            assert 0 < await client.ttl(key) <= 100
    assert await client.exists("p:nothing") == 0


async def test_a_script_of_the_configuration_runs_for_its_key_and_fails_alone(
    valkey: ValkeyServer, client: aioredis.Redis
) -> None:
    scripts = {
        "highest": "local old = tonumber(redis.call('GET', KEYS[1]) or '-inf') "
        "if tonumber(ARGV[1]) > old then redis.call('SET', KEYS[1], ARGV[1]) end",
        "all": "redis.call('RPUSH', KEYS[1], #ARGV, unpack(ARGV))",
        "broken": "redis.call('SET', KEYS[1], 'begun') error('no luck')",
        "not lua": "this is not Lua",
    }
    sink = make_sink(valkey.port, key_prefix="p:", scripts=scripts)
    await sink.connect()

    def script(name: str, key: str, data: Any = None) -> RedisPayload:
        return RedisPayload(key=key, op="script", script=name, data=data)

    payloads = [
        *(script("highest", "top", [n]) for n in (3, 9, 5)),
        script("all", "args", ["text", b"\xff", 1, 1.5, None, {"n": [1]}]),
        script("broken", "half"),
        RedisPayload(key="after", data=1),
        script("broken", "half", []),
    ]
    answers = await deliver(sink, payloads)
    assert [n for n, answer in enumerate(answers) if answer is not None] == [4, 6]
    assert answers[4] is not None
    assert not answers[4].retryable
    assert "script p:half: " in answers[4].error
    assert "no luck" in answers[4].error
    assert (await client.get("p:top"), await client.get("p:half"), await client.get("p:after")) == ("9", "begun", "1")
    raw = aioredis.Redis(port=valkey.port)
    assert await raw.lrange("p:args", 0, -1) == [b"6", b"text", b"\xff", b"1", b"1.5", b"null", b'{"n":[1]}']
    await raw.aclose()
    (answer,) = await deliver(sink, [script("not lua", "x")])
    assert answer is not None
    assert not answer.retryable
    await sink.close()


async def test_payloads_of_one_key_are_in_order_whatever_they_do(sink: RedisSink) -> None:
    operations: list[tuple[Any, Any]] = [("push", 1), ("ltrim", (0, 0)), ("srem", "a"), ("zrem", "a"), ("hdel", "a")]
    keys = {sink.encode(RedisPayload(key="k", op=op, data=data)).key for op, data in operations}
    assert keys == {b"p:k", sink.encode(RedisPayload(key="k", op="expire", ttl=1)).key}


async def test_a_ttl_goes_with_as_many_arguments_as_lua_takes(sink: RedisSink, client: aioredis.Redis) -> None:
    many = list(range(7_000))
    assert list(await deliver(sink, [RedisPayload(key="l", op="push", data=many, ttl=100)])) == [None]
    assert await client.llen("p:l") == 7_000
    with pytest.raises(ValueError, match="7001 arguments are too many"):
        sink.encode(RedisPayload(key="l", op="push", data=[*many, 1], ttl=100))


def test_every_argument_of_a_command_is_bytes() -> None:
    sink = make_sink(1, scripts={"s": "return 1"})
    data: list[tuple[Any, Any]] = [
        ("set", 1),
        ("delete", None),
        ("incrby", 1),
        ("incrbyfloat", 1),
        ("hset", {"a": 1.5, "b": "x", "c": None, "d": Level.HIGH}),
        ("hdel", "a"),
        ("push", [1, "x"]),
        ("ltrim", (0, 1)),
        ("sadd", "x"),
        ("srem", "x"),
        ("zadd", {"x": 1, b"y": 2}),
        ("zrem", "x"),
        ("stream", {"a": 1}),
        ("script", [1, "x", 1.5]),
    ]
    for op, value in data:
        for ttl in (None,) if op in ("delete", "script") else (None, 5):
            payload = RedisPayload(key="k", op=op, data=value, ttl=ttl, script="s" if op == "script" else "")
            encoded = sink.encode(payload)
            assert all(type(each) is bytes for each in encoded.body), payload
            assert encoded.size_bytes == sum(map(len, encoded.body))


async def test_a_ttl_ends_the_key_whatever_the_operation_and_never_one_of_another_kind(
    sink: RedisSink, client: aioredis.Redis
) -> None:
    await client.set("p:text", "stays")
    payloads = [
        RedisPayload(key="a", data=1, ttl=100),
        RedisPayload(key="h", op="hset", data={"x": 1}, ttl=0.5),
        RedisPayload(key="n", op="incrby", data=1, ttl=100),
        RedisPayload(key="s", op="stream", data={"x": 1}, ttl=100),
        RedisPayload(key="text", op="push", data=1, ttl=100),
    ]
    answers = await deliver(sink, payloads)
    assert [answer is None for answer in answers] == [True, True, True, True, False]
    assert "RPUSH p:text: " in str(answers[4])
    assert "WRONGTYPE" in str(answers[4])
    for key, most in (("a", 100_000), ("h", 500), ("n", 100_000), ("s", 100_000)):
        assert 0 < await client.pttl(f"p:{key}") <= most
    assert await client.pttl("p:text") == -1


async def test_what_redis_carried_out_behind_a_refused_command_of_the_key_is_confirmed(
    sink: RedisSink, client: aioredis.Redis
) -> None:
    await client.set("p:text", "old")
    answers = await deliver(sink, [RedisPayload(key="text", op="push", data=1), RedisPayload(key="text", data="new")])
    assert answers[0] is not None
    assert not answers[0].retryable
    assert answers[1] is None, "a transaction of Redis goes on behind a command that fails in it"
    assert await client.get("p:text") == '"new"'


@pytest.mark.parametrize(
    "payload",
    [
        RedisPayload(key="", data=1),
        RedisPayload(key=5, data=1),  # type: ignore[arg-type]
        RedisPayload(key="k", data=1, op="flushall"),  # type: ignore[arg-type]
        RedisPayload(key="k", data=1, op="delete"),
        RedisPayload(key="k", op="delete", ttl=5),
        RedisPayload(key="k", data=1, ttl=0),
        RedisPayload(key="k", data=1, ttl=True),
        RedisPayload(key="k", data=1.5, op="incrby"),
        RedisPayload(key="k", data=True, op="incrby"),
        RedisPayload(key="k", data=[1], op="hset"),
        RedisPayload(key="k", data={}, op="hset"),
        RedisPayload(key="k", data=[], op="sadd"),
        RedisPayload(key="k", data=["a"], op="zadd"),
        RedisPayload(key="k", data={"a": "x"}, op="zadd"),
        RedisPayload(key="k", data={"a": float("nan")}, op="zadd"),
        RedisPayload(key="k", data={1: 1}, op="zadd"),
        RedisPayload(key="k", data={"a": object()}, op="stream"),
        RedisPayload(key="\ud800", data=1),
        RedisPayload(key="k", data={"\ud800": 1}, op="hset"),
        RedisPayload(key="k", data={"a": "\ud800"}, op="stream"),
        RedisPayload(key="k", data={"\ud800": 1}, op="zadd"),
        RedisPayload(key="k", data=1 << 63, op="incrby"),
        RedisPayload(key="k", data=float("inf"), op="incrbyfloat"),
        RedisPayload(key="k", data="1", op="incrbyfloat"),
        RedisPayload(key="k", data=[], op="hdel"),
        RedisPayload(key="k", data=[1], op="hdel"),
        RedisPayload(key="k", data={"a": 1}, op="zrem"),
        RedisPayload(key="k", data=[0], op="ltrim"),
        RedisPayload(key="k", data=[0, 1.5], op="ltrim"),
        RedisPayload(key="k", data=None, op="ltrim"),
        RedisPayload(key="k", op="expire"),
        RedisPayload(key="k", data=1, op="expire", ttl=1),
        RedisPayload(key="k", op="script"),
        RedisPayload(key="k", op="script", script="none"),
        RedisPayload(key="k", data=1, script="s"),
    ],
)
def test_what_is_not_a_command_is_refused_before_it_is_sent(payload: RedisPayload) -> None:
    with pytest.raises((TypeError, ValueError)):
        make_sink(1).encode(payload)


async def test_failures_are_those_of_their_payloads_and_all_others_are_carried_out_once(
    sink: RedisSink, client: aioredis.Redis
) -> None:
    await client.set("p:text", "x")
    payloads = [RedisPayload(key="text" if n % 7 == 3 else f"n{n}", op="incrby", data=1) for n in range(100)]
    answers = await deliver(sink, payloads)
    assert {n for n, answer in enumerate(answers) if answer is not None} == {n for n in range(100) if n % 7 == 3}
    assert all(answer is None or not answer.retryable for answer in answers)
    assert {await client.get(f"p:n{n}") for n in range(100) if n % 7 != 3} == {"1"}


async def test_a_command_that_this_user_may_not_use_is_refused_and_the_others_are_carried_out_once(
    valkey: ValkeyServer, client: aioredis.Redis
) -> None:
    await client.execute_command("ACL", "SETUSER", "weak", "on", ">w", "~p:*", "+@all", "-incrby")
    sink = make_sink(valkey.port, "weak:w@", key_prefix="")
    await sink.connect()
    payloads = [
        RedisPayload(key="p:n", op="push", data=1),
        RedisPayload(key="p:c", op="incrby", data=1),
        RedisPayload(key="other", data=1),
        RedisPayload(key="p:c", data="waits"),
        RedisPayload(key="p:n", op="push", data=2),
    ]
    answers = await deliver(sink, payloads)
    assert [answer is None for answer in answers] == [True, False, False, False, True]
    assert [answer.retryable for answer in answers if answer is not None] == [False, False, True]
    assert await client.lrange("p:n", 0, -1) == ["1", "2"]
    await sink.close()


async def test_keys_that_are_only_set_go_together_and_in_order_with_what_is_between_them(
    sink: RedisSink, client: aioredis.Redis
) -> None:
    before = (await client.info("commandstats")).get("cmdstat_mset", {}).get("calls", 0)
    payloads = [
        *(RedisPayload(key=key, data=n) for n, key in enumerate("abcab")),
        RedisPayload(key="a", op="incrby", data=10),
        RedisPayload(key="b", data=20, ttl=100),
        RedisPayload(key="c", data=30),
        RedisPayload(key="c", data=31),
    ]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert [await client.get(f"p:{key}") for key in "abc"] == ["13", "20", "31"]
    assert (await client.info("commandstats"))["cmdstat_mset"]["calls"] == before + 2


@pytest.mark.parametrize("rule", ["-mset", "resetkeys ~p:*"])
async def test_where_several_keys_may_not_be_set_at_once_each_is_judged_alone(
    valkey: ValkeyServer, client: aioredis.Redis, rule: str
) -> None:
    await client.execute_command("ACL", "SETUSER", "few", "reset", "on", ">w", "~*", "+@all", *rule.split())
    sink = make_sink(valkey.port, "few:w@", key_prefix="")
    await sink.connect()
    payloads = [RedisPayload(key=key, data=n) for n, key in enumerate(["p:a", "other", "p:b", "p:a"])]
    for _ in range(2):
        answers = await deliver(sink, payloads)
        refused = [n for n, answer in enumerate(answers) if answer is not None and not answer.retryable]
        assert refused == ([] if rule == "-mset" else [1])
        assert [await client.get(key) for key in ("p:a", "p:b")] == ["3", "2"]
    await sink.close()


async def test_a_server_without_memory_leaves_nothing_of_a_batch_and_it_is_retried(
    sink: RedisSink, client: aioredis.Redis
) -> None:
    payloads = [RedisPayload(key="d", op="delete"), RedisPayload(key="n", op="incrby", data=1)]
    await client.set("p:d", "x")
    await client.config_set("maxmemory", "1")
    try:
        with pytest.raises(RemoteError, match=r"OutOfMemory|OOM") as caught:
            await deliver(sink, payloads)
        assert caught.value.retryable
        assert await client.exists("p:d") == 1
    finally:
        await client.config_set("maxmemory", "0")
    assert list(await deliver(sink, payloads)) == [None, None]
    assert await client.get("p:n") == "1"


async def test_a_server_that_is_a_replica_or_busy_is_retried(sink: RedisSink, client: aioredis.Redis) -> None:
    payloads = [RedisPayload(key="n", op="incrby", data=1)]
    await client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
    try:
        with pytest.raises(RemoteError) as caught:
            await deliver(sink, payloads)
        assert caught.value.retryable
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")
    assert list(await deliver(sink, payloads)) == [None]
    assert await client.get("p:n") == "1"


async def test_a_server_that_is_killed_and_started_again_is_used_again() -> None:
    server = ValkeyServer()
    sink = make_sink(server.port)
    try:
        await sink.connect()
        assert list(await deliver(sink, [RedisPayload(key="k", data=1)])) == [None]
        await asyncio.to_thread(server.kill)
        with pytest.raises(RemoteError, match=r"sinks\.redis\.cache") as caught:
            await deliver(sink, [RedisPayload(key="k", data=2)])
        assert caught.value.retryable
        await asyncio.to_thread(server.start)
        await deliver_at_last(sink, [RedisPayload(key="k", data=3)])
    finally:
        await sink.close()
        await asyncio.to_thread(server.kill)
    with pytest.raises(RemoteError, match="not connected"):
        await deliver(sink, [RedisPayload(key="k", data=1)])


async def test_no_server_and_a_wrong_password_are_told_without_the_password(valkey: ValkeyServer) -> None:
    for port, who, kind in ((valkey.port, "app:hunter3@", ConfigError), (free_port(), "app:hunter3@", RemoteError)):
        with pytest.raises(kind, match=r"sinks\.redis\.cache: redis://\*\*\*@") as caught:
            await make_sink(port, who).connect()
        assert "hunter3" not in str(caught.value)
    with pytest.raises(ConfigError, match="url"):
        await RedisSink("cache", RedisSinkSettings(url="redis://127.0.0.1/0?socket_timeout=soon")).connect()
