"""The SQLite store: one writing process, durable commits, concurrent readers, and kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from tests.store.helpers import Outcomes, all_events, claim, claimed
from tests.until import until

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.store.calls.dispatch import answer_call
from tidemill.store.calls.task_calls import GetVariable, SetVariable
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import choose_store_url, open_reader, open_store
from tidemill.store.engines.sqlite import open_sqlite
from tidemill.store.group_commit import EventStore
from tidemill.store.queries.triggers.events import count_events

#: Adds events endlessly, and writes the number of each one to stdout once it is confirmed.
WRITER = """
import asyncio, os, sys
from tests.store.helpers import claimed
from tidemill.core.triggers.event_plan import EventStored
from tidemill.store.database_events import DatabaseEvents
from tidemill.store.group_commit import EventStore
from tidemill.store.engines.opening import open_store

async def main():
    database = await open_store(sys.argv[1])
    tokens = await claimed(database, "one", "two")
    store = EventStore(DatabaseEvents(database))
    store.start()
    def confirm(number, trigger_id):
        def done(outcome):
            assert isinstance(outcome, EventStored)
            os.write(1, f"{trigger_id} {number}\\n".encode())
        return done
    number = 0
    while True:
        for trigger_id, token in tokens.items():
            store.add(trigger_id, token, str(number), None, confirm(number, trigger_id))
        number += 1
        await asyncio.sleep(0.0005)

