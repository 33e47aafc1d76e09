"""One real server for each type of sink, faults in front of each, and what each of them got, in order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import asyncpg
import pymongo
import redis
from tests.chaos.conftest import read_all
from tests.faults import FaultyProxy
from tests.sinks.servers import HttpDouble, MongoServer, ValkeyServer
from tests.store.server import PostgresServer

#: PostgreSQL refuses the rows of every so many messages, for good.
REFUSED_EVERY = 89
#: Each upsert leaves a line behind, so that nothing that came is hidden by what came later.
TABLES = f"""
CREATE TABLE latest (id text PRIMARY KEY, n int CHECK (n % {REFUSED_EVERY} <> 0));
CREATE TABLE arrivals (place bigserial PRIMARY KEY, n int);
CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS
  'BEGIN INSERT INTO arrivals (n) VALUES (NEW.n); RETURN NULL; END';
CREATE TRIGGER note AFTER INSERT OR UPDATE ON latest FOR EACH ROW EXECUTE FUNCTION note();
"""


class EverySink:
    """A `sinks` section with one instance of each type, and its targets.

    Attributes:
        between: The proxies in front of those that are servers of their own, by type.
    """

    def __init__(
        self,
        postgres: PostgresServer,
        mongo: MongoServer,
        http: HttpDouble,
        valkey: ValkeyServer,
        *,
        database: str,
        bootstrap: str,
        topic: str,
        folder: Path,
    ) -> None:
        self.postgres, self.mongo, self.http, self.valkey = postgres, mongo, http, valkey
        self.database, self.bootstrap, self.topic, self.folder = database, bootstrap, topic, folder
        assert postgres.port
        ports = {"postgres": postgres.port, "mongo": mongo.port, "http": http.port, "redis": valkey.port}
        self.between = {kind: FaultyProxy(port) for kind, port in ports.items()}
        asyncio.run(self._make_tables())

    async def _make_tables(self) -> None:
        connection = await asyncpg.connect(self.postgres.url(self.database))
        await connection.execute(TABLES)
        await connection.close()

    def section(self) -> dict[str, Any]:
        ports = {kind: proxy.port for kind, proxy in self.between.items()}
        return {
            "postgres": {"out": {"dsn": self.postgres.tcp_url(self.database, ports["postgres"])}},
            "mongo": {"out": {"uri": f"mongodb://127.0.0.1:{ports['mongo']}/", "database": self.database}},
            "http": {"out": {"url": f"http://127.0.0.1:{ports['http']}/in"}},
            "redis": {"out": {"url": f"redis://127.0.0.1:{ports['redis']}/", "key_prefix": f"{self.database}:"}},
            "kafka": {"out": {"topic": self.topic}},
            "filesystem": {"out": {"base_path": str(self.folder)}},
        }

    def arrivals(self) -> dict[str, list[int]]:
        """Return the numbers that each sink got, repetitions included, those of one key in the order they came."""
        return {
            "postgres": [row["n"] for row in self._rows("SELECT n FROM arrivals ORDER BY place")],
            "mongo": [n for document in self._documents() for n in document["seen"]],
            "http": [json.loads(request.body)["n"] for request in self.http.requests],
            "redis": [int(n) for key in self._redis_keys("seen") for n in self._client().lrange(key, 0, -1)],
            "kafka": [json.loads(value)["n"] for value in read_all(self.bootstrap, self.topic)],
            "filesystem": [json.loads(line)["n"] for line in (self.folder / "out.jsonl").read_text().splitlines()],
        }

    def latest(self) -> dict[str, dict[str, int]]:
        """Return what is left for each key in those sinks where the last one wins."""
        client = self._client()
        return {
            "postgres": {row["id"]: row["n"] for row in self._rows("SELECT id, n FROM latest")},
            "mongo": {document["_id"]: document["n"] for document in self._documents()},
            "redis": {key.rpartition(":")[2]: int(client.get(key) or -1) for key in self._redis_keys("latest")},
        }

    def _rows(self, query: str) -> list[Any]:
        async def fetch() -> list[Any]:
            connection = await asyncpg.connect(self.postgres.url(self.database))
            try:
                return await connection.fetch(query)
            finally:
                await connection.close()

        return asyncio.run(fetch())

    def _documents(self) -> list[dict[str, Any]]:
        with pymongo.MongoClient(port=self.mongo.port) as client:
            return list(client[self.database].latest.find())

    def _client(self) -> Any:
        return redis.Redis(port=self.valkey.port, decode_responses=True)

    def _redis_keys(self, kind: str) -> list[str]:
        return list(self._client().keys(f"{self.database}:{kind}:*"))

    def close(self) -> None:
        for proxy in self.between.values():
            proxy.close()
