"""What idle services cost their database.

    python -m bench.dag_services [SECONDS]

Two schedulers, two parsers, two triggerers and four workers run on one PostgreSQL without any DAG that is due.

    services        their number
    transactions_s  transactions per second of all of them (bar: 20)
    connections     their connections
    most            the most connections of one service, parent and child together (bar: 4)
    cpu_percent     of one core, all of them with their children
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path

import asyncpg
from bench.harness import report, tree_cpu_seconds
from tests.services.hosts.fleet import run_fleet
from tests.store.server import PostgresServer

from tidemill.store.engines.opening import open_store

SERVICES = {"scheduler": 2, "parser": 2, "triggerer": 2, "worker": 4}
DAG = "from tidemill.dags import DAG, EmptyOperator\nwith DAG('idle', schedule=None): EmptyOperator(task_id='t')\n"
#: How long the services may take to start, and to come to rest.
START_SECONDS, REST_SECONDS = 60.0, 10.0


async def count(connection: asyncpg.Connection, statement: str) -> int:
    return int(await connection.fetchval(statement))


async def measure(server: PostgresServer, seconds: float) -> None:
    url = await server.new_database()
    await (await open_store(url)).close()
    connection = await asyncpg.connect(url)
    mine = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    done = "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
    most = 0
    with tempfile.TemporaryDirectory() as folder, run_fleet(Path(folder), url, lease_seconds=30.0) as fleet:
        fleet.write(DAG)
        before = 0
        for kind, number in SERVICES.items():
            for one in range(1, number + 1):
                fleet.start(f"{kind}-{one}", TIDEMILL_DAGS__PARSER="separate")
                live = f"SELECT count(*) FROM service_session WHERE ended_us IS NULL AND name = '{kind}-{one}'"
                async with asyncio.timeout(START_SECONDS):
                    while not await count(connection, live):
                        await asyncio.sleep(0.1)
                await asyncio.sleep(2.0)
                found = await count(connection, mine)
                most, before = max(most, found - before), found
        await asyncio.sleep(REST_SECONDS)
        roots = [one.pid for one in fleet.services.values()]
        cpu, transactions = [sum(map(tree_cpu_seconds, roots))], [await count(connection, done)]
        await asyncio.sleep(seconds)
        transactions.append(await count(connection, done))
        cpu.append(sum(map(tree_cpu_seconds, roots)))
        report(
            services=len(fleet.services),
            transactions_s=round((transactions[1] - transactions[0]) / seconds, 2),
            connections=await count(connection, mine),
            most=most,
            cpu_percent=round(100 * (cpu[1] - cpu[0]) / seconds, 2),
        )
    await connection.close()


def main() -> None:
    server = PostgresServer()
    try:
        asyncio.run(measure(server, float(sys.argv[1]) if len(sys.argv) > 1 else 60.0))
    finally:
        server.remove()


if __name__ == "__main__":
    main()
