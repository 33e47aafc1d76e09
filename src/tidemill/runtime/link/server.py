"""The driver's side of the link between the driver and its engines; there is one TCP connection per engine.

`LinkServer` is the source of truth about engines: which ones are connected, silent or closed. It runs on an event loop
of its own thread and decides nothing; it reports events to a `LinkEvents`, in order, on that loop. The engine's side,
`EngineLink`, lives on the engine's loop.

Invariants: neither side trusts the other before it has proved that it knows the pipeline's secret, which is never sent
over the link. Nothing is encrypted; that is left to the network. Anything but a known frame closes the connection.
Every `on_hello` is followed by an `on_closed` for that connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol, TypeVar

import msgspec
import structlog

from tidemill.core.errors import RemoteError, describe_error
from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.beats import Beat, apply_beat
from tidemill.runtime.link.frames import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    AnswerFrame,
    BadFrameError,
    ChallengeFrame,
    EndedFrame,
    EventsFrame,
    FromDriver,
    FromEngine,
    HelloFrame,
    LinkAddress,
    LiveFrame,
    ProbedFrame,
    ProofFrame,
    ReadyFrame,
    RowsFrame,
    StoredFrame,
    WatchFrame,
    enable_keepalive,
    from_engine,
    pack_frame,
    receive_frame,
    send_frame,
)
from tidemill.runtime.link.live_tasks import LiveState
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.progress import EngineProgress, EngineSummary
from tidemill.runtime.link.proof import NONCE_BYTES, Side, is_proof, link_proof, new_nonce
from tidemill.runtime.link.questions import Questions, is_free
from tidemill.runtime.link.records import RecordSink
from tidemill.runtime.log.setup import throttle

log = structlog.get_logger(__name__)

#: How long a connection may take to say hello.
HELLO_SECONDS = 5.0
ResultT = TypeVar("ResultT")
#: Receives the state of an engine's executors, with the engine's slot and id.
TakeLive = Callable[[int, str, LiveState], None]


class LinkEvents(Protocol):
    """Receives the events of all links; called on the link's loop, in order, never concurrently.

    A link is the number that the server assigns to a connection which said hello; numbers are never reused.
    """

    def on_hello(self, link: int, hello: HelloFrame) -> None:
        """An engine connected; it waits for `Welcome` or `Refused`."""

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        """An engine sent a beat."""

    def on_ready(self, link: int) -> None:
        """An engine's `on_ready` is done."""

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        """An engine has ended; its connection closes next."""

    def on_closed(self, link: int) -> None:
        """A connection was closed, by either side; no other event follows for it."""


