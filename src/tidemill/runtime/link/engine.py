"""The engine's side of the link to its driver; see `server` for an overview.

It reconnects by itself. An engine that is refused, or that cannot reach its driver for 10 s, is notified once and has
to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec
import structlog

from tidemill.core.errors import InvariantError, RemoteError, describe_error
from tidemill.core.recorder.outgoing import OutgoingFrames
from tidemill.runtime.link.beats import Beat
from tidemill.runtime.link.frames import (
    MAX_FRAME_BYTES,
    MAX_HELLO_BYTES,
    AskFrame,
    BadFrameError,
    ChallengeFrame,
    Command,
    EndedFrame,
    FromEngine,
    HelloFrame,
    LinkAddress,
    LiveFrame,
    ProbeFrame,
    ProofFrame,
    ReadyFrame,
    RefusedFrame,
    StoredFrame,
    WatchFrame,
    WelcomeFrame,
    enable_keepalive,
    from_driver,
    receive_frame,
    send_frame,
)
from tidemill.runtime.link.live_tasks import LiveSource
from tidemill.runtime.link.progress import EngineSummary, drop_summary_texts
from tidemill.runtime.link.proof import Side, is_proof, link_proof, new_nonce
from tidemill.runtime.link.questions import EngineAnswers, is_free
from tidemill.runtime.link.records import RecordSender
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.loop.engine_tasks import EngineTasks

log = structlog.get_logger(__name__)

#: How often an engine sends its snapshot, which is its heartbeat too.
BEAT_SECONDS = 0.25
#: How long an engine tries to reach its driver before it gives up.
RECONNECT_SECONDS = 10.0
#: Snapshots are skipped while more bytes than this wait for a driver that does not read.
MAX_WAITING_BYTES = 256 * 1024
#: How long an engine that has ended may wait until its records are stored.
RECORD_SECONDS = 0.7
_RETRY_SECONDS = 0.2


class EngineRefusedError(RemoteError):
    """The driver does not accept this engine: it was replaced before it connected, or the pipeline is stopping."""


class EngineLink:
    """The engine's side of the link; use it on one loop only.

    Args:
        address: The driver.
        hello: Identifies this engine; nonce and run token are filled in here.
        beat: Called for every beat, with whether the beat has to cover all partitions.
        on_command: Called with each command of the driver.
        on_lost: Called once, with the reason, if the driver is no longer reachable or refuses this engine.
        tasks: Runs the link's asyncio tasks.
        reconnect_seconds: How long to try to reach the driver.
    """

    def __init__(
        self,
        address: LinkAddress,
        hello: HelloFrame,
        beat: Callable[[bool], Beat],
        on_command: Callable[[Command], None],
        on_lost: Callable[[str], None],
        tasks: EngineTasks | None = None,
        *,
        reconnect_seconds: float = RECONNECT_SECONDS,
    ) -> None:
        """Create the link; `connect` connects it."""
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
        self._records: RecordSender | None = None
        #: Answers the driver's questions.
        self.answers = EngineAnswers()
        #: The source of states for a driver that watches; None if there is none.
        self.live: LiveSource | None = None

    def carry(self, frames: OutgoingFrames) -> None:
        """Send the engine's records from now on."""
        self._records = RecordSender(frames)
        self._records.reconnect(self._writer)

    async def connect(self) -> int:
        """Say hello and return the run token; from now on snapshots are sent and commands received.

        Raises:
            EngineRefusedError: The driver no longer accepts this engine.
            RemoteError: The driver cannot be reached.
        """
        run_token = await self._reach()
        self._tasks = [
            self._engine_tasks.run("the link to the driver", self._listen()),
            self._engine_tasks.keep("the beats to the driver", self._beat()),
        ]
        return run_token

    def ready(self) -> None:
        """Report that `on_ready` is done."""
        self._hello = msgspec.structs.replace(self._hello, ready=True)
        self._send(ReadyFrame())

    async def close(self, summary: EngineSummary) -> None:
        """Send the remaining records, report the end and disconnect, within two seconds."""
        if self._records is not None:
            dropped = await self._records.finish(RECORD_SECONDS)
            if self._is_connected:  # otherwise the driver itself counts the records that it did not get
                summary.progress.recorder_dropped = dropped
        await self._engine_tasks.stop(*self._tasks)
        try:
            self._send(EndedFrame(summary))
        except Exception as error:
            log.warning("a summary cannot be sent whole; sending it without texts", error=describe_error(error))
            self._send(EndedFrame(drop_summary_texts(summary)))
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._writer.wait_closed()

    @property
    def _is_connected(self) -> bool:
        return self._writer is not None and not self._writer.is_closing()

    def _send(self, frame: FromEngine) -> None:
        if self._writer is not None and self._is_connected:
            send_frame(self._writer, frame)

    async def _reach(self) -> int:
        """Connect within the time limit; the same hello serves the first connection and later ones."""
        deadline = time.monotonic() + self._reconnect_seconds
        reason: Exception | None = None
        while True:
            try:
                async with asyncio.timeout(max(0.1, deadline - time.monotonic())):
                    return await self._greet()
            except (OSError, EOFError, msgspec.DecodeError, BadFrameError) as error:
                if reason is None or not isinstance(error, TimeoutError):  # the last attempt may have had no time
                    reason = error
                if time.monotonic() + _RETRY_SECONDS >= deadline:
                    raise RemoteError(
                        f"the driver does not answer at {self._address.host}:{self._address.port} "
                        f"({str(reason) or type(reason).__name__}); engines must be able to reach spark.driver.host"
                    ) from error
            await asyncio.sleep(_RETRY_SECONDS)

    async def _greet(self) -> int:
        reader, writer = await asyncio.open_connection(self._address.host, self._address.port)
        try:
            enable_keepalive(writer)
            said = send_frame(writer, msgspec.structs.replace(self._hello, nonce=new_nonce()))
            await self._prove(reader, writer, said)
            answer = from_driver.decode(await receive_frame(reader, MAX_FRAME_BYTES))
        except BaseException:
            writer.close()
            raise
        if not isinstance(answer, WelcomeFrame):
            writer.close()
            if isinstance(answer, RefusedFrame):
                raise EngineRefusedError(answer.reason, retryable=False)
            raise RemoteError(f"the driver answered a hello with {answer}", retryable=False)
        self._hello = msgspec.structs.replace(self._hello, run_token=answer.run_token)
        self._reader, self._writer = reader, writer
        self._tells_whole = True
        if self._records is not None:
            self._records.reconnect(writer)
        return answer.run_token

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytes) -> None:
        """Make the driver prove itself first; other peers get only a hello."""
        frame, secret = from_driver.decode(await receive_frame(reader, MAX_HELLO_BYTES)), self._address.secret
        if not isinstance(frame, ChallengeFrame) or not is_proof(frame.proof, secret, Side.DRIVER, said, frame.nonce):
            raise BadFrameError("the server at this address does not know this pipeline's secret")
        send_frame(writer, ProofFrame(link_proof(secret, Side.ENGINE, said, frame.nonce)))

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
                case RefusedFrame(reason):
                    self._on_lost(reason)
                    # No other frame will arrive, and another hello would be refused too.
                    await asyncio.get_running_loop().create_future()
                case WelcomeFrame() | ChallengeFrame():
                    raise BadFrameError("unexpected second welcome")
                case StoredFrame(seq):
                    if self._records is not None:
                        self._records.note_stored(seq)
                case AskFrame() as ask:
                    self.answers.answer(ask, self._writer)
                case ProbeFrame() as probe:
                    self._engine_tasks.run("a probe", self.answers.probe(probe))
                case WatchFrame(seconds):
                    if self.live is not None:
                        self.live.renew(seconds)
                case command:
                    self._on_command(command)

    async def _beat(self) -> NoReturn:
        while True:
            writer = self._writer
            if writer is not None and writer.transport.get_write_buffer_size() < MAX_WAITING_BYTES:
                self._send_beat()
            if self._records is not None:
                self._records.send()
            self.answers.send(self._writer)
            if self.live is not None:
                self._send_live(self.live)
            await asyncio.sleep(BEAT_SECONDS)

    def _send_live(self, live: LiveSource) -> None:
        """Send the state for the live page, unless much else waits; a bug there must not end the beats."""
        try:
            if self._writer is not None and is_free(self._writer) and (state := live.take_state()) is not None:
                self._send(LiveFrame(state))
        except Exception as error:
            throttle(log, 60.0).error("the live page is not updated", error=describe_error(error), exc_info=error)

    def _send_beat(self) -> None:
        beat = self._beat_of(self._tells_whole)
        self._tells_whole = False
        try:
            self._send(beat)
        except Exception as error:  # silence would count as the end of this engine
            throttle(log, 60.0).warning(
                "a snapshot cannot be sent whole; sending it without texts", error=describe_error(error)
            )
            self._send(beat.without_texts())
