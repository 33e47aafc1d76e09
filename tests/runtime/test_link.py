"""The link between driver and engines, over real TCP connections."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from tests.until import until

from tidemill.core.errors import RemoteError, UserActionError, escape_surrogates
from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link import frames
from tidemill.runtime.link.beats import Beat, PartitionChanges, whole_beat
from tidemill.runtime.link.engine import EngineLink
from tidemill.runtime.link.frames import (
    AskFrame,
    ChallengeFrame,
    DrainFrame,
    GoFrame,
    HelloFrame,
    LinkAddress,
    ProofFrame,
    RefusedFrame,
    WelcomeFrame,
)
from tidemill.runtime.link.live_tasks import LiveState, LiveTask
from tidemill.runtime.link.probe_report import ProbeReport, ProbeStatus
from tidemill.runtime.link.progress import (
    MAX_ERROR_CHARS,
    UNSENT,
    EngineProgress,
    EngineSummary,
    SinkStats,
    StopReason,
)
from tidemill.runtime.link.proof import Side, link_proof, new_nonce
from tidemill.runtime.link.server import LinkServer
from tidemill.runtime.loop.engine_tasks import EngineTasks

HELLO = HelloFrame(1, 5, 0, "engine", 42, "here")


class Driver:
    """Welcomes every engine under its slot's number, unless told to refuse; keeps what it is told."""

    def __init__(self) -> None:
        self.told: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.refuse = False
        self.server = LinkServer(self)
        self.address = self.server.start()

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        self.server.send(link, RefusedFrame("nobody is wanted") if self.refuse else WelcomeFrame(7))
        self.told.put(("hello", link, hello))

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        self.told.put(("beat", link, progress))

    def on_ready(self, link: int) -> None:
        self.told.put(("ready", link))

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        self.told.put(("ended", link, summary))

    def on_closed(self, link: int) -> None:
        self.told.put(("closed", link))

    async def next(self, what: str) -> tuple[Any, ...]:
        """Return the next thing of a kind, passing over others."""
        while True:
            event = await asyncio.to_thread(self.told.get, True, 10.0)
            if event[0] == what:
                return event

    def do(self, function: Callable[..., None], *args: Any) -> None:
        self.server.loop.call_soon_threadsafe(function, *args)


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = Driver()
    yield driver
    driver.server.close()


class Engine:
    def __init__(self, address: LinkAddress, **options: Any) -> None:
        self.commands: asyncio.Queue[frames.Command] = asyncio.Queue()
        self.lost: asyncio.Queue[str] = asyncio.Queue()
        self.consumed = 0
        hello = HELLO
        self.link = EngineLink(address, hello, self.beat, self.commands.put_nowait, self.lost.put_nowait, **options)

    def beat(self, whole: bool) -> Beat:
        self.consumed += 1
        if whole:
            return whole_beat(EngineProgress(consumed=self.consumed, committed={"t/0": 1, "t/1": 5}))
        return Beat(EngineProgress(consumed=self.consumed), PartitionChanges(committed={"t/0": self.consumed}))


