"""The MongoDB sink against a real server, and against one that follows a script."""

from __future__ import annotations

import datetime
import decimal
import enum
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import bson
import pydantic
import pytest
from pymongo.asynchronous.collection import AsyncCollection
from pymongo.asynchronous.mongo_client import AsyncMongoClient
from tests.faults import FaultyProxy
from tests.sinks.servers import MongoDouble, MongoServer

from tidemill.config.sections.sink_settings import MongoSinkSettings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.embedded.broker import free_port
from tidemill.sinks.base import Sink
from tidemill.sinks.mongo import MongoSink
from tidemill.sinks.payloads import MongoPayload
from tidemill.testing.contract import NASTY, Outage, SinkContract, deliver

QUICK = "serverSelectionTimeoutMS=1000"


def make_sink(port: int, database: str = "db", options: str = QUICK, who: str = "") -> MongoSink:
    return MongoSink("docs", MongoSinkSettings(uri=f"mongodb://{who}127.0.0.1:{port}/?{options}", database=database))


class TestMongoContract(SinkContract):
    secret = "hunter2"

    @pytest.fixture(autouse=True)
    async def _server(self, mongo: MongoServer, proxy: Callable[[int], FaultyProxy]) -> AsyncIterator[None]:
        self.between = proxy(mongo.port)
        self.database = f"d{uuid.uuid4().hex}"
        self.client: AsyncMongoClient[Any] = AsyncMongoClient(port=mongo.port)
        await self.client[self.database].items.create_index("only", unique=True, sparse=True)
        await self.client[self.database].items.insert_one({"_id": "there", "only": 1})
        yield
        await self.client.close()

    def make(self) -> Sink:
        return make_sink(self.between.port, self.database)

    def make_unusable(self) -> Sink:
        return make_sink(free_port(), self.database, "serverSelectionTimeoutMS=200", "app:hunter2@")

    def payload(self, data: Any, key: str = "k") -> Any:
        if isinstance(data, dict) and "note" in data and data["note"].startswith("x") and len(data["note"]) != 3:
            # Inserts have no key: nothing but their own document is concerned.
            return MongoPayload(collection="items", op="upsert", data=data, filter={"_id": key})
        return MongoPayload(collection="items", data=data)

    def bad_payload(self) -> Any:
        return MongoPayload(collection="items", op="delete", filter={})

    def refused_payload(self) -> Any:
        return MongoPayload(collection="items", data={"only": 1})

    def nasty_payloads(self) -> Sequence[Any]:
        found = [MongoPayload("", "items", {"b": 1}, "update", {"a": value}) for value in NASTY]
        named = [MongoPayload("", "items", {"b": 1}, "upsert", {name: 1}) for name in NASTY if isinstance(name, str)]
        both = [MongoPayload("", "items", {"a": NASTY[2]}, op, {"b": NASTY[2]}) for op in ("update", "replace")]
        return [*super().nasty_payloads(), *found, *named, *both]

    def outage(self) -> Outage:
        return self.between

    async def received(self, count: int) -> Sequence[Mapping[str, Any]]:
        found = await self.client[self.database].items.find({"n": {"$exists": True}}).to_list()
        return [{name: value for name, value in each.items() if name != "_id"} for each in found]


@pytest.fixture
async def items(mongo: MongoServer) -> AsyncIterator[AsyncCollection[Any]]:
    client: AsyncMongoClient[Any] = AsyncMongoClient(port=mongo.port, tz_aware=True, uuidRepresentation="standard")
    yield client[f"d{uuid.uuid4().hex}"].items
    await client.close()


@pytest.fixture
async def sink(mongo: MongoServer, items: AsyncCollection[Any]) -> AsyncIterator[MongoSink]:
    made = make_sink(mongo.port, items.database.name)
    await made.connect()
    yield made
    await made.close()


def doc(id: Any, **fields: Any) -> MongoPayload:
    return MongoPayload(collection="items", data={"_id": id, **fields})


def change(op: Any, id: Any, data: Any = None) -> MongoPayload:
    return MongoPayload(collection="items", op=op, filter={"_id": id}, data=data)