class LinkServer:
    """The driver's side of all links of one pipeline.

    Args:
        events: Receives the events.
        bind_host: The address to listen on.
        public_host: The address that engines connect to; by default `bind_host`.
        records: Stores the records of engines; None confirms and discards them.

    Example:
        >>> server = LinkServer(supervisors)  # doctest: +SKIP
        >>> address = server.start()  # doctest: +SKIP
    """

    def __init__(
        self,
        events: LinkEvents,
        *,
        bind_host: str = "127.0.0.1",
        public_host: str = "",
        records: RecordSink | None = None,
    ) -> None:
        """Create the server; `start` listens."""
        self._events = events
        self._records = records
        self._bind_host = bind_host
        self._public_host = public_host or bind_host
        self._secret = secrets.token_hex(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="tidemill-link", daemon=True)
        self._server: asyncio.Server | None = None
        #: Held while work is handed to the loop, and to set `_closed`.
        self._closing = threading.Lock()
        self._closed = False
        self._numbers = itertools.count(1)
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._snapshots: dict[int, EngineProgress] = {}
        self._hellos: dict[int, HelloFrame] = {}
        self._questions = Questions()
        self._take_live: TakeLive | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        #: Frames that wait for the end of a `together` block; None outside of one.
        self._together: list[tuple[asyncio.StreamWriter, bytes]] | None = None

    # -- any thread ----------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which `events` are called."""
        return self._loop

    def start(self) -> LinkAddress:
        """Listen, and return the address for engines.

        Raises:
            RemoteError: Listening on the address failed.
        """
        self._thread.start()
        try:
            port = self.call(self._listen())
        except OSError as error:
            self.close()
            raise RemoteError(
                f"cannot listen on {self._bind_host} for engines: {error.strerror}; set spark.driver.host in "
                "spark.conf to an address of this host that the engines can reach",
                retryable=False,
            ) from error
        return LinkAddress(self._public_host, port, self._secret)

    def call(self, coroutine: Coroutine[Any, Any, ResultT], seconds: float | None = None) -> ResultT:
        """Run a coroutine on the link's loop and wait for its result; not from that loop itself.

        Args:
            coroutine: The coroutine.
            seconds: How long to wait; None waits until it is done.

        Raises:
            RemoteError: The link is being closed, or the coroutine took too long and is cancelled.
        """
        with self._closing:
            if self._closed:
                coroutine.close()
                raise RemoteError("the link to the engines is closed: the pipeline is stopping", retryable=False)
            # Started while the lock is held, so before `close` can stop the loop.
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(seconds)
        except TimeoutError:
            if not future.cancel():
                return future.result()  # the call has ended; the TimeoutError may be its own
            raise RemoteError(f"the link to the engines did not answer within {seconds:g} s; try again") from None

    def confirm(self, engine_id: str, seq: int) -> None:
        """Tell an engine that its records of this number were processed; a disconnected engine is not told."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._confirm, engine_id, seq)

    def close(self) -> None:
        """Close all connections and end the thread; a second call does nothing."""
        with self._closing:
            self._closed = True
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    # -- the loop ---------------------------------------------------------------------------------------

    def send(self, link: int, frame: FromDriver) -> None:
        """Send to an engine, unless its link is closed. Only on the link's loop."""
        writer = self._links.get(link)
        if writer is None or writer.is_closing():
            return
        if self._together is None:
            send_frame(writer, frame)
        else:
            self._together.append((writer, pack_frame(frame)))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Collect all frames sent in the block and write them together at its end. Only on the link's loop.

        An engine on this machine starts to work once it has its command, on the cores that the driver needs for the
        other engines' frames. All work that is possible before the first write is therefore done before it.
        """
        if self._together is not None:
            yield
            return
        self._together = []
        try:
            yield
        finally:
            self._send_together()
            self._together = None

    def _send_together(self) -> None:
        waiting, self._together = self._together or [], []
        for writer, data in waiting:
            writer.write(data)

    async def ask(self, link: int, topic: str, partition: int, offset: int) -> MessageStage | None:
        """Ask an engine where a message is; None if it is not open there. Only on the link's loop.

        Raises:
            RemoteError: There is no answer.
        """
        return await self._questions.ask(link, self._links.get(link), topic, partition, offset)

    async def probe(self, link: int, message: SourceMessage, seconds: float) -> ProbeReport:
        """Make an engine probe a message; see `Questions.probe`. Only on the link's loop."""
        return await self._questions.probe(link, self._links.get(link), message, seconds)

    def watch(self, take: TakeLive, seconds: float) -> None:
        """Let all engines report the work of their executors for `seconds`. Only on the link's loop.

        Args:
            take: Called on the loop with each state, the slot and the id of its engine; returns at once.
            seconds: How long; a later call extends it.
        """
        self._take_live = take
        for writer in self._links.values():
            if is_free(writer):
                send_frame(writer, WatchFrame(seconds))

    def close_link(self, link: int) -> None:
        """Close a connection once its frames are sent. Only on the link's loop."""
        writer = self._links.get(link)
        if writer is not None:
            if self._together:  # earlier frames are sent before the connection closes
                self._send_together()
            writer.close()

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _listen(self) -> int:
        self._server = await asyncio.start_server(self._serve, self._bind_host, 0)
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def _shut(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._writers):
            writer.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        if others:
            await asyncio.wait(others, timeout=1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        link: int | None = None
        try:
            enable_keepalive(writer)
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self._hello(reader, writer)
            link = next(self._numbers)
            self._links[link], self._hellos[link] = writer, hello
            self._events.on_hello(link, hello)
            while True:
                self._tell(link, from_engine.decode(await receive_frame(reader, MAX_FRAME_BYTES)))
        except (OSError, EOFError):
            pass  # the other side has closed the connection or is silent; `on_closed` reports it
        except (msgspec.DecodeError, BadFrameError) as error:
            log.warning("a connection to the link was closed", peer=_peer(writer), error=str(error))
        except Exception:
            log.exception("a connection to the link failed and is closed", peer=_peer(writer))
        finally:
            self._writers.discard(writer)
            writer.close()
            if link is not None:
                del self._links[link], self._hellos[link]
                self._snapshots.pop(link, None)
                self._questions.note_closed(link)
                self._events.on_closed(link)

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> HelloFrame:
        said = await receive_frame(reader, MAX_HELLO_BYTES)
        hello = from_engine.decode(said)
        if not isinstance(hello, HelloFrame) or len(hello.nonce) != NONCE_BYTES:
            raise BadFrameError("the first frame is not a hello")
        nonce = new_nonce()
        send_frame(writer, ChallengeFrame(nonce, link_proof(self._secret, Side.DRIVER, said, nonce)))
        answer = from_engine.decode(await receive_frame(reader, MAX_HELLO_BYTES))
        if not isinstance(answer, ProofFrame) or not is_proof(answer.proof, self._secret, Side.ENGINE, said, nonce):
            raise BadFrameError("the engine did not prove that it knows this pipeline's secret")
        return hello

    def _tell(self, link: int, frame: FromEngine) -> None:
        match frame:
            case Beat(changes=changes) as beat:
                before = self._snapshots.get(link)
                if before is None and not changes.whole:
                    raise BadFrameError("a first beat that does not cover all partitions")
                self._snapshots[link] = apply_beat(beat, before or EngineProgress())
                self._events.on_beat(link, self._snapshots[link])
            case ReadyFrame():
                self._events.on_ready(link)
            case EndedFrame(summary):
                self._events.on_ended(link, summary)
            case AnswerFrame() | ProbedFrame() as answer:
                self._questions.note_answer(link, answer)
            case LiveFrame(state):
                self._show(link, state)
            case RowsFrame() | EventsFrame():
                self._store(link, frame)
            case _:
                raise BadFrameError("unexpected second hello")

    def _show(self, link: int, state: LiveState) -> None:
        hello = self._hellos[link]
        try:
            if self._take_live is not None:
                self._take_live(hello.slot, hello.engine_id, state)
        except Exception as error:  # a fault of the live page must not end a link
            throttle(log, 60.0).error("the live page is not updated", error=describe_error(error), exc_info=error)

    def _store(self, link: int, frame: RowsFrame | EventsFrame) -> None:
        hello, records = self._hellos[link], self._records
        if records is None:
            self.send(link, StoredFrame(frame.seq))
        elif isinstance(frame, RowsFrame):
            records.put_rows(hello.engine_id, hello.slot, frame.seq, frame.table, frame.body, frame.count)
        else:
            records.put_events(hello.engine_id, hello.slot, frame.seq, frame.body, frame.count)

    def _confirm(self, engine_id: str, seq: int) -> None:
        for link, hello in self._hellos.items():
            if hello.engine_id == engine_id:
                self.send(link, StoredFrame(seq))


def _peer(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername"))
