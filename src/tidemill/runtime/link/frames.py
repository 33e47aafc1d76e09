"""The messages of the link: every frame that an engine and its driver can send, and how frames are sent.

A frame is four bytes of length, big-endian, and a msgpack message that carries its own name. The reader limits its
size. Bytes that do not decode to a known frame are an error of the other side.
"""

from __future__ import annotations

import asyncio
import socket

import msgspec

from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.runtime.framing import LENGTH, FrameTooLargeError, add_length, read_body
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.beats import Beat
from tidemill.runtime.link.live_tasks import LiveState
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.progress import EngineSummary

#: A snapshot with thousands of partitions is smaller; a larger frame does not come from tidemill.
MAX_FRAME_BYTES = 4 * 1024 * 1024
#: Before its hello, a peer gets no more memory than a hello needs.
MAX_HELLO_BYTES = 4096


class LinkAddress(msgspec.Struct, frozen=True):
    """The driver's address for engines, and the secret that both sides prove to know."""

    host: str
    port: int
    secret: str

    def __repr__(self) -> str:
        """Show the address, never the secret."""
        return f"LinkAddress({self.host}:{self.port})"


# -- frames from an engine ---------------------------------------------------------------------------------


class HelloFrame(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a connection; trusted once a `ProofFrame` follows.

    Attributes:
        nonce: A new random number for each connection.
        slot: The slot that the engine fills.
        job_token: The number of the submission that started this engine.
        run_token: 0 at the first connection, later the number from its `WelcomeFrame`.
        engine_id: The engine's id, new at every start.
        pid: The engine's process.
        host: The engine's host.
        ready: Whether `on_ready` is done; repeated after a reconnect.
        stage: The Spark stage of a bounded run's engine.
        attempt: Spark's number for the attempt of its task.
    """

    slot: int
    job_token: int
    run_token: int
    engine_id: str
    pid: int
    host: str
    ready: bool = False
    stage: int = -1
    attempt: int = -1
    nonce: bytes = b""


class ProofFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to a challenge: the engine knows the pipeline's secret."""

    proof: bytes


class ReadyFrame(msgspec.Struct, frozen=True, tag=True):
    """`on_ready` is done; the engine waits for `GoFrame`."""


class EndedFrame(msgspec.Struct, frozen=True, tag=True):
    """The engine has ended and leaves no work; its process exits next."""

    summary: EngineSummary


class RowsFrame(msgspec.Struct, frozen=True, tag=True):
    """Rows that the engine recorded; confirmed by `StoredFrame`.

    Attributes:
        seq: The number of the frame; rows and events of an engine are numbered together.
        table: The table of the rows.
        body: The rows; opaque to the link.
        count: The number of rows, for receivers that cannot read or store them.
    """

    seq: int
    table: str
    body: bytes
    count: int = 1


class EventsFrame(msgspec.Struct, frozen=True, tag=True):
    """Events that the engine recorded; see `RowsFrame`."""

    seq: int
    body: bytes
    count: int = 1


class AnswerFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `AskFrame`.

    Attributes:
        number: The question's number.
        stage: Where the message is; None if it is not open in this engine.
        problem: Why there is no answer.
    """

    number: int
    stage: MessageStage | None = None
    problem: str = ""


class ProbedFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `ProbeFrame`.

    Attributes:
        number: The question's number.
        report: The probe's report; None if the message was not probed.
        problem: Why it was not probed.
    """

    number: int
    report: ProbeReport | None = None
    problem: str = ""


class LiveFrame(msgspec.Struct, frozen=True, tag=True):
    """The work of the engine's executors, while the driver watches."""

    state: LiveState


# -- frames from the driver --------------------------------------------------------------------------------


class ChallengeFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to a hello: the driver knows the pipeline's secret, and wants the engine to prove the same.

    Attributes:
        nonce: A new random number for each connection.
        proof: The driver's proof.
    """

    nonce: bytes
    proof: bytes


class WelcomeFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to a hello that was accepted."""

    run_token: int


class RefusedFrame(msgspec.Struct, frozen=True, tag=True):
    """The answer to an engine that was replaced: it must stop."""

    reason: str


class BeginFrame(msgspec.Struct, frozen=True, tag=True):
    """Connect the sinks and run `on_ready`."""


class GoFrame(msgspec.Struct, frozen=True, tag=True):
    """Subscribe."""


class DrainFrame(msgspec.Struct, frozen=True, tag=True):
    """Finish all messages in flight, commit, and leave the group.

    Attributes:
        keep_membership: Stay in the group, because another engine of the slot takes over the partitions in a moment.
    """

    keep_membership: bool = False


class PauseFrame(msgspec.Struct, frozen=True, tag=True):
    """Stop fetching messages.

    Attributes:
        partitions: The partitions of the source topic to pause; None pauses all.
    """

    partitions: list[int] | None = None


class ResumeFrame(msgspec.Struct, frozen=True, tag=True):
    """Fetch messages of all partitions again."""


class ReleaseFrame(msgspec.Struct, frozen=True, tag=True):
    """Release the brake on a user's request; the messages that it holds are dead-lettered."""


class ExitFrame(msgspec.Struct, frozen=True, tag=True):
    """End the process now; the warden cleans up."""


class StoredFrame(msgspec.Struct, frozen=True, tag=True):
    """The engine's records of this number are stored, or lost for good; it need not send them again."""

    seq: int


class AskFrame(msgspec.Struct, frozen=True, tag=True):
    """A question for the state of a message. Answered by `AnswerFrame`.

    Attributes:
        number: The question's number.
        topic: The message's topic.
        partition: The message's partition.
        offset: The message's offset.
    """

    number: int
    topic: str
    partition: int
    offset: int


class ProbeFrame(msgspec.Struct, frozen=True, tag=True):
    """A request to run a message through the handler without leaving a trace. Answered by `ProbedFrame`.

    Attributes:
        number: The question's number.
        message: The message, not parsed.
        seconds: How long the probe may take.
    """

    number: int
    message: SourceMessage
    seconds: float


class WatchFrame(msgspec.Struct, frozen=True, tag=True):
    """A request to send `LiveFrame` from now on.

    Attributes:
        seconds: How long; another `WatchFrame` extends it.
    """

    seconds: float


Command = BeginFrame | GoFrame | DrainFrame | PauseFrame | ResumeFrame | ReleaseFrame | ExitFrame
FromEngine = (
    HelloFrame
    | ProofFrame
    | Beat
    | ReadyFrame
    | EndedFrame
    | RowsFrame
    | EventsFrame
    | AnswerFrame
    | ProbedFrame
    | LiveFrame
)
FromDriver = ChallengeFrame | WelcomeFrame | RefusedFrame | StoredFrame | AskFrame | ProbeFrame | WatchFrame | Command

_encode = msgspec.msgpack.Encoder().encode
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)


class BadFrameError(Exception):
    """The other side does not speak this protocol."""


def pack_frame(frame: FromEngine | FromDriver) -> bytes:
    """Return the bytes of a frame.

    Raises:
        UnicodeEncodeError: A text in it has a lone surrogate.
        BadFrameError: The frame is larger than the peer accepts.
    """
    body = _encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrameError(f"a frame of {len(body)} bytes is too large")
    return add_length(body)


def send_frame(writer: asyncio.StreamWriter, frame: FromEngine | FromDriver) -> bytes:
    """Send a frame and return its message; raises like `pack_frame`, before anything is sent."""
    data = pack_frame(frame)
    writer.write(data)
    return data[LENGTH.size :]


async def receive_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    try:
        return await read_body(reader, limit)
    except FrameTooLargeError as error:
        raise BadFrameError(str(error)) from None


def enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Make the system notice a vanished host within about 15 s instead of hours."""
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