async def test_every_operation_writes_one_document_in_order(sink: MongoSink, items: AsyncCollection[Any]) -> None:
    payloads = [
        doc(1, n=1),
        doc(2, n=2),
        change("upsert", 3, {"n": 3}),
        change("update", 1, {"n": 10, "more": True}),
        change("upsert", 3, {"$inc": {"n": 1}}),
        change("update", 99, {"n": 1}),
        change("delete", 2),
        MongoPayload(collection="others", data={"x": 1}),
        change("update", 1, {"n": 11}),
    ]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    assert await items.find().sort("_id").to_list() == [{"_id": 1, "n": 11, "more": True}, {"_id": 3, "n": 4}]
    assert len(await items.database.others.find().to_list()) == 1


async def test_many_documents_are_changed_or_deleted_and_one_is_replaced(
    sink: MongoSink, items: AsyncCollection[Any]
) -> None:
    await items.insert_many([{"_id": n, "g": n % 2, "n": 0} for n in range(6)])

    def many(op: Any, criteria: Any, data: Any = None) -> MongoPayload:
        return MongoPayload(collection="items", op=op, filter=criteria, data=data)

    payloads = [
        many("update_many", {"g": 0}, {"n": 1}),
        many("update_many", {"g": 0}, {"$inc": {"n": 10}}),
        many("delete_many", {"_id": {"$in": [1, 3]}}),
        many("replace", {"_id": 5}, {"whole": True}),
        many("replace", {"_id": 9}, {"new": True}),
        many("update_many", {"g": 7}, {"n": 1}),
        many("delete_many", {"g": 7}),
    ]
    assert list(await deliver(sink, payloads)) == [None] * len(payloads)
    expected = [*({"_id": n, "g": 0, "n": 11} for n in (0, 2, 4)), {"_id": 5, "whole": True}, {"_id": 9, "new": True}]
    assert await items.find().sort("_id").to_list() == expected
    # As after a crash: what sets values and what deletes leaves the same, what counts counts twice.
    assert list(await deliver(sink, [payloads[2], *payloads[3:]])) == [None] * 5
    assert await items.find().sort("_id").to_list() == expected
    assert list(await deliver(sink, payloads[1:2])) == [None]
    assert (await items.find_one({"_id": 0})) == {"_id": 0, "g": 0, "n": 21}


async def test_payloads_of_the_same_filter_wait_for_one_that_is_refused_whatever_they_do(
    double: Callable[..., MongoDouble],
) -> None:
    server = double(wrong(0, 14))
    same = {"g": {"$gt": 1}}
    writes = [
        MongoPayload("", "items", {"n": 1}, "update_many", same),
        MongoPayload("", "items", None, "delete_many", same),
        MongoPayload("", "items", None, "delete_many", {"g": 0}),
    ]
    answers = await sent(server, writes)
    assert [None if answer is None else answer.retryable for answer in answers] == [False, True, None]
    assert "update_many items" in answers[0].error
    assert [next(iter(command)) for command in server.commands] == ["update", "delete"]


class Color(enum.Enum):
    RED = "red"


class Part(pydantic.BaseModel):
    day: datetime.date
    color: Color


class Thing(pydantic.BaseModel):
    at: datetime.datetime
    amount: decimal.Decimal
    ref: uuid.UUID
    part: Part
    tags: set[str]
    raw: bytes


async def test_models_keep_their_types_as_far_as_bson_has_them(sink: MongoSink, items: AsyncCollection[Any]) -> None:
    now = datetime.datetime(2026, 1, 2, 3, 4, 5, 6000, datetime.UTC)
    thing = Thing(
        at=now,
        amount=decimal.Decimal("1.10"),
        ref=uuid.UUID(int=5),
        part=Part(day=datetime.date(2026, 1, 2), color=Color.RED),
        tags={"a"},
        raw=b"\xff",
    )
    assert list(await deliver(sink, [MongoPayload(collection="items", data=thing)])) == [None]
    (found,) = await items.find().to_list()
    del found["_id"]
    assert found == {
        "at": now,
        "amount": bson.Decimal128("1.10"),
        "ref": uuid.UUID(int=5),
        "part": {"day": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "color": "red"},
        "tags": ["a"],
        "raw": b"\xff",
    }