async def raw(address: LinkAddress, data: bytes) -> bytes:
    """Send bytes, and return what comes until the other side closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(data)
    async with asyncio.timeout(30):
        answer = await reader.read()
    writer.close()
    return answer


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


async def test_an_engine_is_welcomed_and_its_snapshots_arrive(driver: Driver) -> None:
    engine = Engine(driver.address)
    assert await engine.link.connect() == 7
    _, link, hello = await driver.next("hello")
    assert (hello.slot, hello.job_token, hello.run_token, hello.pid) == (1, 5, 0, 42)
    first = (await driver.next("beat"))[2].consumed
    second = (await driver.next("beat"))[2]
    assert (second.consumed, second.committed) == (first + 1, {"t/0": first + 1, "t/1": 5})
    engine.link.ready()
    assert await driver.next("ready") == ("ready", link)
    summary = EngineSummary(1, StopReason.DRAINED, None, EngineProgress(consumed=9))
    await engine.link.close(summary)
    assert await driver.next("ended") == ("ended", link, summary)
    assert await driver.next("closed") == ("closed", link)


async def test_commands_reach_the_engine_in_order(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    driver.do(driver.server.send, link, GoFrame())
    driver.do(driver.server.send, link, DrainFrame())
    assert [await engine.commands.get(), await engine.commands.get()] == [GoFrame(), DrainFrame()]


async def connect_two(driver: Driver) -> dict[int, Engine]:
    """Return two engines by their links."""
    engines = {}
    for _ in range(2):
        engine = Engine(driver.address)
        await engine.link.connect()
        engines[(await driver.next("hello"))[1]] = engine
    return engines


async def test_what_is_sent_together_is_written_when_all_of_it_is_there(driver: Driver) -> None:
    engines = await connect_two(driver)
    written: list[bytes] = []
    seen: list[int] = []

    def send() -> None:
        for writer in driver.server._links.values():
            transport = writer.transport
            transport.write = lambda data, write=transport.write: (written.append(data), write(data))  # type: ignore[method-assign]
        with driver.server.together():
            for link in engines:
                driver.server.send(link, GoFrame())
                with driver.server.together():  # as a part of something larger
                    driver.server.send(link, DrainFrame(keep_membership=True))
            seen.append(len(written))
        seen.append(len(written))

    driver.do(send)
    for engine in engines.values():
        assert [await engine.commands.get(), await engine.commands.get()] == [
            GoFrame(),
            DrainFrame(keep_membership=True),
        ]
    await until(lambda: len(seen) == 2)  # engines may be quicker than the thread that has written
    assert seen == [0, 4]


async def test_what_is_sent_together_is_sent_before_its_link_is_closed_and_in_spite_of_an_error(driver: Driver) -> None:
    engines = await connect_two(driver)
    first, second = engines
    told: queue.SimpleQueue[str] = queue.SimpleQueue()

    def send() -> None:
        try:
            with driver.server.together():
                driver.server.send(first, RefusedFrame("replaced"))
                driver.server.close_link(first)
                driver.server.send(second, GoFrame())
                driver.server.send(second, RefusedFrame("\ud800"))
        except UnicodeEncodeError:
            told.put("one frame cannot be sent")
        driver.server.send(second, DrainFrame())

    driver.do(send)
    assert await asyncio.wait_for(engines[first].lost.get(), 30) == "replaced"
    assert [await engines[second].commands.get(), await engines[second].commands.get()] == [GoFrame(), DrainFrame()]
    assert told.get(timeout=60) == "one frame cannot be sent"


async def test_an_engine_whose_connection_breaks_comes_back_with_its_token(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    engine.link.ready()
    _, first, _ = await driver.next("hello")
    driver.do(driver.server.close_link, first)
    _, second, hello = await driver.next("hello")
    assert second != first
    assert (await driver.next("beat"))[2].committed["t/1"] == 5, "the first beat of a connection tells everything"
    assert (hello.run_token, hello.ready) == (7, True)
    await driver.next("beat")
    assert engine.lost.empty()


async def test_an_engine_that_cannot_come_back_is_told_that_its_driver_is_lost(driver: Driver) -> None:
    engine = Engine(driver.address, reconnect_seconds=0.5)
    await engine.link.connect()
    driver.server.close()
    assert "does not answer" in await asyncio.wait_for(engine.lost.get(), 30)


async def test_an_engine_that_is_refused_stops(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    driver.do(driver.server.send, link, RefusedFrame("replaced"))
    assert await asyncio.wait_for(engine.lost.get(), 30) == "replaced"
    driver.refuse = True
    with pytest.raises(RemoteError, match="nobody is wanted"):
        await Engine(driver.address).link.connect()


async def test_an_engine_gives_up_where_nobody_listens() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nowhere = LinkAddress("127.0.0.1", taken.getsockname()[1], "secret")
        with pytest.raises(RemoteError, match=r"spark\.driver\.host"):
            await Engine(nowhere, reconnect_seconds=0.5).link.connect()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        struct.pack(">I", 100_000_000),
        framed(b"\xc1 is no msgpack"),
        framed(msgspec.msgpack.encode(frames.ReadyFrame())),
        framed(msgspec.msgpack.encode(HELLO)),
        framed(msgspec.msgpack.encode(msgspec.structs.replace(HELLO, nonce=b"short"))),
    ],
    ids=["http", "endless", "garbage", "no hello", "no nonce", "a short nonce"],
)
async def test_a_stranger_is_cut_off_without_an_answer(driver: Driver, data: bytes) -> None:
    assert await raw(driver.address, data) == b""
    assert driver.told.empty()


async def test_a_frame_that_is_too_long_closes_the_link(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    assert engine.link._writer is not None
    engine.link._writer.write(struct.pack(">I", frames.MAX_FRAME_BYTES + 1))
    assert await driver.next("closed") == ("closed", link)


async def challenged(
    address: LinkAddress, hello: bytes
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, ChallengeFrame]:
    """Say hello; return the connection and what the driver answers."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(framed(hello))
    challenge = frames.from_driver.decode(await frames.receive_frame(reader, 4096))
    assert isinstance(challenge, ChallengeFrame)
    return reader, writer, challenge


