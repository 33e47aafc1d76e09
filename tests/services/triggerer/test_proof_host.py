"""What a host promises of shared streams holds over random schedules: nothing is lost, blamed or doubled unduly.

The host, its streams and its store are the real ones; the broker is in memory, behind the Kafka producer, and time
passes by itself. Each schedule is drawn from one seed, and `PROOF_SEED=... pytest -k repeated` plays one again.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text
from tests.services.triggerer.proof_schedule import play, rows_of
from tests.services.triggerer.virtual_time import run_virtually
from tests.size import sized

from tidemill.store.engines.opening import open_store

#: Schedules: in a short run, at full length, and with `--nightly`; and in how many tests they are played.
SHORT, LONG, NIGHTLY, PARTS = 30, 50, 120, 10
PLAYED: Counter[int] = Counter()
_REFUSING = """
CREATE TRIGGER IF NOT EXISTS poison BEFORE INSERT ON trigger_event WHEN NEW.payload LIKE '%poison%'
BEGIN SELECT RAISE(ABORT, 'this content is refused'); END
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """A folder in memory, where there is one: schedules are many, and a disk has nothing to do with them."""
    memory = Path("/dev/shm")
    path = Path(tempfile.mkdtemp(prefix="tidemill-proof-", dir=memory if os.access(memory, os.W_OK) else None))
    yield path
    shutil.rmtree(path)


def play_in(folder: Path, seed: int) -> None:
    """Play a schedule over a SQLite file of its folder."""

    async def played() -> None:
        # One that is played again, because it failed, begins with an empty store.
        PLAYED[seed] += 1
        path = folder / f"{PLAYED[seed]}.db"
        database = await open_store(f"sqlite:///{path}")
        look = sqlite3.connect(path, isolation_level=None)
        try:
            await database.write(lambda connection: connection.execute(text(_REFUSING)))
            [(last,)] = look.execute("SELECT coalesce(max(id), 0) FROM trigger_event")
            count = "SELECT count(*) FROM trigger_event WHERE id > ?"
            await play(seed, database, lambda: look.execute(count, (last,)).fetchone()[0], partial(rows_of, database))
        finally:
            look.close()
            await database.close()

    run_virtually(played())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
def test_nothing_is_lost_or_blamed_or_doubled_over_random_schedules(folder, long_run, part):
    @settings(
        max_examples=(sized(LONG, NIGHTLY) if long_run else SHORT) // PARTS,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.integers(part << 40, (part + 1 << 40) - 1))
    def every(seed: int) -> None:
        play_in(folder, seed)

    every()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 5))])
def test_nor_over_a_postgresql(postgres, seed):
    async def played() -> None:
        loop: Any = asyncio.get_running_loop()
        loop.busy += 1
        database = await open_store(await postgres.new_database())
        try:
            await database.write(
                lambda c: c.execute(text("ALTER TABLE trigger_event ADD CHECK (payload NOT LIKE '%poison%')"))
            )
            loop.busy -= 1
            # What is stored when a commit covers it is looked at over SQLite only.
            await play(seed, database, lambda: 10**9, partial(rows_of, database))
        finally:
            loop.busy += 1
            await database.close()

    run_virtually(played())


@pytest.mark.skipif("PROOF_SEED" not in os.environ, reason="PROOF_SEED names the schedule to repeat")
def test_a_schedule_is_repeated(folder):
    play_in(folder, int(os.environ["PROOF_SEED"]))