async def test_a_document_that_is_refused_is_named_and_the_others_are_written_once(
    sink: MongoSink, items: AsyncCollection[Any]
) -> None:
    await items.create_index("only", unique=True, sparse=True)
    await items.insert_one({"_id": 0, "only": 7})
    payloads = [doc(n, n=n, **({"only": 7} if n in (5, 6, 30) else {})) for n in range(1, 50)]
    payloads.append(change("update", 1, {"$inc": {"n": 100}}))
    answers = await deliver(sink, payloads)
    assert [n for n, answer in enumerate(answers, 1) if answer is not None] == [5, 6, 30]
    assert "insert items {'_id': '5'}: " in str(answers[4])
    assert all(answer is None or not answer.retryable for answer in answers)
    found = await items.find({"_id": {"$gt": 0}}).sort("_id").to_list()
    assert [each["_id"] for each in found] == [n for n in range(1, 50) if n not in (5, 6, 30)]
    assert found[0]["n"] == 101


async def test_an_insert_that_is_repeated_is_recognised_and_a_real_duplicate_is_refused(
    sink: MongoSink, items: AsyncCollection[Any]
) -> None:
    encoded = [sink.encode(MongoPayload(collection="items", data={"n": 1})), sink.encode(doc("x", n=2))]
    assert list(await sink.send(encoded)) == [None, None]
    # As after a connection that broke before the answer.
    assert list(await sink.send(encoded)) == [None, None]
    (refusal,) = await deliver(sink, [doc("x", n=3)])
    assert refusal is not None
    assert "duplicate" in refusal.error
    assert len(await items.find().to_list()) == 2


@pytest.mark.parametrize(
    "payload",
    [
        MongoPayload(collection="", data={"a": 1}),
        MongoPayload(collection="a$b", data={"a": 1}),
        MongoPayload(collection="system.users", data={"a": 1}),
        MongoPayload(collection="a.", data={"a": 1}),
        MongoPayload(collection="c", data=[1]),
        MongoPayload(collection="c", data=b"[1]"),
        MongoPayload(collection="c", data={"a": 1}, filter={"a": 1}),
        MongoPayload(collection="c", data={"a": 1}, op="drop"),  # type: ignore[arg-type]
        MongoPayload(collection="c", data={"a": 1}, op="upsert"),
        MongoPayload(collection="c", data={"a": 1}, op="update", filter={}),
        MongoPayload(collection="c", op="delete"),
        MongoPayload(collection="c", op="delete", filter=[]),  # type: ignore[arg-type]
        MongoPayload(collection="c", op="delete", filter={"$and": [{}, {"$or": [{"a": 1}, {}]}]}),
        MongoPayload(collection="c", op="delete", filter={"$comment": "all"}),
        MongoPayload(collection="c", op="delete", filter={"a": 1}, data={"b": 1}),
        MongoPayload(collection="c", op="update", filter={"a": 1}, data={}),
        MongoPayload(collection="c", op="update", filter={"a": 1}, data={"$set": {"a": 1}, "b": 2}),
        MongoPayload(collection="c", data={"a": 1 << 64}),
        MongoPayload(collection="\ud800", data={"a": 1}),
        MongoPayload(collection="c" * 255, data={"a": 1}),
        MongoPayload(collection="c", data={"a": 1}, op="delete_many", filter={"a": 1}),
        MongoPayload(collection="c", data={"$set": {"a": 1}}, op="replace", filter={"a": 1}),
        MongoPayload(collection="c", data={"a": 1}, op="replace"),
        MongoPayload(collection="c", data={"a": b"x" * 9_000_000}, op="update", filter={"a": b"x" * 9_000_000}),
        MongoPayload(collection="c", data={"a": b"x" * 9_000_000}, op="replace", filter={"a": b"x" * 9_000_000}),
        MongoPayload(collection="c", data={"a": b"x" * (16 * 1024 * 1024)}),
    ],
)
def test_what_is_not_a_write_to_one_document_is_refused_before_it_is_sent(payload: MongoPayload) -> None:
    with pytest.raises((TypeError, ValueError)):
        make_sink(1).encode(payload)