def a_hello() -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(HELLO, nonce=new_nonce()))


async def test_an_engine_is_believed_only_for_the_hello_and_the_challenge_that_it_proved(driver: Driver) -> None:
    secret, hello, other = driver.address.secret, a_hello(), a_hello()

    async def answer(proof: Callable[[ChallengeFrame], Any]) -> bytes:
        reader, writer, challenge = await challenged(driver.address, hello)
        assert challenge.proof == link_proof(secret, Side.DRIVER, hello, challenge.nonce)
        assert secret.encode() not in challenge.proof + challenge.nonce
        frames.send_frame(writer, proof(challenge))
        async with asyncio.timeout(30):
            got = await reader.read(100)
        writer.close()
        return got

    _, _, earlier = await challenged(driver.address, hello)
    wrong: list[Callable[[ChallengeFrame], Any]] = [
        lambda c: ProofFrame(link_proof("a guess", Side.ENGINE, hello, c.nonce)),
        lambda c: ProofFrame(c.proof),
        lambda c: ProofFrame(link_proof(secret, Side.ENGINE, other, c.nonce)),
        lambda c: ProofFrame(link_proof(secret, Side.ENGINE, hello, earlier.nonce)),
        lambda c: ProofFrame(b""),
        lambda c: frames.ReadyFrame(),
    ]
    for proof in wrong:
        assert await answer(proof) == b""
    assert driver.told.empty()
    welcome = await answer(lambda c: ProofFrame(link_proof(secret, Side.ENGINE, hello, c.nonce)))
    assert welcome == framed(msgspec.msgpack.encode(WelcomeFrame(7)))
    await driver.next("hello")


async def test_a_second_hello_closes_the_link(driver: Driver) -> None:
    hello = a_hello()
    _, writer, challenge = await challenged(driver.address, hello)
    frames.send_frame(writer, ProofFrame(link_proof(driver.address.secret, Side.ENGINE, hello, challenge.nonce)))
    await driver.next("hello")
    writer.write(framed(hello))
    await driver.next("closed")
    writer.close()


@pytest.mark.parametrize(
    "answer",
    [WelcomeFrame(7), ChallengeFrame(b"n" * 32, b"p" * 32), DrainFrame()],
    ids=["welcome without a challenge", "a challenge without a proof", "a command"],
)
async def test_an_engine_tells_nothing_to_what_is_not_its_driver(answer: Any) -> None:
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heard.append(await frames.receive_frame(reader, 4096))
        frames.send_frame(writer, answer)
        heard.append(await reader.read())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = LinkAddress("127.0.0.1", server.sockets[0].getsockname()[1], "hush")
    with pytest.raises(RemoteError, match="does not know this pipeline's secret"):
        await Engine(address, reconnect_seconds=1.0).link.connect()
    server.close()
    assert set(heard[1::2]) <= {b""}
    assert all(b"hush" not in each for each in heard)
    assert all(isinstance(frames.from_engine.decode(each), HelloFrame) for each in heard[::2])


