"""What has no form in a sink's protocol is refused by `encode`, in whichever field it is, and takes nothing along."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from tests.sinks.servers import HttpDouble
from tests.store.server import PostgresServer

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.sink_settings import HttpSinkSettings, KafkaSinkSettings, PostgresSinkSettings
from tidemill.sinks.base import Sink
from tidemill.sinks.http import HttpSink
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.payloads import HttpPayload, KafkaPayload, PostgresPayload
from tidemill.sinks.postgres import PostgresSink
from tidemill.testing.contract import deliver

LONE = "a\ud800b"
NUL = "a\0b"
LARGE = "x" * 10_000_000


def postgres_sink(dsn: str = "postgresql://nowhere/db", **options: Any) -> PostgresSink:
    return PostgresSink("db", PostgresSinkSettings(dsn=dsn, **{"pool_min": 1, "pool_max": 2, **options}))


def kafka_sink() -> KafkaSink:
    return KafkaSink("out", KafkaSinkSettings(topic="t"), KafkaSettings())


def http_sink(port: int = 1, **options: Any) -> HttpSink:
    return HttpSink("api", HttpSinkSettings(url=f"http://127.0.0.1:{port}/in", **options))


def refused(make: Callable[[], Sink], payload: Any) -> str:
    """Return what `encode` says; a text that everything that carries it can hold."""
    with pytest.raises((TypeError, ValueError)) as caught:
        make().encode(payload)
    text = str(caught.value)
    text.encode()
    assert len(text) < 1_000
    return text


@pytest.mark.parametrize("text", [LONE, NUL], ids=["lone surrogate", "NUL"])
@pytest.mark.parametrize(
    "where",
    [
        lambda text: PostgresPayload(table=text, data={"k": 1}),
        lambda text: PostgresPayload(table="t", data={text: 1}),
        lambda text: PostgresPayload(table="t", data={"k": text}),
        lambda text: PostgresPayload(table="t", data={"k": 1}, op="upsert", conflict=text),
        lambda text: PostgresPayload(table="t", data={"k": 1}, op="upsert", conflict=[text]),
        lambda text: PostgresPayload(table="t", data={"k": 1}, op="update", where={text: 1}),
        lambda text: PostgresPayload(table="t", data={"k": 1}, op="update", where={"n": text}),
        lambda text: PostgresPayload(table="t", data={"k": 1}, op=text),
    ],
)
def test_text_that_postgresql_cannot_have_is_refused_in_each_field(
    where: Callable[[str], PostgresPayload], text: str
) -> None:
    refused(postgres_sink, where(text))


@pytest.mark.parametrize(
    "payload",
    [
        PostgresPayload(table=LARGE, data={"k": 1}),
        PostgresPayload(table="t", data={LARGE: 1}),
        PostgresPayload(table="t", data={"k": 1}, op="upsert", conflict=LARGE),
        PostgresPayload(table="t", data={"k": 1}, op=LARGE),  # type: ignore[arg-type]
    ],
)
def test_a_name_of_ten_megabytes_is_refused_with_a_short_text(payload: PostgresPayload) -> None:
    refused(postgres_sink, payload)


@pytest.mark.parametrize(
    ("payload", "field", "given"),
    [
        (PostgresPayload(table=5, data={"k": 1}), "table", "int"),  # type: ignore[arg-type]
        (PostgresPayload(table="t", data=[1]), "data", "list"),
        (PostgresPayload(table="t", data={"k": object()}), "'k'", "object"),
        (PostgresPayload(table="t", data={"k": 1}, conflict=None), "conflict", "NoneType"),  # type: ignore[arg-type]
        (PostgresPayload(table="t", data={"k": 1}, conflict=[["k"]]), "conflict", "list"),  # type: ignore[list-item]
        (PostgresPayload(table="t", data={"k": 1}, op="update", where=[1]), "where", "list"),  # type: ignore[arg-type]
        (PostgresPayload(table="t", data={"k": 1}, op=["insert"]), "op", "list"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type_is_told_with_its_field_and_type(payload: Any, field: str, given: str) -> None:
    text = refused(postgres_sink, payload)
    assert field in text
    assert given in text


async def test_what_the_columns_cannot_have_is_each_rows_own_failure(postgres: PostgresServer, database: str) -> None:
    dsn = postgres.url(database)
    connection = await asyncpg.connect(dsn)
    await connection.execute("CREATE TABLE t (k int, note text, at timestamptz, day date, n int, x float8, j jsonb)")
    sink = postgres_sink(dsn)
    await sink.connect()
    late = datetime.datetime.max.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=-14)))
    fine = [{"k": 1}, {"k": 2, "note": LARGE}, {"k": 3, "x": float("nan")}, {"k": 4, "day": datetime.date.max}]
    wrong = [
        {"k": 10, "at": late},
        {"k": 11, "n": float("nan")},
        {"k": 12, "n": 2**31},
        {"k": 13, "j": {"text": NUL}},
        {"k": 14, "n": decimal.Decimal("sNaN")},
        {"k": 15, "note": 7},
    ]
    payloads = [PostgresPayload(table="t", data=data) for pair in zip(fine + fine[:2], wrong) for data in pair]  # noqa: B905
    answers = await deliver(sink, payloads)
    assert [answer is None for answer in answers] == [True, False] * 6
    for answer in answers[1::2]:
        assert not answer.retryable
        answer.error.encode()
        assert len(answer.error) < 1_000
    assert await connection.fetchval("SELECT count(*) FROM t") == 6
    await connection.close()
    await sink.close()


def test_what_was_encoded_stays_however_deep_the_data_are_changed_later() -> None:
    sink, data = postgres_sink(), {"k": {"tags": ["a"]}}
    encoded = sink.encode(PostgresPayload(table="t", data=data))
    data["k"]["tags"].append("b")
    assert encoded.body.values == ({"tags": ["a"]},)


def test_rows_whose_key_is_not_a_number_wait_for_each_other() -> None:
    sink = postgres_sink()
    keys = [
        sink.encode(PostgresPayload(table="t", data={"k": value}, op="upsert", conflict="k")).key
        for value in (float("nan"), float("nan"), 1.0)
    ]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.parametrize(
    "payload",
    [
        KafkaPayload(key=LONE, data=1),
        KafkaPayload(key="k", data=LONE),
        KafkaPayload(key="k", data={"a": [LONE]}),
        KafkaPayload(key="k", data={LONE: 1}),
        KafkaPayload(key=1, data=1),  # type: ignore[arg-type]
        KafkaPayload(key="k", data=object()),
        KafkaPayload(data=1, headers={LONE: b""}),
        KafkaPayload(data=1, headers={NUL: b""}),
        KafkaPayload(data=1, headers={"": b""}),
        KafkaPayload(data=1, headers={"h": LONE}),
        KafkaPayload(data=1, headers={"h": 5}),  # type: ignore[dict-item]
        KafkaPayload(data=1, headers={5: b""}),  # type: ignore[dict-item]
        KafkaPayload(data=1, headers={LARGE + "\0": b""}),
        KafkaPayload(data=1, headers="ab"),  # type: ignore[arg-type]
        KafkaPayload(data=1, headers=None),  # type: ignore[arg-type]
        KafkaPayload(data=1, headers=["ab"]),  # type: ignore[list-item]
        KafkaPayload(data=1, headers=[("a", b"", b"")]),  # type: ignore[list-item]
        KafkaPayload(data=1, headers=[LARGE]),  # type: ignore[list-item]
        KafkaPayload(data=1, partition=-1),
        KafkaPayload(data=1, partition=2**31),
        KafkaPayload(data=1, partition=10**5_000),
        KafkaPayload(data=1, partition=True),
        KafkaPayload(data=1, partition="1"),  # type: ignore[arg-type]
        KafkaPayload(data=1, partition=float("nan")),  # type: ignore[arg-type]
        KafkaPayload(data=1, timestamp=0),
        KafkaPayload(data=1, timestamp=-1),
        KafkaPayload(data=1, timestamp=2**63),
        KafkaPayload(data=1, timestamp=float("nan")),  # type: ignore[arg-type]
        KafkaPayload(data=1, timestamp=datetime.datetime(2026, 1, 1)),
        KafkaPayload(data=1, timestamp=datetime.datetime.min.replace(tzinfo=datetime.UTC)),
    ],
)
def test_a_record_without_a_form_is_refused(payload: KafkaPayload) -> None:
    refused(kafka_sink, payload)


@pytest.mark.parametrize(
    "payload",
    [
        HttpPayload(data=LONE),
        HttpPayload(data={LONE: 1}),
        HttpPayload(data=object()),
        HttpPayload(data=1, idempotency_key=LONE),
        HttpPayload(data=1, idempotency_key=NUL),
        HttpPayload(data=1, idempotency_key="a\r\nb"),
        HttpPayload(data=1, idempotency_key=5),  # type: ignore[arg-type]
        # A server that ends the connection over it would look as if it were away.
        HttpPayload(data=1, idempotency_key=LARGE),
        *(HttpPayload(data=1, method=text) for text in (LONE, NUL, LARGE, "PO ST", "CONNECT", 5, ["PUT"])),
        *(HttpPayload(data=1, path=text) for text in (LONE, NUL, LARGE, "../x", 5, None)),
        *(HttpPayload(data=1, query={"a": text}) for text in (LONE, LARGE, float("nan"), None, datetime.datetime.max)),
        *(HttpPayload(data=1, query={text: 1}) for text in (LONE, LARGE, 5)),
        *(HttpPayload(data=1, headers={"a": text}) for text in (LONE, NUL, LARGE, "a\r\nb", 5, None)),
        *(HttpPayload(data=1, headers={text: "a"}) for text in (LONE, NUL, LARGE, "a:b", "host", "Idempotency-Key")),
        *(HttpPayload(data={"a": text}, body="form") for text in (LONE, float("nan"), None, datetime.datetime.max)),
        *(HttpPayload(data={text: 1}, body="form") for text in (LONE, 5)),
        *(HttpPayload(data=data, body="form") for data in (None, "a=1", 5)),
        *(HttpPayload(data=1, body=text) for text in (LONE, LARGE, 5, ["form"])),
        HttpPayload(data=1, method="GET"),
    ],
)
def test_a_request_without_a_form_is_refused(payload: HttpPayload) -> None:
    refused(http_sink, payload)


async def test_ten_megabytes_nul_and_the_last_moment_are_bodies_like_others(http_double: HttpDouble) -> None:
    sink = http_sink(http_double.port)
    await sink.connect()
    data = {"nul": NUL, "at": datetime.datetime.max, "large": LARGE}
    assert list(await deliver(sink, [HttpPayload(data=data)])) == [None]
    await sink.close()
    body = http_double.requests[0].body
    assert body.startswith(b'{"nul":"a\\u0000b","at":"9999-12-31T23:59:59.999999","large":"xxx')