class Nothing(pydantic.BaseModel):
    """A model whose dump is empty."""


@pytest.mark.parametrize(
    "criteria",
    [
        {},
        {"$or": ({},)},
        {"$or": [Nothing()]},
        {"$and": [Nothing()]},
        {"$and": []},
        {"$or": []},
        {"$or": [{"a": 1}, {"$comment": "all"}]},
        {"$nor": [{"$nor": [{}]}]},
        {"$nor": [{"a": {"$in": []}}]},
        {"$expr": True},
        {"$jsonSchema": {}},
        {"$alwaysTrue": 1},
        {"$where": "true"},
        {"$sampleRate": 1.0},
        {"a": {"$nin": []}},
        {"a": {"$nin": ()}},
        {"_id": {"$exists": True}},
        {"_id": {"$ne": None}},
        {"_id": {"$gte": bson.MinKey()}},
        {"_id": {"$lt": bson.MaxKey()}},
        {"a": {"$not": {"$in": []}}},
        {"a": {"$not": {"$not": {"$exists": True}}}},
        {"_id": {"$not": {"$eq": None}}},
        {"$or": [{"a": {"$nin": []}}, {"b": 1}]},
        {"$comment": "x", "$and": [{"$expr": {"$eq": ["$a", 1]}}]},
    ],
    ids=repr,
)
@pytest.mark.parametrize("op", ["delete", "delete_many", "update", "update_many", "upsert", "replace"])
def test_a_filter_that_leaves_nothing_out_is_refused_however_it_is_written(op: Any, criteria: Any) -> None:
    with pytest.raises(ValueError, match="does not match every document"):
        make_sink(1).encode(MongoPayload("", "c", None if op.startswith("delete") else {"n": 1}, op, criteria))


@pytest.mark.parametrize(
    "criteria",
    [
        {"a": 1},
        {"a": None},
        {"a": {}},
        {"a": {"b": 1}},
        {"a": {"$gt": 0}},
        {"a": {"$lte": 0}},
        {"a": {"$ne": 0}},
        {"a": {"$nin": [1]}},
        {"a": {"$exists": False}},
        {"a": {"$exists": True, "$eq": 1}},
        {"a": {"$not": {"$eq": 0}}},
        {"a": {"$not": bson.Regex("^x")}},
        {"a": {"$not": {"$not": {"$eq": 0}}}},
        {"a": {"$regex": "^x", "$options": "i"}},
        {"$and": ({"a": 1},)},
        {"$and": [{}, {"a": 1}]},
        {"$or": [{"a": 1}, {"b": {"$in": (1, 2)}}]},
        {"$nor": [{"a": 1}], "b": 2},
        {"$expr": True, "b": 2},
        {"$text": {"$search": "coffee"}},
        {"at": datetime.datetime(1, 1, 1, tzinfo=datetime.UTC)},
        {"id": uuid.uuid4(), "in": {"$exists": True}},
        {"at": bson.datetime_ms.DatetimeMS(1 << 60)},
    ],
    ids=repr,
)
def test_a_filter_with_a_condition_that_leaves_something_out_is_accepted(criteria: Any) -> None:
    encoded = make_sink(1).encode(MongoPayload(collection="c", op="delete", filter=criteria))
    assert encoded.size_bytes > 5


@pytest.fixture
def double() -> Iterator[Callable[..., MongoDouble]]:
    doubles: list[MongoDouble] = []

    def start(*answers: dict[str, Any] | None) -> MongoDouble:
        left = list(answers)
        doubles.append(MongoDouble(lambda command: left.pop(0) if left else {"ok": 1, "n": 1, "nModified": 1}))
        return doubles[-1]

    yield start
    for each in doubles:
        each.close()


def wrong(index: int, code: int) -> dict[str, Any]:
    return {
        "ok": 1,
        "n": index,
        "nModified": index,
        "writeErrors": [{"index": index, "code": code, "errmsg": f"said {code}"}],
    }


