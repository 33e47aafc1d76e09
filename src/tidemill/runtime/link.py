"""The link between the driver and its engines: one TCP connection per engine.

The driver's side (`LinkServer`) is the truth about engines: who said hello, who is silent, who is gone. It
runs on an event loop of its own thread and decides nothing: it tells a `LinkEvents` what happened, in order,
on that loop. The engine's side (`EngineLink`) lives in the engine's loop.

Invariants: neither side believes anything before the other has proved that it knows the pipeline's secret, which
never travels over the link; nothing is encrypted, which is the network's part; whatever is not a known frame closes
the connection; whoever is told of a hello is told of that connection's end. An engine that is refused, or that
cannot reach its driver for 10 s, is told so once and has to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import structlog

from tidemill.core.errors import InvariantError, RemoteError, describe_error
from tidemill.runtime.beats import Beat, snapshot_after
from tidemill.runtime.engine_tasks import EngineTasks
from tidemill.runtime.link_messages import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    BadFrameError,
    Challenge,
    Command,
    Ended,
    FromDriver,
    FromEngine,
    Hello,
    LinkAddress,
    Proof,
    Ready,
    Refused,
    Welcome,
    from_driver,
    from_engine,
    receive_frame,
    send_frame,
)
from tidemill.runtime.link_proof import NONCE_BYTES, Side, is_proof, link_proof, new_nonce
from tidemill.runtime.log import limited
from tidemill.runtime.progress import EngineProgress, EngineSummary, summary_without_texts

log = structlog.get_logger(__name__)

#: How long a connection may take to say hello.
HELLO_SECONDS = 5.0
#: How often an engine sends its snapshot; it is the heartbeat too.
BEAT_SECONDS = 0.25
#: For how long an engine tries to reach its driver before it gives up.
RECONNECT_SECONDS = 10.0
#: Snapshots are left out while this much waits for a driver that does not read.
MAX_WAITING_BYTES = 256 * 1024
_RETRY_SECONDS = 0.2

ResultT = TypeVar("ResultT")


class LinkEvents(Protocol):
    """Who is told what happens; called on the link's loop, in order, never concurrently.

    A link is a number that the server gives to a connection which said hello, never used twice.
    """

    def on_hello(self, link: int, hello: Hello) -> None:
        """Tell that an engine connected; it waits for `Welcome` or `Refused`."""

    def on_beat(self, link: int, progress: EngineProgress) -> None:
        """Tell that an engine lives."""

    def on_ready(self, link: int) -> None:
        """Tell that an engine's `on_ready` is done."""

    def on_ended(self, link: int, summary: EngineSummary) -> None:
        """Tell that an engine is over; its connection closes next."""

    def on_closed(self, link: int) -> None:
        """Tell that a connection is closed, by whichever side; nothing else comes of it."""


