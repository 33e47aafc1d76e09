"""What a zygote and its owner say to each other: one message is one packet of a socket that keeps packets apart.

File descriptors travel beside a `Fork`. Invariant: a packet is at most `MAX_PACKET_BYTES`, which the buffers of a
socket hold by default; what a process needs beyond that it gets over a descriptor of its own.
"""

from __future__ import annotations

import msgspec

MAX_PACKET_BYTES = 128 * 1024
#: How many descriptors one fork may pass.
MAX_DESCRIPTORS = 8


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a zygote.

    Attributes:
        preload: Modules of tidemill and its dependencies.
        user_preload: Modules of the user (`worker.preload`); one that does not import is named, and left out.
        import_folders: Where modules of the user are looked for first.
    """

    preload: tuple[str, ...] = ()
    user_preload: tuple[str, ...] = ()
    import_folders: tuple[str, ...] = ()


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that calls a function with the request and the descriptors, and ends with what it returns.

    Attributes:
        number: Identifies the answer.
        target: `module:function`.
        request: Its first argument.
    """

    number: int
    target: str
    request: bytes = b""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a forked process, or to all of its group; nothing happens if it has ended."""

    pid: int
    number: int
    group: bool = False


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Answer with a `Pong` of the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Ping`; all orders before it have been carried out."""

    number: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """The zygote is ready.

    Attributes:
        problems: What is wrong with the modules of the user, for people.
        about: What a program that is more than a zygote says of itself.
    """

    problems: tuple[str, ...] = ()
    about: bytes = b""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process is there, and leads a group of its own."""

    number: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The system has no room for another process."""

    number: int
    error: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A forked process has ended; what was left of its group was killed.

    Attributes:
        pid: Its id, which may belong to another process by now.
        status: Its exit code, negative for a signal.
        user_us: CPU time in user mode, with that of the children that it waited for.
        system_us: CPU time in the kernel.
        max_rss_kib: The most memory that it, or one of its children, had at a time.
    """

    pid: int
    status: int
    user_us: int = 0
    system_us: int = 0
    max_rss_kib: int = 0


Order = Setup | Fork | Signal | Ping
Report = Started | Forked | NotForked | Exited | Pong

_encoder = msgspec.msgpack.Encoder()
_orders = msgspec.msgpack.Decoder(Order)
_reports = msgspec.msgpack.Decoder(Report)


def encode(message: Order | Report) -> bytes:
    """Return the packet of a message.

    Raises:
        ValueError: It is too long.
    """
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"the request has {len(packet)} bytes; a zygote accepts at most {MAX_PACKET_BYTES}")
    return packet


def decode_order(packet: bytes) -> Order:
    """Return what the owner said."""
    order: Order = _orders.decode(packet)
    return order


def decode_report(packet: bytes) -> Report:
    """Return what the zygote said."""
    report: Report = _reports.decode(packet)
    return report