async def test_a_slow_driver_does_not_fill_the_engines_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.runtime.link.engine.BEAT_SECONDS", 0.0)
    welcomed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello, nonce = await frames.receive_frame(reader, 4096), new_nonce()
        frames.send_frame(writer, ChallengeFrame(nonce, link_proof("secret", Side.DRIVER, hello, nonce)))
        await frames.receive_frame(reader, 4096)
        frames.send_frame(writer, WelcomeFrame(1))
        welcomed.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1024)
    address = LinkAddress("127.0.0.1", server.sockets[0].getsockname()[1], "secret")
    engine = Engine(address)
    await engine.link.connect()
    transport = engine.link._writer.transport  # type: ignore[union-attr]
    consumed = -1
    async with asyncio.timeout(30):
        while consumed != engine.consumed or not engine.consumed:
            consumed = engine.consumed
            await asyncio.sleep(0.2)
    assert transport.get_write_buffer_size() < 2 * 256 * 1024
    transport.abort()
    server.close()


def test_no_secret_is_shown() -> None:
    assert "hush" not in repr(LinkAddress("h", 1, "hush"))


def test_a_server_that_never_started_can_be_closed() -> None:
    LinkServer(object()).close()  # type: ignore[arg-type]


async def do_nothing() -> None:
    pass


def test_a_call_when_the_loop_has_ended_is_refused_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    server = LinkServer(object())  # type: ignore[arg-type]
    server.start()
    close_loop, refused = server.loop.close, []

    def close() -> None:
        with pytest.raises(RemoteError, match="the pipeline is stopping"):
            server.call(do_nothing(), 60.0)
        refused.append("before the loop is closed")
        close_loop()

    monkeypatch.setattr(server.loop, "close", close)
    server.close()

    assert refused
    with pytest.raises(RemoteError, match="the pipeline is stopping"):
        server.call(do_nothing())


def test_a_call_gives_up_when_the_loop_does_not_answer_in_time() -> None:
    server = LinkServer(object())  # type: ignore[arg-type]
    server.start()
    blocked, go_on, done = threading.Event(), threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        go_on.wait(60)

    async def note() -> None:
        await asyncio.sleep(0)
        done.set()

    async def fail() -> None:
        raise TimeoutError("its own")

    server.loop.call_soon_threadsafe(block)
    assert blocked.wait(60)
    try:
        with pytest.raises(RemoteError, match=r"did not answer within 0\.05 s"):
            server.call(note(), 0.05)
    finally:
        go_on.set()
    with pytest.raises(TimeoutError, match="its own"):
        server.call(fail(), 60.0)
    server.close()
    assert not done.is_set()


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(RemoteError, match=r"spark\.driver\.host"):
        LinkServer(object(), bind_host="192.0.2.77").start()  # type: ignore[arg-type]


def texts(text: str) -> EngineProgress:
    stats = SinkStats(refused=3, last_error=text)
    return EngineProgress(
        consumed=9, waits={"kafka": text}, slowest=[(2.5, text, text)], sinks={"sinks.kafka.out": stats}
    )


@pytest.mark.parametrize("text", ["\ud800.jpg", "x" * (frames.MAX_FRAME_BYTES + 1)], ids=["lone surrogate", "too long"])
async def test_a_snapshot_that_cannot_be_sent_goes_without_its_texts(driver: Driver, text: str) -> None:
    engine = Engine(driver.address)
    engine.link._beat_of = lambda whole: whole_beat(texts(text))
    await engine.link.connect()
    await driver.next("beat")
    progress = (await driver.next("beat"))[2]
    assert progress.consumed == 9
    assert progress.waits == {"kafka": UNSENT}
    assert progress.slowest == [(2.5, UNSENT, "")]
    assert progress.sinks["sinks.kafka.out"] == SinkStats(refused=3, last_error=UNSENT)
    await engine.link.close(EngineSummary(1, StopReason.FAILED, f"OSError: {text}", texts(text)))
    summary = (await driver.next("ended"))[2]
    assert summary.error.startswith(f"OSError: {escape_surrogates(text)[:5]}")
    assert len(summary.error) <= MAX_ERROR_CHARS
    assert summary.progress.consumed == 9


