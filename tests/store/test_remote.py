"""Calls over a socket: batches, failures that stay alone, lost connections, and bells."""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.store.dags import Player, dag, encode, task

from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.tasks.inputs import Channel
from tidemill.store.calls.call import CallRefusedError
from tidemill.store.calls.dag_calls import GetDag, ListDags
from tidemill.store.calls.run_calls import CreateRun
from tidemill.store.calls.service_calls import StoreFile
from tidemill.store.calls.setting_calls import ListVariables
from tidemill.store.calls.task_calls import GetVariable, SetVariable
from tidemill.store.doorbell import Doorbell
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import open_caller, open_store
from tidemill.store.engines.sqlite import SqliteDatabase, open_sqlite
from tidemill.store.wire import frames
from tidemill.store.wire.call_server import CallServer
from tidemill.store.wire.remote import RemoteStore, call_patiently


@pytest.fixture
async def sqlite(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = await open_sqlite(tmp_path / "store.db")
    yield opened
    await opened.close()


@pytest.fixture
async def server(sqlite: SqliteDatabase, tmp_path: Path) -> AsyncIterator[CallServer]:
    one = CallServer(sqlite, tmp_path / "calls.sock")
    await one.start()
    yield one
    await one.close()


@pytest.fixture
async def remote(server: CallServer) -> AsyncIterator[RemoteStore]:
    store = RemoteStore(server.path, connect_seconds=3.0)  # on a busy machine, too
    yield store
    await store.close()


class Silent:
    """A store whose calls never end."""

    label = "silent"

    def __init__(self) -> None:
        self.doorbell = Doorbell()
        self.asked = asyncio.Event()

    async def call(self, request: Any) -> Any:
        self.asked.set()
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


async def test_a_server_closes_though_a_call_never_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.store.wire.call_server.CLOSE_SECONDS", 0.1)
    silent = Silent()
    server = CallServer(silent, tmp_path / "calls.sock")
    await server.start()
    store = RemoteStore(server.path, connect_seconds=0.1)
    asking = asyncio.create_task(store.call(ListDags()))
    await asyncio.wait_for(silent.asked.wait(), 30)

    await asyncio.wait_for(server.close(), 30)

    with pytest.raises(RemoteError, match="was lost"):
        await asyncio.wait_for(asking, 30)
    await store.close()


async def test_a_process_that_accepts_connections_and_says_nothing_is_named(tmp_path: Path) -> None:
    path = tmp_path / "calls.sock"
    server = await asyncio.start_unix_server(lambda reader, writer: None, path)
    store = RemoteStore(path, connect_seconds=0.1)
    with pytest.raises(RemoteError, match=r"does not answer at .*: it accepts connections"):
        await asyncio.wait_for(store.call(ListDags()), 30)
    await store.close()
    server.close()


async def test_an_answer_that_cannot_be_read_fails_its_own_call_alone(
    remote: RemoteStore, sqlite: SqliteDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = sqlite.call

    async def answer(request: Any) -> Any:
        return {"not": "a page"} if isinstance(request, ListVariables) else await call(request)

    monkeypatch.setattr(sqlite, "call", answer)
    good = [remote.call(ListDags()) for _ in range(5)]
    found = await asyncio.wait_for(asyncio.gather(remote.call(ListVariables()), *good, return_exceptions=True), 30)

    assert isinstance(found[0], RemoteError)
    assert not found[0].retryable
    assert "ListVariables" in str(found[0])
    assert not [one for one in found[1:] if isinstance(one, BaseException)]


async def test_a_run_is_played_over_the_socket(remote: RemoteStore) -> None:
    player = await Player(remote).begin()
    run = await player.create(dag(task("a"), task("b", "a")))
    await player.play()

    assert await player.states(run) == {"a": "success", "b": "success"}


async def test_only_this_user_can_connect(server: CallServer) -> None:
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600


async def test_calls_that_wait_share_a_transaction_and_one_that_fails_is_undone_alone(
    sqlite: SqliteDatabase, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    transactions = 0
    write = sqlite.write

    async def count(work):  # type: ignore[no-untyped-def]
        nonlocal transactions
        transactions += 1
        return await write(work)

    monkeypatch.setattr(sqlite._calls, "_write", count)
    calls = [remote.call(SetVariable(f"v{number}", "x" if number % 5 else "\0")) for number in range(50)]

    results = await asyncio.gather(*calls, return_exceptions=True)

    assert [isinstance(one, CallRefusedError) for one in results] == [number % 5 == 0 for number in range(50)]
    assert transactions < 25
    listed = await remote.call(ListVariables(limit=100))
    assert {row.key for row in listed.rows} == {f"v{number}" for number in range(50) if number % 5}


async def test_what_a_failed_call_had_written_is_undone(sqlite: SqliteDatabase) -> None:
    good, bad = encode(dag(task("a"), id="good")), encode(dag(task("a"), id="bad"))
    file = StoreFile("f.py", "digest", structures=(good, bad[:-1]))

    results = await asyncio.gather(sqlite.call(file), sqlite.call(SetVariable("kept", "1")), return_exceptions=True)

    assert isinstance(results[0], Exception)
    assert await sqlite.call(GetDag("good")) is None
    assert await sqlite.call(GetVariable("kept")) == "1"


async def test_refusals_and_failures_arrive_as_what_they_are(remote: RemoteStore) -> None:
    with pytest.raises(CallRefusedError, match="there is no DAG 'none'") as refused:
        await remote.call(CreateRun("none"))
    assert refused.value.kind == "unknown"


async def test_a_lost_connection_fails_what_is_under_way_and_the_next_call_connects_again(
    sqlite: SqliteDatabase, server: CallServer, remote: RemoteStore
) -> None:
    await remote.call(SetVariable("k", "v"))
    await server.close()
    with pytest.raises(RemoteError) as failed:
        await remote.call(GetVariable("k"))
    assert failed.value.retryable
    waiting = asyncio.create_task(call_patiently(remote, GetVariable("k"), 0.05))
    again = CallServer(sqlite, server.path)
    await again.start()

    assert await asyncio.wait_for(waiting, 30) == "v"
    await again.close()


async def test_bells_ring_in_other_processes_and_once_per_connection(remote: RemoteStore) -> None:
    await remote.connect()
    for channel in Channel:
        assert await remote.doorbell.wait(channel, 5)
    player = await Player(remote).begin()
    while await remote.doorbell.wait(Channel.WORKER, 0.05):
        pass

    await player.create(dag(task("a")))
    assert await remote.doorbell.wait(Channel.SCHEDULER, 5)
    await player.schedule()
    assert await remote.doorbell.wait(Channel.WORKER, 5)


async def test_bells_ring_between_processes_of_postgresql(postgres) -> None:  # type: ignore[no-untyped-def]
    url = await postgres.new_database()
    one, other = await open_store(url), await open_store(url)
    while not await other.doorbell.wait(Channel.WORKER, 5):
        pass
    player = await Player(one).begin()
    run = await player.create(dag(task("a")))

    async def heard() -> bool:
        # The first bells may be those of the new connection.
        return await other.doorbell.wait(Channel.WORKER, 0.2)

    while await heard():
        pass
    for _ in range(50):
        one.doorbell.ring([Channel.WORKER])
        if await heard():
            break
    else:
        raise AssertionError("no bell was heard")
    assert run.state == "running"
    await one.close()
    await other.close()


async def test_bells_of_other_hosts_reach_the_clients_of_a_server(  # type: ignore[no-untyped-def]
    postgres, tmp_path: Path
) -> None:
    url = await postgres.new_database()
    one, other = await open_store(url), await open_store(url)
    served = CallServer(other, tmp_path / "calls.sock")
    await served.start()
    client = RemoteStore(served.path, connect_seconds=30.0)
    await client.connect()
    try:
        # The first ones are those of the new connections.
        for _ in range(3):
            while await client.doorbell.wait(Channel.TRIGGERER, 0.2):
                pass
            async with asyncio.timeout(30):
                while not await client.doorbell.wait(Channel.TRIGGERER, 0.5):
                    one.doorbell.ring([Channel.TRIGGERER])
    finally:
        await client.close()
        await served.close()
        await one.close()
        await other.close()


async def test_another_version_is_refused_by_name(
    server: CallServer, remote: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.store.wire.remote.find_protocol", lambda: "other")

    with pytest.raises(ConfigError, match="another version of tidemill; restart it"):
        await remote.call(ListDags())


async def test_the_command_line_calls_whoever_has_the_file_open(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path}/store.db", tmp_path / "calls.sock"
    host = await open_sqlite(tmp_path / "store.db")
    with pytest.raises(StoreInUseError):
        await open_caller(url)
    server = CallServer(host, path)
    await server.start()
    host.publish(str(path))

    store = await open_caller(url)
    assert isinstance(store, RemoteStore)
    await store.call(SetVariable("k", "v"))
    await store.close()
    await server.close()
    await host.close()
    store = await open_caller(url)
    assert isinstance(store, SqliteDatabase)
    assert await store.call(GetVariable("k")) == "v"
    await store.close()


async def test_a_process_that_has_the_file_and_answers_no_more_is_not_called(tmp_path: Path) -> None:
    url, path = f"sqlite:///{tmp_path}/store.db", tmp_path / "calls.sock"
    host = await open_sqlite(tmp_path / "store.db")
    host.publish(str(path))
    with pytest.raises(StoreInUseError):
        await open_caller(url)
    with socket.socket(socket.AF_UNIX) as dead:  # as one leaves it that was killed
        dead.bind(str(path))
    with pytest.raises(StoreInUseError):
        await open_caller(url)
    await host.close()


async def test_a_client_that_sends_nonsense_harms_nobody(server: CallServer, remote: RemoteStore) -> None:
    reader, writer = await asyncio.open_unix_connection(server.path)
    writer.write(b"\0\0\0\5hello")
    await frames.read_frame(reader)
    with pytest.raises(asyncio.IncompleteReadError):
        await frames.read_frame(reader)
    writer.close()
    assert await remote.call(GetVariable("k")) is None


async def test_many_callers_get_their_own_answers(remote: RemoteStore) -> None:
    await asyncio.gather(*[remote.call(SetVariable(f"v{number}", str(number))) for number in range(100)])

    answers = await asyncio.gather(*[remote.call(GetVariable(f"v{number}")) for number in range(100)])
    assert answers == [str(number) for number in range(100)]


async def test_a_call_that_is_given_up_disturbs_no_other(remote: RemoteStore) -> None:
    await remote.connect()
    given_up = asyncio.create_task(remote.call(SetVariable("a", "1")))
    await asyncio.wait([given_up], timeout=0)
    assert remote._waiting
    given_up.cancel()

    await remote.call(SetVariable("b", "2"))
    assert await remote.call(GetVariable("b")) == "2"


async def test_a_call_keeps_its_number_and_fields_on_the_way() -> None:
    number, call = frames.decode_call(frames.encode_call(7, SetVariable("k", "v"))[4:])
    assert (number, call) == (7, SetVariable("k", "v"))
