"""What the recipes leave to a database works with a real one; their own tests are run with their pages."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import asyncpg
import pytest
import yaml
from tests.docs.snippets import ROOT, blocks
from tests.sinks.conftest import database, postgres
from tests.store.server import PostgresServer

from tidemill.config.settings import Settings
from tidemill.sinks.build import build_sink
from tidemill.testing import deliver, run_handler

__all__ = ["database", "postgres"]  # fixtures

RECIPES = ROOT / "docs/how-to/recipes"


def write_files(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], Any]:
    """Write the files of a recipe; return its configuration and its module `handler`."""
    for block in blocks(RECIPES / page):
        if block.file is not None:
            (folder / block.file).write_text(block.code)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "handler", raising=False)
    importlib.invalidate_caches()
    return yaml.safe_load((folder / "tidemill.yaml").read_text()), importlib.import_module("handler")


def test_orders_are_counted_once_however_often_they_are_delivered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer, database: str
) -> None:
    config, handler = write_files("count-per-key.md", tmp_path, monkeypatch)
    run = run_handler(handler.CountOrders(), [{"region": "north"}, {"region": "south"}, {"region": "north"}], config)
    payloads = run.payloads["postgres.counts"]
    config["sinks"]["postgres"]["counts"]["dsn"] = postgres.url(database)

    async def count() -> list[tuple[str, int]]:
        connection = await asyncpg.connect(postgres.url(database))
        await connection.execute((tmp_path / "tables.sql").read_text())
        sink = build_sink(Settings.model_validate(config), "postgres", "counts")
        await sink.connect()
        for _ in range(2):
            assert await deliver(sink, payloads) == [None] * 3
        await sink.close()
        rows = await connection.fetch("SELECT region, orders FROM totals ORDER BY region")
        await connection.close()
        return [(row["region"], row["orders"]) for row in rows]

    assert asyncio.run(count()) == [("north", 2), ("south", 1)]


def test_names_are_read_from_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, postgres: PostgresServer, database: str
) -> None:
    _, handler = write_files("enrich-from-a-database.md", tmp_path, monkeypatch)

    async def read() -> dict[int, str]:
        async with asyncpg.create_pool(postgres.url(database), min_size=1, max_size=1) as pool:
            await pool.execute("CREATE TABLE customers (id bigint PRIMARY KEY, name text)")
            await pool.execute("INSERT INTO customers VALUES (1, 'Ada'), (2, 'Bo')")
            enrich = handler.Enrich()
            await enrich.on_ready(None, {"postgres.customers": SimpleNamespace(pool=pool)})
            return await enrich.read_names([2, 7])

    assert asyncio.run(read()) == {2: "Bo"}
