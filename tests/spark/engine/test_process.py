"""An engine's process before it has its link to the driver."""

from __future__ import annotations

import asyncio
import io
import os
import pickle
import queue
import signal
import socket
import subprocess
import time
from collections.abc import Iterator

import msgspec
import pytest
from pyspark import cloudpickle
from structlog.testing import capture_logs
from tests.spark.fake_engine import build
from tests.until import slack

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.link.beats import Beat, whole_beat
from tidemill.runtime.link.frames import (
    BeginFrame,
    Command,
    ExitFrame,
    GoFrame,
    HelloFrame,
    LinkAddress,
    RefusedFrame,
    WelcomeFrame,
)
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.runtime.link.server import LinkServer
from tidemill.runtime.log import writer
from tidemill.spark.engine.process import EngineJob, EngineProcess, run_slot
from tidemill.spark.engine.process_deadline import DAEMON_VARIABLE, DEADLINE_EXIT, ProcessDeadline


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
    assert "no longer supervised" in (summary.error or "")
    assert time.monotonic() - began < slack(5)  # it would look for ten seconds


@pytest.mark.usefixtures("daemon_is_gone")
def test_an_engine_whose_daemon_was_gone_before_it_began_does_not_look_for_its_driver(process: EngineProcess) -> None:
    began = time.monotonic()
    summary = asyncio.run(process.run())
    assert "no longer supervised" in (summary.error or "")
    assert time.monotonic() - began < slack(5)  # it would look for ten seconds


def test_an_engine_that_is_cancelled_while_it_looks_for_its_driver_says_nothing(process: EngineProcess) -> None:
    async def run() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await process.run()

    asyncio.run(run())


class Driver:
    """Welcomes its engine, and tells it to begin if it is to."""

    def __init__(self, *commands: Command) -> None:
        self.commands = commands
        self.ended: queue.SimpleQueue[EngineSummary] = queue.SimpleQueue()
        self.server = LinkServer(self)

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        for frame in (WelcomeFrame(1), *self.commands):
            self.server.send(link, frame)

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        pass

    def on_ready(self, link: int) -> None:
        pass

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        self.ended.put(summary)

    def on_closed(self, link: int) -> None:
        pass


def test_an_engine_that_was_replaced_before_it_connected_ends_without_an_error() -> None:
    driver = Driver()
    driver.on_hello = lambda link, hello: driver.server.send(link, RefusedFrame("it was replaced"))  # type: ignore[method-assign]
    settings = Settings.model_validate({"kafka": {"brokers": "127.0.0.1:1", "source_topic": "t"}})
    process = EngineProcess(EngineJob(3, 0, "w", driver.server.start(), settings, pickle.dumps(None), {}))
    try:
        with capture_logs() as logs:
            summary = asyncio.run(asyncio.wait_for(process.run(), 30))
    finally:
        process.release()
        driver.server.close()

    assert "it was replaced" in (summary.error or "")
    assert [(entry["log_level"], entry["reason"]) for entry in logs] == [("info", "it was replaced")]


@pytest.mark.parametrize("commands", [(), (BeginFrame(), GoFrame())], ids=["before it begins", "running"])
def test_an_engine_whose_beats_end_fails_by_name_and_does_not_fall_silent(commands: tuple[Command, ...]) -> None:
    driver = Driver(*commands)
    settings = Settings.model_validate({"kafka": {"brokers": "127.0.0.1:1", "source_topic": "t"}})
    handler = cloudpickle.dumps(Handler())
    process = EngineProcess(EngineJob(3, 0, "w", driver.server.start(), settings, handler, {}), build)
    beats = 0

    def broken(whole: bool) -> Beat:
        nonlocal beats
        beats += 1
        if beats < 3:
            return whole_beat(EngineProgress())
        raise LookupError("no snapshot")

    process._beat = broken  # type: ignore[method-assign]
    try:
        summary = asyncio.run(asyncio.wait_for(process.run(), 30))
        assert driver.ended.get(timeout=60) == summary
    finally:
        process.release()
        driver.server.close()
    assert (summary.slot, summary.reason) == (3, StopReason.FAILED)
    assert "the beats to the driver failed: LookupError: no snapshot" in (summary.error or "")


def test_an_engine_that_is_told_to_end_at_once_writes_its_counts_before(
    process: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, at_exit = io.StringIO(), []
    monkeypatch.setattr(writer, "_CURRENT", writer._Current())
    writer.replace_writer(writer.LogWriter(lambda entry: f"{entry['event']} {entry.get('repeated')}", stream))
    monkeypatch.setattr(os, "_exit", lambda status: at_exit.append((status, stream.getvalue())))
    process._deadline = ProcessDeadline(lambda: None)
    for _ in range(3):
        writer._CURRENT.writer.write({"event": "slow"})  # type: ignore[union-attr]

    process._on_command(ExitFrame())

    assert at_exit == [(DEADLINE_EXIT, "slow None\nslow 2\n")]
    assert process._deadline._at is not None  # it ends although standard error is blocked


def test_the_summary_of_an_engine_is_told_whatever_is_in_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    said = EngineSummary(0, StopReason.FAILED, "no file \ud800", EngineProgress(consumed=3, waits={"kafka": "\ud800"}))
    monkeypatch.setattr("tidemill.spark.engine.process._run_to_summary", lambda job: said)
    (encoded,) = run_slot(None)  # type: ignore[arg-type]
    summary = msgspec.msgpack.decode(encoded, type=EngineSummary)
    assert (summary.error, summary.progress.consumed) == ("no file \\ud800", 3)
