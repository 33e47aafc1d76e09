"""The messages between a zygote and its owner; each is one packet of a SOCK_SEQPACKET socket.

A `Fork` also carries file descriptors. Invariant: a packet is at most `MAX_PACKET_BYTES` long, which socket buffers
hold by default; larger data of a process goes through a descriptor of its own.
"""

from __future__ import annotations

import msgspec

MAX_PACKET_BYTES = 128 * 1024
#: The maximum number of descriptors in a fork.
MAX_DESCRIPTORS = 8


class Setup(msgspec.Struct, frozen=True, tag=True):
    """The first message to a zygote.

    Attributes:
        preload: Modules of tidemill and its dependencies.
        user_preload: Modules of the user (`worker.preload`); modules that fail to import are reported and skipped.
        import_folders: Folders at the front of the search path for the user's modules.
    """

    preload: tuple[str, ...] = ()
    user_preload: tuple[str, ...] = ()
    import_folders: tuple[str, ...] = ()


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a process that calls a function with the request and the descriptors, and exits with the returned code.

    Attributes:
        number: Identifies the answer.
        target: `module:function`.
        request: The first argument of the function.
    """

    number: int
    target: str
    request: bytes = b""


class Signal(msgspec.Struct, frozen=True, tag=True):
    """Send a signal to a forked process or its whole group; no effect if the process has ended."""

    pid: int
    number: int
    group: bool = False


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a `Pong` with the same number."""

    number: int


class Pong(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Ping`; all earlier orders have been carried out."""

    number: int


class Started(msgspec.Struct, frozen=True, tag=True):
    """The zygote is ready.

    Attributes:
        problems: Problems with the user's modules, for users.
        about: Additional data of a program that extends the zygote.
    """

    problems: tuple[str, ...] = ()
    about: bytes = b""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process has started, and leads its own group."""

    number: int
    pid: int


class NotForked(msgspec.Struct, frozen=True, tag=True):
    """The system cannot start another process."""

    number: int
    error: str


class Exited(msgspec.Struct, frozen=True, tag=True):
    """A forked process has ended, and the rest of its group was killed.

    Attributes:
        pid: Its id, which another process may have by now.
        status: Its exit code, negative for a signal.
        user_us: CPU time in user mode, including children that it waited for.
        system_us: CPU time in the kernel.
        max_rss_kib: The peak memory of the process or of one of its children.
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
        ValueError: The packet is too long.
    """
    packet = _encoder.encode(message)
    if len(packet) > MAX_PACKET_BYTES:
        raise ValueError(f"the request is {len(packet)} bytes long; a zygote accepts at most {MAX_PACKET_BYTES}")
    return packet


def decode_order(packet: bytes) -> Order:
    order: Order = _orders.decode(packet)
    return order


def decode_report(packet: bytes) -> Report:
    report: Report = _reports.decode(packet)
    return report
