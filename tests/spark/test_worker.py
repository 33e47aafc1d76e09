"""An engine's process before it has its link to the driver."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from tidemill.config.settings import Settings
from tidemill.runtime.frames import LinkAddress
from tidemill.runtime.progress import EngineSummary, StopReason
from tidemill.spark.worker import DAEMON_VARIABLE, EngineJob, EngineProcess


@pytest.fixture
def daemon_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["true"]) as gone:
        monkeypatch.setenv(DAEMON_VARIABLE, str(gone.pid))


@pytest.fixture
def process() -> Iterator[EngineProcess]:
    settings = Settings.model_validate({"kafka": {"brokers": "127.0.0.1:1", "source_topic": "t"}})
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = LinkAddress("127.0.0.1", nobody.getsockname()[1], "secret")
        process = EngineProcess(EngineJob(0, 0, "w", address, settings, b"", {}))
        yield process
        process.release()


def test_an_engine_that_looks_for_its_driver_gives_up_when_spark_goes(process: EngineProcess) -> None:
    async def run() -> EngineSummary:
        asyncio.get_running_loop().call_later(0.5, os.kill, os.getpid(), signal.SIGHUP)
        return await process.run()

    began = time.monotonic()
    summary = asyncio.run(run())
    assert summary.reason is StopReason.FAILED
    assert "supervises" in (summary.error or "")
    assert time.monotonic() - began < 5  # it would look for ten seconds


@pytest.mark.usefixtures("daemon_is_gone")
def test_an_engine_whose_daemon_was_gone_before_it_began_does_not_look_for_its_driver(process: EngineProcess) -> None:
    began = time.monotonic()
    summary = asyncio.run(process.run())
    assert "supervises" in (summary.error or "")
    assert time.monotonic() - began < 5  # it would look for ten seconds


def test_an_engine_that_is_cancelled_while_it_looks_for_its_driver_says_nothing(process: EngineProcess) -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.run()

    asyncio.run(run())
