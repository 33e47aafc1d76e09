"""Sinks behind a whole engine: a handler's payloads in real targets, offsets committed only then."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import asyncpg
from tests.store.server import PostgresServer

from tidemill import CollectResult, ExecutorResult, ExecutorTask, Handler, PostgresPayload, PrecomputedResult, Settings
from tidemill.pipeline.delivery import Outbox
from tidemill.pipeline.engine import Engine
from tidemill.pipeline.resident import build_executor
from tidemill.runtime.identity import Identity
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.progress import EngineSummary, StopReason
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
            build_sinks(self.settings), self.letters, handler.on_delivery_error, self.settings.delivery
        )
        self.engine = Engine(
            self.settings,
            handler,
            Identity("test", 0, "sinks", "g", 1),
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
    async def on_ready(self, config: Settings, pg_pool: Any) -> None:
        await pg_pool.execute("CREATE TABLE results (id text PRIMARY KEY, n int CHECK (n <> 13))")

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
    stats = run.outbox.stats["sinks.postgres.db"]
    assert stats.delivered_payloads == 999
    assert stats.dead_lettered == 2
    assert stats.last_error is not None
    assert stats.last_delivered_at is not None
    assert stats.last_error_at is not None
    assert 0 < stats.delivered_count < 999