async def sent(double: MongoDouble, payloads: Sequence[MongoPayload]) -> Any:
    sink = make_sink(double.port)
    await sink.connect()
    try:
        return await deliver(sink, payloads)
    except RemoteError as error:
        assert error.retryable  # noqa: PT017
        return "again"
    finally:
        await sink.close()


def ids(double: MongoDouble) -> list[list[Any]]:
    return [[each["_id"] for each in command["documents"]] for command in double.commands if "documents" in command]


async def test_only_what_comes_after_the_refused_document_is_sent_again(double: Callable[..., MongoDouble]) -> None:
    server = double(wrong(2, 121), wrong(0, 121))
    answers = await sent(server, [doc(n) for n in range(6)])
    assert [answer is None for answer in answers] == [True, True, False, False, True, True]
    assert "insert items {'_id': '2'}: said 121" in answers[2].error
    assert ids(server) == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [4, 5]]


async def test_after_a_refusal_later_writes_to_its_document_wait_for_the_decision(
    double: Callable[..., MongoDouble],
) -> None:
    server = double(wrong(0, 14))
    writes = [change("update", 1, {"n": 1}), change("update", 1, {"n": 5}), change("upsert", 2, {"n": 1})]
    answers = await sent(server, writes)
    assert [None if answer is None else answer.retryable for answer in answers] == [False, True, None]
    assert [[each["q"]["_id"] for each in command["updates"]] for command in server.commands] == [[1, 1, 2], [2]]


@pytest.mark.parametrize("code", [91, 189, 10107, 112, 50])
async def test_what_passes_keeps_what_was_written_and_leaves_the_rest_for_later(
    double: Callable[..., MongoDouble], code: int
) -> None:
    server = double(wrong(2, code))
    answers = await sent(server, [doc(n) for n in range(4)])
    assert [None if answer is None else answer.retryable for answer in answers] == [None, None, True, True]
    assert len(server.commands) == 1


async def test_a_refusal_of_the_whole_command_is_each_documents_or_tried_again(
    double: Callable[..., MongoDouble],
) -> None:
    failed = {"ok": 0, "errmsg": "said", "code": 13}
    answers = await sent(double(failed), [doc(1), doc(2)])
    assert [answer.retryable for answer in answers] == [False, False]
    assert await sent(double({**failed, "code": 91}), [doc(1), doc(2)]) == "again"
    assert await sent(double({**failed, "errorLabels": ["RetryableWriteError"]}), [doc(1)]) == "again"


async def test_a_write_that_is_not_as_safe_as_asked_for_is_retried(double: Callable[..., MongoDouble]) -> None:
    unsafe = {"ok": 1, "n": 2, "writeConcernError": {"code": 64, "errmsg": "waiting for replication timed out"}}
    assert await sent(double(unsafe), [doc(1), doc(2)]) == "again"


async def test_a_connection_that_breaks_leaves_everything_for_later(double: Callable[..., MongoDouble]) -> None:
    assert await sent(double(None), [doc(1), doc(2)]) == "again"
    one_kept = await sent(double({"ok": 1, "n": 1}, None), [doc(1), MongoPayload(collection="other", data={"a": 1})])
    assert [None if answer is None else answer.retryable for answer in one_kept] == [None, True]


async def test_a_wrong_password_writes_without_confirmation_and_a_bad_uri_are_told_at_once(
    mongo: MongoServer, double: Callable[..., MongoDouble]
) -> None:
    with pytest.raises(ConfigError, match="w=0"):
        await make_sink(mongo.port, options="w=0").connect()
    for who in ("app:hunter2@", "app:hunter2%@"):
        with pytest.raises(ConfigError, match=r"sinks\.mongo\.docs: mongodb://\*\*\*@") as caught:
            await make_sink(double().port, who=who).connect()
        assert "hunter2" not in str(caught.value)
    sink = make_sink(mongo.port)
    with pytest.raises(RemoteError, match="not connected"):
        await deliver(sink, [doc(1)])
