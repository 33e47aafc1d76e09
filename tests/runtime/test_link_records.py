"""What engines record, on its way over real connections that break, stall and end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.runtime.test_link import Driver, Engine
from tests.until import until

from tidemill.core.recorder.outgoing import EVENTS, OutgoingFrames
from tidemill.runtime.link import engine as engine_link
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.runtime.link.server import LinkServer

KIB = 1024


class Store:
    """Keeps what it is given, and confirms it unless it is told not to."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, int, str, bytes]] = []
        self.counts: list[int] = []
        self.confirms = True
        self.confirm: Callable[[str, int], None] = lambda engine_id, seq: None

    def put_rows(self, engine_id: str, slot: int, seq: int, table: str, body: bytes, count: int) -> None:
        self.counts.append(count)
        self.got.append((engine_id, slot, seq, table, body))
        if self.confirms:
            threading.Thread(target=self.confirm, args=(engine_id, seq)).start()

    def put_events(self, engine_id: str, slot: int, seq: int, body: bytes, count: int) -> None:
        self.put_rows(engine_id, slot, seq, EVENTS, body, count)

    @property
    def seqs(self) -> list[int]:
        return [each[2] for each in self.got]


class RecordingDriver(Driver):
    """A driver that stores what engines record."""

    def __init__(self) -> None:
        super().__init__()
        self.server.close()
        self.store = Store()
        self.server = LinkServer(self, records=self.store)
        self.store.confirm = self.server.confirm
        self.address = self.server.start()


