"""Control sockets: who may connect, what is answered, and what a strange client cannot do."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.until import until

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.errors import RemoteError
from tidemill.runtime.files import lock
from tidemill.runtime.sockets import control_socket
from tidemill.runtime.sockets.control_socket import ControlSocket, ask
from tidemill.runtime.sockets.pipeline_socket import pipeline_socket, release_brakes


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Name a folder for sockets; a short name, as the kernel wants it."""
    made = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(made))
    yield made / "tidemill"
    shutil.rmtree(made)


def echo(request: dict[str, Any]) -> dict[str, Any]:
    return {"asked": request}


async def test_only_its_user_may_connect_in_a_folder_of_its_own(folder) -> None:
    server = ControlSocket("test.", echo)
    await server.start()
    (path,) = folder.glob("test.*.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await server.close()
    assert list(folder.iterdir()) == []


async def test_a_second_server_of_a_prefix_and_a_client_that_leaves_are_no_reason_to_warn(folder) -> None:
    asked = asyncio.Event()

    async def answer_at_length(request: dict[str, Any]) -> dict[str, Any]:
        asked.set()
        return {"long": "x" * 10_000_000}  # more than a socket takes before it notices

    first, second = ControlSocket("test.", answer_at_length), ControlSocket("test.", echo)
    with structlog.testing.capture_logs() as logs:
        await first.start()
        await second.start()
        await asyncio.wait_for(asked.wait(), 30)
        # Its answer to this comes after it has found out that the one before has left.
        (path,) = set(folder.glob("test.*.sock")) - {second._path}
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 30)
        writer.close()
        await until(lambda: len(asyncio.all_tasks()) == 1)
    assert logs == []
    await first.close()
    await second.close()


async def test_a_request_is_answered_and_none_is_an_empty_one(folder) -> None:
    server = ControlSocket("test.", echo)
    await server.start()
    answers = await asyncio.to_thread(ask, "test.", {"do": "x"})
    assert (answers.reports, answers.silent) == ([{"asked": {"do": "x"}}], 0)
    assert (await asyncio.to_thread(ask, "test.")).reports == [{"asked": {}}]
    assert (await asyncio.to_thread(ask, "other.")).reports == []
    await server.close()


@pytest.mark.parametrize("login_asks", [True, False])
async def test_a_service_and_a_login_of_one_user_find_each_other(folder, monkeypatch, login_asks) -> None:
    root = folder.parent
    login = root / "run" / str(os.getuid())
    login.mkdir(parents=True)
    monkeypatch.setattr(lock, "_LOGINS", login.parent)
    monkeypatch.setattr(lock, "_SHARED", root)

    def enter(a_login: bool) -> None:
        if a_login:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
        else:
            monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)

    enter(not login_asks)
    server = ControlSocket("test.", echo)
    await server.start()
    enter(login_asks)
    assert (await asyncio.to_thread(ask, "test.", {"do": "x"})).reports == [{"asked": {"do": "x"}}]
    with monkeypatch.context() as patch:
        patch.setattr(control_socket, "refuse_foreign", refuse)
        assert (await asyncio.to_thread(ask, "test.")).reports == []
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(root / "chosen"))
    (root / "chosen").mkdir()
    assert (await asyncio.to_thread(ask, "test.")).reports == []
    await server.close()


def refuse(directory: Path) -> None:
    raise PermissionError(1, f"{directory} belongs to another user")


@pytest.mark.parametrize("said", [b"not json", b"[1]", b"\xff\xfe", b"x" * 200_000])
async def test_a_client_that_says_nonsense_or_nothing_holds_up_nobody(folder, said) -> None:
    server = ControlSocket("test.", echo)
    await server.start()
    (path,) = folder.glob("test.*.sock")
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as strange:
        silent.connect(str(path))
        strange.setblocking(False)
        strange.connect(str(path))
        strange.send(said)
        assert (await asyncio.to_thread(ask, "test.", {"do": "x"})).reports == [{"asked": {"do": "x"}}]
    await server.close()


async def test_a_client_that_never_ends_its_side_is_left_after_a_while(folder, monkeypatch) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_SECONDS", 0.1)
    server = ControlSocket("test.", echo)
    await server.start()
    (path,) = folder.glob("test.*.sock")
    reader, writer = await asyncio.open_unix_connection(path)
    assert await asyncio.wait_for(reader.read(), 30) == b""
    writer.close()
    await server.close()


async def test_every_driver_of_a_pipeline_releases_its_brakes_and_others_do_not(folder) -> None:
    kafka = KafkaSettings(brokers="one:9092", consumer_group="g")
    released = []

    def releasing(name: str) -> dict[str, Any]:
        def release(request: dict[str, Any]) -> dict[str, Any]:
            released.append(name)
            return {"engines": [{"slot": 0, "held": 3}]}

        return {"release": release}

    other = KafkaSettings(brokers="two:9092", consumer_group="g")
    servers = [
        pipeline_socket(kafka, "a", releasing("a")),
        pipeline_socket(kafka, "b", releasing("b")),
        pipeline_socket(other, "c", releasing("c")),
    ]
    for server in servers:
        await server.start()
    reports = await asyncio.to_thread(release_brakes, kafka)
    assert sorted(report["worker"] for report in reports) == ["a", "b"]
    assert sorted(released) == ["a", "b"]
    (path,) = [path for path in folder.glob("*.sock") if path.name.startswith(servers[2]._prefix)]
    unknown = await asyncio.to_thread(ask, servers[2]._prefix, {"do": "dance"})
    assert unknown.reports[0]["error"] == "this version does not know 'dance'"
    assert path.exists()
    for server in servers:
        await server.close()
    with pytest.raises(RemoteError, match="no pipeline of consumer group 'g' on one:9092 is running on this machine"):
        release_brakes(kafka)


def test_a_driver_that_does_not_answer_is_named(folder, monkeypatch) -> None:
    monkeypatch.setattr(control_socket, "ANSWER_SECONDS", 0.1)
    kafka = KafkaSettings(consumer_group="g")
    prefix = pipeline_socket(kafka, "a", {})._prefix
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(folder / f"{prefix}00000000.sock"))
        silent.listen()
        with pytest.raises(RemoteError, match="did not answer within"):
            release_brakes(kafka)