asyncio.run(main())
"""


def writer(path: Path) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parent.parent.parent)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, root])}
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, f"sqlite:///{path}"], stdout=subprocess.PIPE, env=environment
    )


@pytest.mark.parametrize("lines", [1, 40, 400])
async def test_events_confirmed_before_a_kill_are_stored_and_numbers_continue(tmp_path: Path, lines: int) -> None:
    path = tmp_path / "tidemill.db"
    process = writer(path)
    assert process.stdout is not None
    confirmed = [await asyncio.to_thread(process.stdout.readline) for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    rest, _ = await asyncio.to_thread(process.communicate)
    confirmed += [line for line in rest.splitlines(keepends=True) if line.endswith(b"\n")]

    database = await open_store(f"sqlite:///{path}")
    rows = await all_events(database)
    stored = {(row.trigger_id, row.payload) for row in rows}
    assert {tuple(line.decode().split()) for line in confirmed} <= {(str(t), p) for t, p in stored}
    assert len(stored) == len(rows)
    for trigger_id in {row.trigger_id for row in rows}:
        of_one = [row for row in rows if row.trigger_id == trigger_id]
        assert [row.sequence_index for row in of_one] == list(range(len(of_one)))
        assert [row.payload for row in of_one] == [str(number) for number in range(len(of_one))]
    tokens = await claim(database, rows[0].trigger_id)
    store, outcomes = EventStore(DatabaseEvents(database)), Outcomes()
    store.start()
    store.add(rows[0].trigger_id, tokens[rows[0].trigger_id], '"next"', None, outcomes.of("next"))
    await store.close(10)
    last = (await all_events(database))[-1]
    assert last.sequence_index == sum(row.trigger_id == rows[0].trigger_id for row in rows)
    await database.close()


async def test_a_second_writer_is_refused_with_the_process_that_writes_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.db"
    process = writer(path)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)

        with pytest.raises(StoreInUseError, match=rf"process {process.pid}.*store\.url.*PostgreSQL"):
            await open_store(f"sqlite:///{path}")
        (tmp_path / "link.db").symlink_to(path)
        with pytest.raises(StoreInUseError):
            await open_store(f"sqlite:///{tmp_path}/link.db")
    finally:
        process.kill()
        process.communicate()


async def test_readers_read_while_another_process_writes_and_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "tidemill.db"
    process = writer(path)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        reader = await open_reader(f"sqlite:///{path}")

        assert await reader.read(count_events) >= 1
        await asyncio.to_thread(process.stdout.readline)
        with pytest.raises(ConfigError, match="reading only"):
            await reader.write(count_events)
        with pytest.raises(RemoteError, match="readonly"):
            await reader.read(lambda c: c.exec_driver_sql("DELETE FROM trigger_event"))
        await reader.close()
    finally:
        process.kill()
        process.communicate()


async def test_commits_are_durable_and_transactions_begin_with_the_write_lock(tmp_path: Path) -> None:
    database = await open_sqlite(tmp_path / "a b?%23.db")

    def settings(connection) -> list[object]:
        names = ("journal_mode", "synchronous", "foreign_keys")
        return [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in names]

    def others_cannot_write(connection) -> None:
        with sqlite3.connect(tmp_path / "a b?%23.db", timeout=0, isolation_level=None) as other:
            with pytest.raises(sqlite3.OperationalError, match="locked"):
                other.execute("BEGIN IMMEDIATE")
            assert other.execute("SELECT count(*) FROM trigger").fetchone() == (0,)
        other.close()

    full = 2
    assert await database.write(settings) == ["wal", full, 1]
    await database.write(others_cannot_write)
    await database.close()


async def test_a_closed_store_can_be_opened_again_in_the_same_process(tmp_path: Path) -> None:
    for _ in range(2):
        database = await open_sqlite(tmp_path / "tidemill.db")
        with pytest.raises(StoreInUseError, match=str(os.getpid())):
            await open_sqlite(tmp_path / "tidemill.db")
        await database.close()


async def test_a_lock_held_by_another_program_delays_events_and_fails_none(tmp_path: Path) -> None:
    database = await open_sqlite(tmp_path / "tidemill.db")
    tokens = await claimed(database, "one")
    await database.write(lambda c: c.exec_driver_sql("PRAGMA busy_timeout=10"))
    store, outcomes = EventStore(DatabaseEvents(database)), Outcomes()
    store.start()
    other = sqlite3.connect(tmp_path / "tidemill.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.add(*next(iter(tokens.items())), "1", None, outcomes.of(1))
    await until(lambda: store.standing is ProducerStanding.DOWN)
    assert outcomes.all == []

    other.execute("COMMIT")
    other.close()
    await store.wait_settled()

    assert outcomes.told() == [1]
    await store.close(1)
    await database.close()


async def test_a_full_disk_delays_events_and_fails_none(tmp_path: Path) -> None:
    database = await open_sqlite(tmp_path / "tidemill.db")
    tokens = await claimed(database, "one")

    def set_limit(pages: int) -> Callable[[Connection], object]:
        return lambda c: c.exec_driver_sql(f"PRAGMA max_page_count={pages}").scalar()

    await database.write(set_limit(1))  # it cannot be less than what the file has
    store, outcomes = EventStore(DatabaseEvents(database)), Outcomes()
    store.start()
    for number in range(200):
        store.add(*next(iter(tokens.items())), f'"{"x" * 1000}"', None, outcomes.of(number))
    await until(lambda: store.standing is ProducerStanding.DOWN)
    assert outcomes.all == []

    await database.write(set_limit(1_000_000))
    await store.wait_settled()

    assert outcomes.told() == list(range(200))
    assert await database.read(count_events) == 200
    await store.close(1)
    await database.close()


async def test_a_reader_of_a_missing_store_is_told_how_one_is_created(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"triggers run.*store\.url"):
        await open_reader(f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


async def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such-folder.*store\.url"):
        await open_store(f"sqlite:///{tmp_path}/no-such-folder/tidemill.db")


async def test_a_file_that_is_not_a_database_is_named_and_left_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)

    with pytest.raises(RemoteError, match="not a database"):
        await open_store(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")


@pytest.mark.parametrize("url", ["sqlite:///:memory:", "sqlite://", "mysql://me:hunter2@host/x", "tidemill.db", ""])
async def test_a_url_of_something_else_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url") as caught:
        await open_store(url)
    assert "hunter2" not in str(caught.value)


def test_without_a_setting_the_store_is_a_file_beside_the_list_of_triggers(tmp_path: Path) -> None:
    assert choose_store_url("", tmp_path) == f"sqlite:///{tmp_path}/tidemill.db"
    assert choose_store_url("postgresql://host/x", tmp_path) == "postgresql://host/x"


async def test_only_this_user_can_read_what_is_stored(tmp_path: Path) -> None:
    store = await open_sqlite(tmp_path / "new.db")
    try:
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    finally:
        await store.close()
    assert modes == dict.fromkeys(("new.db", "new.db-wal", "new.db-shm", "new.db.lock"), 0o600)


async def test_a_transaction_that_sqlite_ends_by_itself_confirms_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer_or_fill(connection: Connection, request: Any, context: Any) -> Any:
        if request.key == "full":
            connection.exec_driver_sql("ROLLBACK")  # as SQLite may do when the disk is full
            raise sqlite3.OperationalError("database or disk is full")
        return answer_call(connection, request, context)

    monkeypatch.setattr("tidemill.store.engines.call_batches.answer_call", answer_or_fill)
    database = await open_sqlite(tmp_path / "store.db")
    calls = [database.call(SetVariable(key, "v")) for key in ("before", "full", "after")]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    for key, outcome in zip(("before", "full", "after"), outcomes, strict=True):
        stored = await database.call(GetVariable(key))
        assert isinstance(outcome, RemoteError) if stored is None else outcome is None
    assert isinstance(outcomes[1], RemoteError)
    await database.close()