class Cable:
    """A connection to a driver that can be cut, for a while."""

    def __init__(self, address: LinkAddress) -> None:
        self._to = address
        self._pairs: list[asyncio.StreamWriter] = []
        self._whole = True

    async def lay(self) -> LinkAddress:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return LinkAddress("127.0.0.1", self._server.sockets[0].getsockname()[1], self._to.secret)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._whole:
            writer.close()
            return
        there, back = await asyncio.open_connection(self._to.host, self._to.port)
        self._pairs += [writer, back]
        await asyncio.gather(self._copy(reader, back), self._copy(there, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(KIB * KIB):
                writer.write(data)
                await writer.drain()
        writer.close()

    def cut(self) -> None:
        self._whole = False
        for writer in self._pairs:
            writer.transport.abort()
        self._pairs.clear()

    def mend(self) -> None:
        self._whole = True


@pytest.fixture
def driver() -> Iterator[RecordingDriver]:
    driver = RecordingDriver()
    yield driver
    driver.server.close()


async def connect(address: LinkAddress, driver: RecordingDriver) -> Engine:
    engine = Engine(address)
    await engine.link.connect()
    await driver.next("hello")
    return engine


def frames_of(**limits: int) -> OutgoingFrames:
    values = {"max_bytes": 32 * KIB * KIB, "max_events": 50_000, "window_bytes": 512 * KIB} | limits
    return OutgoingFrames(**values)


def summary(**counts: Any) -> EngineSummary:
    return EngineSummary(1, StopReason.DRAINED, None, EngineProgress(**counts))


async def test_rows_and_events_arrive_in_order_with_whose_they_are_and_are_forgotten_once_stored(
    driver: RecordingDriver,
) -> None:
    engine, frames = await connect(driver.address, driver), frames_of()
    frames.add("messages", b"some rows", 3)
    frames.add(EVENTS, b"some events", 2)
    engine.link.carry(frames)
    await until(lambda: frames.is_empty)
    assert driver.store.got == [
        ("engine", 1, 1, "messages", b"some rows"),
        ("engine", 1, 2, EVENTS, b"some events"),
    ]
    await engine.link.close(summary())
    assert frames.dropped == 0


async def test_what_was_not_confirmed_before_the_link_broke_is_sent_again_under_its_number(
    driver: RecordingDriver,
) -> None:
    cable = Cable(driver.address)
    engine, frames = await connect(await cable.lay(), driver), frames_of()
    engine.link.carry(frames)
    driver.store.confirms = False
    for n in range(3):
        frames.add("tasks", b"%d" % n, 1)
    await until(lambda: driver.store.seqs == [1, 2, 3])
    cable.cut()
    for n in range(3, 5):
        frames.add("tasks", b"%d" % n, 1)
    await until(lambda: engine.link._writer is not None and engine.link._writer.is_closing())
    driver.store.confirms = True
    cable.mend()
    await until(lambda: frames.is_empty)
    assert driver.store.seqs == [1, 2, 3, 1, 2, 3, 4, 5]
    assert {seq: body for _, _, seq, _, body in driver.store.got} == {n + 1: b"%d" % n for n in range(5)}
    await engine.link.close(summary())


async def test_beats_keep_coming_while_a_store_stalls_and_megabytes_wait(driver: RecordingDriver) -> None:
    engine, frames = await connect(driver.address, driver), frames_of(max_bytes=4 * KIB * KIB)
    engine.link.carry(frames)
    driver.store.confirms = False
    for _ in range(100):
        frames.add("messages", b"x" * 128 * KIB, 1000)
    await until(lambda: len(driver.store.got) >= 4)
    for _ in range(8):
        await driver.next("beat")
    assert len(driver.store.got) == 4, "no more than the window is under way"
    assert frames.size_bytes <= 4 * KIB * KIB
    assert frames.dropped == 68_000


async def test_the_end_waits_for_the_rest_and_tells_what_was_lost_before(driver: RecordingDriver) -> None:
    engine, frames = await connect(driver.address, driver), frames_of(max_events=10)
    frames.add(EVENTS, b"too many", 11)
    engine.link.carry(frames)
    for n in range(40):
        frames.add("messages", b"%d" % n * 64 * KIB, 100)
    await engine.link.close(summary(consumed=9))
    ended = (await driver.next("ended"))[2]
    assert (ended.progress.consumed, ended.progress.recorder_dropped) == (9, 11)
    assert driver.store.seqs == list(range(2, 42))


async def test_the_end_does_not_wait_longer_than_a_second_for_a_store_that_stalls(driver: RecordingDriver) -> None:
    engine, frames = await connect(driver.address, driver), frames_of()
    engine.link.carry(frames)
    driver.store.confirms = False
    frames.add("messages", b"rows", 7)
    begun = time.monotonic()
    await engine.link.close(summary())
    assert time.monotonic() - begun < engine_link.RECORD_SECONDS + 5
    assert (await driver.next("ended"))[2].progress.recorder_dropped == 7


async def test_a_driver_that_stores_nothing_confirms_everything() -> None:
    driver = Driver()
    try:
        engine, frames = Engine(driver.address), frames_of()
        await engine.link.connect()
        engine.link.carry(frames)
        frames.add("messages", b"rows", 7)
        await until(lambda: frames.is_empty)
        await engine.link.close(summary())
        assert frames.dropped == 0
    finally:
        driver.server.close()


async def test_a_confirmation_for_an_engine_that_is_gone_disturbs_nobody(driver: RecordingDriver) -> None:
    driver.server.confirm("nobody", 1)
    engine = await connect(driver.address, driver)
    await engine.link.close(summary())
    await driver.next("closed")
    driver.server.close()
    driver.server.confirm("engine", 1)


async def test_without_a_link_the_end_leaves_what_was_not_sent_to_the_driver_to_count(
    driver: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_link, "RECORD_SECONDS", 0.1)
    engine, frames = await connect(driver.address, driver), frames_of()
    engine.link.carry(frames)
    driver.store.confirms = False
    await asyncio.to_thread(driver.server.close)
    await until(lambda: not engine.link._is_connected)
    frames.add("messages", b"rows", 7)
    end = summary(recorder_dropped=2)
    await engine.link.close(end)
    assert (end.progress.recorder_dropped, frames.dropped) == (2, 7)