async def test_the_end_of_the_beats_is_told(driver: Driver) -> None:
    faults: asyncio.Queue[str] = asyncio.Queue()
    engine = Engine(driver.address, tasks=EngineTasks(faults.put_nowait))

    def broken(whole: bool) -> Beat:
        raise LookupError("no snapshot")

    engine.link._beat_of = broken
    await engine.link.connect()
    fault = await asyncio.wait_for(faults.get(), 30)
    assert "the beats to the driver failed: LookupError: no snapshot" in fault
    await engine.link.close(EngineSummary(1, StopReason.FAILED, fault))
    await driver.next("ended")


def ask(driver: Driver, link: int, offset: int = 17) -> Any:
    return asyncio.wrap_future(
        asyncio.run_coroutine_threadsafe(driver.server.ask(link, "t", 0, offset), driver.server.loop)
    )


async def test_an_engine_answers_where_a_message_is(driver: Driver) -> None:
    engine = Engine(driver.address)
    running = MessageStage(stage=OpenStage.TASK, task_id="task-17", seconds=3.0, pid=42, attempt=1, attempts=4)
    engine.link.answers.find = lambda topic, partition, offset: running if offset == 17 else None
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    assert await ask(driver, link) == running
    assert await ask(driver, link, 18) is None


async def test_a_question_that_cannot_be_answered_says_why_and_ends_no_link(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    assert await ask(driver, link) is None, "there is no engine yet"

    def fail(topic: str, partition: int, offset: int) -> None:
        raise ValueError("a bug")

    engine.link.answers.find = fail
    with pytest.raises(RemoteError, match="the engine failed to look up the message: ValueError: a bug"):
        await ask(driver, link)
    engine.link.answers.find = lambda topic, partition, offset: MessageStage(stage=OpenStage.TASK, task_id="\ud800")
    with pytest.raises(RemoteError, match="the engine failed to look up the message: UnicodeEncodeError"):
        await ask(driver, link)
    engine.link.answers.find = lambda topic, partition, offset: MessageStage(stage=OpenStage.COMMIT)
    assert (await ask(driver, link)).stage is OpenStage.COMMIT, "the link lives"
    monkeypatch.setattr("tidemill.runtime.link.questions.ASK_SECONDS", 0.05)
    monkeypatch.setattr(engine.link.answers, "answer", lambda ask, writer: None)
    with pytest.raises(RemoteError, match=r"does not answer within .* s: its event loop may be blocked"):
        await ask(driver, link)
    monkeypatch.setattr("tidemill.runtime.link.questions.ASK_SECONDS", 30.0)
    waiting = ask(driver, link)
    driver.do(driver.server.close_link, link)
    with pytest.raises(RemoteError, match="closed"):
        await waiting
    with pytest.raises(RemoteError, match="busy, or closed"):
        await ask(driver, link)


async def test_questions_and_answers_wait_while_much_else_does(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(driver.address)
    engine.link.answers.find = lambda topic, partition, offset: MessageStage(stage=OpenStage.COMMIT)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    free = threading.Event()
    monkeypatch.setattr("tidemill.runtime.link.questions.is_free", lambda writer: free.is_set())
    with pytest.raises(RemoteError, match="busy"):
        await ask(driver, link)
    engine.link.answers.answer(AskFrame(1, "t", 0, 17), None)
    assert engine.link.answers._waiting, "it waits for the next beat"
    before = (await driver.next("beat"))[2].consumed
    assert engine.link.answers._waiting
    free.set()
    await until(lambda: not engine.link.answers._waiting)
    assert (await driver.next("beat"))[2].consumed > before, "beats go on"


class Watched:
    """Is watched for as long as a driver says."""

    def __init__(self) -> None:
        self.renewed: list[float] = []
        self.fails = False

    def renew(self, seconds: float) -> None:
        self.renewed.append(seconds)

    def take_state(self) -> LiveState | None:
        if self.fails:
            raise ValueError("a bug")
        task = LiveTask(0, "task-1", "", 1, "t", 0, 17, 1.0)
        return LiveState(8, [task], [], 0, 0, [], 0, [], []) if self.renewed else None


async def test_what_executors_do_is_sent_only_while_the_driver_watches(driver: Driver) -> None:
    engine = Engine(driver.address)
    engine.link.live = live = Watched()
    await engine.link.connect()
    taken: queue.SimpleQueue[tuple[int, str, LiveState]] = queue.SimpleQueue()
    for _ in range(3):
        await driver.next("beat")
    assert taken.empty()
    driver.do(driver.server.watch, lambda *given: taken.put(given), 5.0)
    slot, engine_id, state = await asyncio.to_thread(taken.get, True, 10.0)
    assert (slot, engine_id, state.running[0].task_id) == (1, "engine", "task-1")
    assert live.renewed == [5.0]
    live.fails = True
    before = (await driver.next("beat"))[2].consumed
    while (await driver.next("beat"))[2].consumed < before + 2:
        pass
    assert engine.lost.empty(), "a bug there ends no link"


class Probing:
    """Answers probes as a test says."""

    def __init__(self, answer: ProbeReport | Exception) -> None:
        self.answer = answer
        self.probed: list[tuple[SourceMessage, float]] = []
        self.gate = asyncio.Event()
        self.gate.set()

    async def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        self.probed.append((message, seconds))
        await self.gate.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def probing(driver: Driver, link: int, message: SourceMessage) -> Future[ProbeReport]:
    return asyncio.run_coroutine_threadsafe(driver.server.probe(link, message, 3.0), driver.server.loop)


async def test_a_message_is_probed_by_an_engine_whose_beats_go_on(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    large = SourceMessage("t", 3, 17, b"\xff", b"v" * 1024 * 1024, (("h", None),), 1_790_000_000_000)
    report = ProbeReport(ProbeStatus.DONE, "well", 0.5, sinks={"sinks.kafka.x": 1})
    engine.link.answers.prober = source = Probing(report)
    source.gate.clear()
    answer = asyncio.wrap_future(probing(driver, link, large))
    await until(lambda: source.probed)
    for _ in range(3):
        await driver.next("beat")
    source.gate.set()
    assert await answer == report
    assert source.probed == [(large, 3.0)]


async def test_why_a_message_is_not_probed_is_told(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    small = SourceMessage("t", 3, 17)
    with pytest.raises(UserActionError, match=r"debug\.probe_enabled"):
        await asyncio.wrap_future(probing(driver, link, small))
    engine.link.answers.prober = Probing(UserActionError("it is draining"))
    with pytest.raises(UserActionError, match="it is draining"):
        await asyncio.wrap_future(probing(driver, link, small))
    engine.link.answers.prober = Probing(RuntimeError("a bug \ud800"))
    with pytest.raises(UserActionError, match="RuntimeError: a bug"):
        await asyncio.wrap_future(probing(driver, link, small))
    engine.link.answers.prober = Probing(ProbeReport(ProbeStatus.DONE, "\ud800", 0.5))
    with pytest.raises(UserActionError, match="UnicodeEncodeError"):
        await asyncio.wrap_future(probing(driver, link, small))
    with pytest.raises(RemoteError, match="cannot be sent to an engine"):
        await asyncio.wrap_future(probing(driver, link, SourceMessage("\ud800", 3, 17)))
    with pytest.raises(RemoteError, match="cannot be sent to an engine"):
        await asyncio.wrap_future(probing(driver, link, SourceMessage("t", 3, 17, None, b"x" * 5 * 1024 * 1024)))
    engine.link.answers.prober = Probing(ProbeReport(ProbeStatus.DONE, "well", 0.5))
    assert (await asyncio.wrap_future(probing(driver, link, small))).text == "well"


async def test_a_probe_of_an_engine_that_is_gone_ends(driver: Driver) -> None:
    engine = Engine(driver.address)
    await engine.link.connect()
    _, link, _ = await driver.next("hello")
    engine.link.answers.prober = source = Probing(ProbeReport(ProbeStatus.DONE, "well", 0.5))
    source.gate.clear()
    answer = asyncio.wrap_future(probing(driver, link, SourceMessage("t", 3, 17)))
    await until(lambda: source.probed)
    driver.do(driver.server.close_link, link)
    with pytest.raises(RemoteError, match="the link to the engine was closed"):
        await answer
    with pytest.raises(RemoteError, match="busy, or closed"):
        await asyncio.wrap_future(probing(driver, link, SourceMessage("t", 3, 17)))
    await driver.next("hello")
    source.gate.set()
    await driver.next("beat")