class LinkServer:
    """The driver's side of all links of one pipeline.

    Args:
        events: Who is told.
        bind_host: The address to listen on.
        public_host: What engines connect to; by default the address that is listened on.

    Example:
        >>> server = LinkServer(supervisors)  # doctest: +SKIP
        >>> address = server.start()  # doctest: +SKIP
    """

    def __init__(self, events: LinkEvents, *, bind_host: str = "127.0.0.1", public_host: str = "") -> None:
        """Prepare; nothing listens before `start`."""
        self._events = events
        self._bind_host = bind_host
        self._public_host = public_host or bind_host
        self._secret = secrets.token_hex(32)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="tidemill-link", daemon=True)
        self._server: asyncio.Server | None = None
        self._numbers = itertools.count(1)
        self._links: dict[int, asyncio.StreamWriter] = {}
        self._snapshots: dict[int, EngineProgress] = {}
        self._writers: set[asyncio.StreamWriter] = set()

    # -- any thread ----------------------------------------------------------------------------------------

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that `events` are told on."""
        return self._loop

    def start(self) -> LinkAddress:
        """Listen, and return what engines have to know.

        Raises:
            RemoteError: The address cannot be listened on.
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

    def call(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the link's loop and wait for its result; not from that loop itself."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        """Close all connections and end the thread; without effect if that is done already."""
        if self._thread.is_alive():
            self.call(self._shut())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if not self._loop.is_closed():
            self._loop.close()

    # -- the loop ---------------------------------------------------------------------------------------

    def send(self, link: int, frame: FromDriver) -> None:
        """Send to an engine; to a closed link nothing is sent. Only on the link's loop."""
        writer = self._links.get(link)
        if writer is not None and not writer.is_closing():
            send_frame(writer, frame)

    def close_link(self, link: int) -> None:
        """Close a connection once what was sent is out. Only on the link's loop."""
        writer = self._links.get(link)
        if writer is not None:
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
            _tune(writer)
            async with asyncio.timeout(HELLO_SECONDS):
                hello = await self._hello(reader, writer)
            link = next(self._numbers)
            self._links[link] = writer
            self._events.on_hello(link, hello)
            while True:
                self._tell(link, from_engine.decode(await receive_frame(reader, MAX_FRAME_BYTES)))
        except (OSError, EOFError):
            pass  # the other side went, or said nothing; `on_closed` tells
        except (msgspec.DecodeError, BadFrameError) as error:
            log.warning("a connection to the link was closed", peer=_peer(writer), error=str(error))
        except Exception:
            log.exception("the link failed; its connection is closed", peer=_peer(writer))
        finally:
            self._writers.discard(writer)
            writer.close()
            if link is not None:
                del self._links[link]
                self._snapshots.pop(link, None)
                self._events.on_closed(link)

    async def _hello(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Hello:
        said = await receive_frame(reader, MAX_HELLO_BYTES)
        hello = from_engine.decode(said)
        if not isinstance(hello, Hello) or len(hello.nonce) != NONCE_BYTES:
            raise BadFrameError("no hello")
        nonce = new_nonce()
        send_frame(writer, Challenge(nonce, link_proof(self._secret, Side.DRIVER, said, nonce)))
        answer = from_engine.decode(await receive_frame(reader, MAX_HELLO_BYTES))
        if not isinstance(answer, Proof) or not is_proof(answer.proof, self._secret, Side.ENGINE, said, nonce):
            raise BadFrameError("no proof that it knows this pipeline's secret")
        return hello

    def _tell(self, link: int, frame: FromEngine) -> None:
        match frame:
            case Beat(changes=changes) as beat:
                before = self._snapshots.get(link)
                if before is None and not changes.whole:
                    raise BadFrameError("a first beat that does not tell of all partitions")
                self._snapshots[link] = snapshot_after(beat, before or EngineProgress())
                self._events.on_beat(link, self._snapshots[link])
            case Ready():
                self._events.on_ready(link)
            case Ended(summary):
                self._events.on_ended(link, summary)
            case _:
                raise BadFrameError("a second hello")


class EngineLink:
    """The engine's side; use it on one loop only.

    Args:
        address: The driver.
        hello: Who this engine is; nonce and run token are filled in here.
        beat: Called for every beat, with whether that has to tell of all partitions.
        on_command: Called with each command of the driver.
        on_lost: Called once, with the reason: the driver cannot be reached any more, or refuses this engine.
        tasks: Where its tasks run.
        reconnect_seconds: For how long the driver is looked for.
    """

    def __init__(
        self,
        address: LinkAddress,
        hello: Hello,
        beat: Callable[[bool], Beat],
        on_command: Callable[[Command], None],
        on_lost: Callable[[str], None],
        tasks: EngineTasks | None = None,
        *,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> None:
        """Prepare; nothing is connected before `connect`."""
        self._address = address
        self._hello = hello
        self._beat_of = beat
        self._tells_whole = True
        self._on_command = on_command
        self._on_lost = on_lost
        self._reconnect_seconds = reconnect_seconds
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._engine_tasks = tasks or EngineTasks()
        self._tasks: list[asyncio.Task[Any]] = []

    async def connect(self) -> int:
        """Say hello and return the run token; from now on snapshots are sent and commands received.

        Raises:
            RemoteError: The driver cannot be reached, or refuses this engine.
        """
        run_token = await self._reach()
        self._tasks = [
            self._engine_tasks.run("the link to the driver", self._listen()),
            self._engine_tasks.keep("the beats to the driver", self._beat()),
        ]
        return run_token

    def ready(self) -> None:
        """Tell that `on_ready` is done."""
        self._hello = msgspec.structs.replace(self._hello, ready=True)
        self._send(Ready())

    async def close(self, summary: EngineSummary) -> None:
        """Tell the end and go; what cannot be told within a second is not."""
        await self._engine_tasks.stop(*self._tasks)
        try:
            self._send(Ended(summary))
        except Exception as error:
            log.warning("a summary cannot be sent whole; it goes without its texts", error=describe_error(error))
            self._send(Ended(summary_without_texts(summary)))
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()

    def _send(self, frame: FromEngine) -> None:
        if self._writer is not None and not self._writer.is_closing():
            send_frame(self._writer, frame)

    async def _reach(self) -> int:
        """Connect within the time for it; the same hello serves the first time and later ones."""
        deadline = time.monotonic() + self._reconnect_seconds
        while True:
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    return await self._greet()
            except (OSError, EOFError, msgspec.DecodeError, BadFrameError) as error:
                if time.monotonic() + _RETRY_SECONDS >= deadline:
                    raise RemoteError(
                        f"the driver does not answer at {self._address.host}:{self._address.port} "
                        f"({error or type(error).__name__}); engines must be able to reach spark.driver.host"
                    ) from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _greet(self) -> int:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            _tune(writer)
            said = send_frame(writer, msgspec.structs.replace(self._hello, nonce=new_nonce()))
            await self._prove(reader, writer, said)
            answer = from_driver.decode(await receive_frame(reader, MAX_FRAME_BYTES))
        except BaseException:
            writer.close()
            raise
        if not isinstance(answer, Welcome):
            writer.close()
            raise RemoteError(f"the driver refuses this engine: {answer}", retryable=False)
        self._hello = msgspec.structs.replace(self._hello, run_token=answer.run_token)
        self._reader, self._writer = reader, writer
        self._tells_whole = True
        return answer.run_token

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytes) -> None:
        """Let the driver prove itself first: nothing but a hello is said to anybody else."""
        frame, secret = from_driver.decode(await receive_frame(reader, MAX_HELLO_BYTES)), self._address.secret
        if not isinstance(frame, Challenge) or not is_proof(frame.proof, secret, Side.DRIVER, said, frame.nonce):
            raise BadFrameError("what listens there does not know this pipeline's secret")
        send_frame(writer, Proof(link_proof(secret, Side.ENGINE, said, frame.nonce)))

    async def _listen(self) -> None:
        while True:
            try:
                await self._obey()
            except (OSError, EOFError, msgspec.DecodeError, BadFrameError) as error:
                log.info("the link is down", error=str(error) or type(error).__name__)
            if self._writer is not None:
                self._writer.close()
            try:
                await self._reach()
            except RemoteError as error:
                self._on_lost(str(error))
                return

    async def _obey(self) -> None:
        if self._reader is None:
            raise InvariantError("listening before the link was connected")
        while True:
            frame = from_driver.decode(await receive_frame(self._reader, MAX_FRAME_BYTES))
            match frame:
                case Refused(reason):
                    self._on_lost(reason)
                    # Nothing else will come, and asking again would be refused again.
                    await asyncio.get_running_loop().create_future()
                case Welcome() | Challenge():
                    raise BadFrameError("a second welcome")
                case command:
                    self._on_command(command)

    async def _beat(self) -> NoReturn:
        while True:
            writer = self._writer
            if writer is not None and writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
                self._send_beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _send_beat(self) -> None:
        beat = self._beat_of(self._tells_whole)
        self._tells_whole = False
        try:
            self._send(beat)
        except Exception as error:  # silence would be taken for the end of this engine
            limited(log, 60.0).warning(
                "a snapshot cannot be sent whole; it goes without its texts", error=describe_error(error)
            )
            self._send(beat.without_texts())


def _tune(writer: asyncio.StreamWriter) -> None:
    """Notice a host that is gone without a word: within about 15 s instead of hours."""
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", 5),
        ("TCP_KEEPINTVL", 3),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", 10_000),
    ):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def _peer(writer: asyncio.StreamWriter) -> str:
    return str(writer.get_extra_info("peername"))
