"""No password of a sink is in a log, an error, a record or a dead letter: wrong, refused, or on the way."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog
import yaml
from redis import asyncio as aioredis
from tests.faults import FaultyProxy
from tests.sinks.servers import HttpDouble, MongoDouble, Request, ValkeyServer
from tests.sinks.test_through_a_pipeline import Known, Run
from tests.store.server import PostgresServer
from typer.testing import CliRunner

from tidemill import (
    CollectResult,
    ExecutorResult,
    HttpPayload,
    KafkaPayload,
    MongoPayload,
    PostgresPayload,
    RedisPayload,
    Settings,
)
from tidemill.cli.main import app
from tidemill.config.settings import LoggingSettings
from tidemill.deadletters.letter import encode_letter
from tidemill.runtime.embedded.broker import EmbeddedBroker, free_port
from tidemill.runtime.kafka import client as kafka_client
from tidemill.runtime.link.progress import StopReason
from tidemill.runtime.log.setup import configure

#: The right password is hunter2; the wrong ones begin in the same way, and one has to be escaped in an address.
SECRET = "hunter"
WRONG = "hunter3%2Fx"
KINDS = ("http", "kafka", "mongo", "postgres", "redis")


@pytest.fixture
def logged() -> Iterator[io.StringIO]:
    """Everything that tidemill and the libraries log at DEBUG, masked as it always is."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    configure(LoggingSettings(level="DEBUG"), stream=stream)
    yield stream
    root.handlers[:], root.level = before
    structlog.reset_defaults()


