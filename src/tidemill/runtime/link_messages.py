"""The messages of the link: every frame that an engine and its driver can send, and how frames are sent.

A frame is four bytes of length, big-endian, and a msgspec message that carries its own name. Its size is
bounded by the reader; whatever does not decode to a known frame is an error of the other side.
"""

from __future__ import annotations

import asyncio
import socket
import struct

import msgspec

from tidemill.core.pipeline.message_stage import MessageStage
from tidemill.runtime.beats import Beat
from tidemill.runtime.live_tasks import LiveState
from tidemill.runtime.messages import SourceMessage
from tidemill.runtime.probe_report import ProbeReport
from tidemill.runtime.progress import EngineSummary

#: A snapshot with thousands of partitions stays below this; anything larger is not ours.
MAX_FRAME_BYTES = 4 * 1024 * 1024
#: Before a hello no peer gets more memory than a hello needs.
MAX_HELLO_BYTES = 4096
_LENGTH = struct.Struct(">I")


class LinkAddress(msgspec.Struct, frozen=True):
    """Where engines find their driver, and what both sides prove that they know."""

    host: str
    port: int
    secret: str

    def __repr__(self) -> str:
        """Show the address, never the secret."""
        return f"LinkAddress({self.host}:{self.port})"


# -- frames from an engine ---------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first frame of a connection; trusted once a `Proof` follows.

    Attributes:
        nonce: A new random number of each connection.
        slot: Which slot the engine fills.
        job_token: The number of the submission that started this engine.
        run_token: 0 at the first connection, later the number that `Welcome` gave it.
        engine_id: The engine's id, new at every start.
        pid: The engine's process.
        host: The engine's host.
        ready: `on_ready` is done; repeated after a reconnect.
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


class Proof(msgspec.Struct, frozen=True, tag=True):
    """The answer to a challenge: the engine knows the pipeline's secret."""

    proof: bytes


class Ready(msgspec.Struct, frozen=True, tag=True):
    """`on_ready` is done; the engine waits for `Go`."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The engine is over and leaves no work; its process ends next."""

    summary: EngineSummary


class Rows(msgspec.Struct, frozen=True, tag=True):
    """Rows that the engine recorded; confirmed by `Stored`.

    Attributes:
        seq: The number of the frame; rows and events of an engine are numbered together.
        table: What the rows are about.
        body: The rows; opaque to the link.
        count: How many they are, for who cannot read or store them.
    """

    seq: int
    table: str
    body: bytes
    count: int = 1


class Events(msgspec.Struct, frozen=True, tag=True):
    """Events that the engine recorded; see `Rows`."""

    seq: int
    body: bytes
    count: int = 1


class Answer(msgspec.Struct, frozen=True, tag=True):
    """The answer to an `Ask`.

    Attributes:
        number: The question's.
        stage: Where the message is; None: it is not open in this engine.
        problem: Why that cannot be said.
    """

    number: int
    stage: MessageStage | None = None
    problem: str = ""


class Probed(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Probe`.

    Attributes:
        number: The question's.
        report: What was found; None: the message was not probed.
        problem: Why not.
    """

    number: int
    report: ProbeReport | None = None
    problem: str = ""


class Live(msgspec.Struct, frozen=True, tag=True):
    """What the engine's executors do, while the driver watches."""

    state: LiveState


# -- frames from the driver --------------------------------------------------------------------------------


class Challenge(msgspec.Struct, frozen=True, tag=True):
    """The answer to a hello: the driver knows the pipeline's secret, and wants the engine to prove the same.

    Attributes:
        nonce: A new random number of each connection.
        proof: The driver's.
    """

    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to a hello that was accepted."""

    run_token: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The answer to an engine that was replaced: stop."""

    reason: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """Connect the sinks and run `on_ready`."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """Subscribe."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Finish what is in flight, commit, leave.

    Attributes:
        keep_place: Do not leave the group: another engine of the slot takes the partitions over in a moment.
    """

    keep_place: bool = False


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Take no new messages.

    Attributes:
        partitions: Of these partitions of the source topic, and of no others; None: of all.
    """

    partitions: list[int] | None = None


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Take messages of all partitions again."""


class Release(msgspec.Struct, frozen=True, tag=True):
    """Release the brake, as a user asked; what it holds is dead-lettered."""


class Exit(msgspec.Struct, frozen=True, tag=True):
    """End the process now; the warden cleans up."""


class Stored(msgspec.Struct, frozen=True, tag=True):
    """What the engine recorded under this number is stored, or lost for good: it need not be sent again."""

    seq: int


class Ask(msgspec.Struct, frozen=True, tag=True):
    """Where is this message? Answered by `Answer`.

    Attributes:
        number: Which question it is.
        topic: The message's topic.
        partition: Its partition.
        offset: Its offset.
    """

    number: int
    topic: str
    partition: int
    offset: int


class Probe(msgspec.Struct, frozen=True, tag=True):
    """Run this message through the handler, and leave nothing behind. Answered by `Probed`.

    Attributes:
        number: Which question it is.
        message: The message; not parsed.
        seconds: How long it may take.
    """

    number: int
    message: SourceMessage
    seconds: float


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Send `Live` for this long from now on.

    Attributes:
        seconds: How long; another `Watch` extends it.
    """

    seconds: float


Command = Begin | Go | Drain | Pause | Resume | Release | Exit
FromEngine = Hello | Proof | Beat | Ready | Ended | Rows | Events | Answer | Probed | Live
FromDriver = Challenge | Welcome | Refused | Stored | Ask | Probe | Watch | Command

_encode = msgspec.msgpack.Encoder().encode
from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)
from_driver: msgspec.msgpack.Decoder[FromDriver] = msgspec.msgpack.Decoder(FromDriver)


class BadFrameError(Exception):
    """The other side does not speak this protocol."""


def pack_frame(frame: FromEngine | FromDriver) -> bytes:
    """Return a frame as it is sent.

    Raises:
        UnicodeEncodeError: A text in it has a lone surrogate.
        BadFrameError: The other side would refuse its size.
    """
    body = _encode(frame)
    if len(body) > MAX_FRAME_BYTES:
        raise BadFrameError(f"a frame of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


def send_frame(writer: asyncio.StreamWriter, frame: FromEngine | FromDriver) -> bytes:
    """Send a frame; return its message. Raises what `pack_frame` does, and has sent nothing then."""
    data = pack_frame(frame)
    writer.write(data)
    return data[_LENGTH.size :]


async def receive_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise BadFrameError(f"a frame of {length} bytes")
    return await reader.readexactly(length)


def enable_keepalive(writer: asyncio.StreamWriter) -> None:
    """Have the system notice a host that vanished within about 15 s instead of hours."""
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