@pytest.fixture
def unmasked() -> Iterator[io.StringIO]:
    """What the libraries hand to the standard library's logging, before anything is masked there."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger(name) for name in ("asyncpg", "httpcore", "httpx", "pymongo", "redis", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    yield stream
    for logger, level in zip(loggers, levels, strict=True):
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.fixture
def mongo_double() -> Iterator[MongoDouble]:
    """Refuses the document of the message 3, and takes all others."""

    def judge(command: dict[str, Any]) -> dict[str, Any]:
        count = len(command["updates"])
        for index, each in enumerate(command["updates"]):
            if each["q"] == {"_id": 3}:
                wrong = {"index": index, "code": 121, "errmsg": "Document failed validation"}
                return {"ok": 1, "n": index, "nModified": index, "writeErrors": [wrong]}
        return {"ok": 1, "n": count, "nModified": count}

    double = MongoDouble(judge)
    yield double
    double.close()


def sections(ports: dict[str, int], password: str, *, database: str, kafka: dict[str, Any]) -> dict[str, Any]:
    """One sink of each type, with this password in every place that it can have."""
    who = f"app:{password}@127.0.0.1"
    plain = "authMechanism=PLAIN&authSource=%24external&serverSelectionTimeoutMS=500"
    headers = {"Authorization": f"Bearer {password}", "X-Whatever": password}
    return {
        "http": {
            "out": {"url": f"http://{who}:{ports['http']}/in?token={password}", "headers": headers, "max_retries": 0}
        },
        "kafka": {"out": kafka},
        "mongo": {"out": {"uri": f"mongodb://{who}:{ports['mongo']}/?{plain}", "database": "d"}},
        "postgres": {"out": {"dsn": f"postgresql://{who}:{ports['postgres']}/{database}"}},
        "redis": {"out": {"url": f"redis://{who}:{ports['redis']}/0", "key_prefix": "secrets:"}},
    }


def with_sasl(broker: EmbeddedBroker, password: str) -> dict[str, Any]:
    """Brokers that know of no login are asked for one: no connection comes of it."""
    sasl = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": "app"}
    more = {"sasl.password": password, "debug": "all"}
    return {"brokers": broker.bootstrap, "topic": "t", "client_config": {**sasl, **more}}


def wrong(postgres: PostgresServer, valkey: ValkeyServer, mongo: MongoDouble, broker: EmbeddedBroker) -> dict[str, Any]:
    assert postgres.port
    ports = {"postgres": postgres.port, "redis": valkey.port, "mongo": mongo.port, "http": free_port()}
    return sections(ports, WRONG, database="postgres", kafka=with_sasl(broker, WRONG))


@pytest.mark.kafka
@pytest.mark.parametrize("kind", KINDS)
async def test_a_wrong_password_at_the_start_is_told_without_it(
    kind: str,
    postgres: PostgresServer,
    valkey: ValkeyServer,
    mongo_double: MongoDouble,
    embedded_kafka: EmbeddedBroker,
    logged: io.StringIO,
    unmasked: io.StringIO,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_client, "CALL_SECONDS", 1.0)
    run = Run(Known(), 4, sinks={kind: wrong(postgres, valkey, mongo_double, embedded_kafka)[kind]})
    summary = await run.to_end()
    assert summary.reason in (StopReason.FAILED, StopReason.CONFIG)
    assert f"sinks.{kind}.out" in (summary.error or "")
    assert f"sinks.{kind}.out" in logged.getvalue()
    for text in (str(summary), logged.getvalue(), unmasked.getvalue(), repr(run.settings), str(run.settings.sinks)):
        assert SECRET not in text


class ToAll(Known):
    """Message 3 is refused by each sink; all that can go away do so when they were just connected."""

    def __init__(self, between: Iterable[FaultyProxy]) -> None:
        self.between = between

    async def on_ready(self, config: Settings, sinks: Any) -> None:
        for each in self.between:
            await asyncio.to_thread(each.down)

    async def on_task_complete(self, result: ExecutorResult) -> CollectResult:
        partition, _, offset = result.task.task_id[1:].partition("-")
        n = int(offset) * 2 + int(partition)
        bad = n == 3
        return CollectResult(
            http=[HttpPayload(data={"n": n})],
            kafka=[KafkaPayload(key=f"{n}", data="x" * (2_000_000 if bad else 1))],
            mongo=[MongoPayload(collection="c", data={"n": n}, op="upsert", filter={"_id": n})],
            postgres=[PostgresPayload(table="results", data={"n": n})],
            redis=[RedisPayload(key="text" if bad else f"{n}", data=n, op="push")],
        )


def refuse_the_third(request: Request) -> tuple[int, dict[str, str], bytes]:
    """Say again all that was said."""
    if request.body != b'{"n":3}':
        return 204, {}, b""
    return 422, {}, f"no {request.path} for {request.headers}".encode()


@pytest.mark.kafka
async def test_sinks_that_go_away_or_refuse_are_told_without_their_passwords(
    postgres: PostgresServer,
    database: str,
    valkey: ValkeyServer,
    mongo_double: MongoDouble,
    http_double: HttpDouble,
    embedded_kafka: EmbeddedBroker,
    proxy: Callable[[int], FaultyProxy],
    logged: io.StringIO,
    unmasked: io.StringIO,
) -> None:
    assert postgres.port
    http_double.judge = refuse_the_third
    connection = await asyncpg.connect(postgres.url(database))
    await connection.execute(
        "CREATE TABLE results (n int);"
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN IF NEW.n = 3 THEN RAISE EXCEPTION "
        "'not for postgresql://app:hunter2@here' USING DETAIL = 'hunter2', HINT = 'hunter2'; END IF; RETURN NEW;"
        "END $$;"
        "CREATE TRIGGER refuse BEFORE INSERT ON results FOR EACH ROW EXECUTE FUNCTION refuse()"
    )
    await connection.close()
    async with aioredis.Redis(port=valkey.port) as client:
        await client.set("secrets:text", "no list")
    ports = {"postgres": postgres.port, "redis": valkey.port, "mongo": mongo_double.port, "http": http_double.port}
    between = {kind: proxy(port) for kind, port in ports.items()}
    topic = f"secrets-{database}"
    embedded_kafka.create_topic(topic)
    kafka = {"brokers": embedded_kafka.bootstrap, "topic": topic, "client_config": {"sasl.password": "hunter2"}}
    run = Run(
        ToAll(between.values()),
        40,
        sinks=sections({kind: each.port for kind, each in between.items()}, "hunter2", database=database, kafka=kafka),
        delivery={"retry_backoff": {"max_seconds": 0.1}, "breaker": {"open_seconds": 0.1, "failures": 2}},
    )

    async def back_again() -> None:
        while not all(run.outbox.statistics().sinks[f"sinks.{kind}.out"].error_count for kind in between):
            await asyncio.sleep(0.005)
        for each in between.values():
            await asyncio.to_thread(each.up)

    outage = asyncio.ensure_future(back_again())
    summary = await run.to_end()
    await outage
    assert summary.reason is StopReason.DRAINED
    assert sorted(letter.sink_type for letter in run.letters.letters) == sorted(KINDS)
    stats = [f"{run.outbox.statistics().sinks[f'sinks.{kind}.out']}" for kind in KINDS]
    said = [encode_letter(letter).decode() for letter in run.letters.letters]
    logs = logged.getvalue()
    assert all(f"sinks.{kind}.out" in logs for kind in KINDS)
    for text in (
        *said,
        *stats,
        *(str(each.last_error) for each in run.outbox.statistics().sinks.values()),
        str(summary),
        logs,
    ):
        assert SECRET not in text
    assert SECRET not in unmasked.getvalue()


@pytest.mark.kafka
def test_what_is_shown_of_a_pipeline_has_no_password(
    postgres: PostgresServer,
    valkey: ValkeyServer,
    mongo_double: MongoDouble,
    embedded_kafka: EmbeddedBroker,
    logged: io.StringIO,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kafka_client, "CALL_SECONDS", 1.0)
    config = {
        "kafka": {"brokers": embedded_kafka.bootstrap, "client_config": {"sasl.password": WRONG}},
        "store": {"url": f"postgresql://app:{WRONG}@127.0.0.1/d"},
        "sinks": wrong(postgres, valkey, mongo_double, embedded_kafka),
    }
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    for command in (["config", "show"], ["doctor"]):
        done = CliRunner().invoke(app, [*command, str(tmp_path / "c.yaml")])
        assert done.exit_code == (4 if command == ["doctor"] else 0), done.output
        for text in (done.output, done.stdout, done.stderr, logged.getvalue()):
            assert SECRET not in text
        assert all(kind in done.output for kind in KINDS)
    settings = Settings.model_validate(config)
    for text in (repr(settings), str(settings), f"{settings.sinks!r}", f"{settings.kafka}"):
        assert SECRET not in text
        assert "***" in text
