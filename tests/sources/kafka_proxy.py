"""A proxy that understands Kafka's framing, and a broker whose clients can be made to speak through such proxies.

A broker tells its clients its own address, so a proxy in front of its port is used for one connection only. Here each
proxy has a listener of its own, advertised under the proxy's address: who begins there stays there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.faults import _OwnLoop

from tidemill.runtime.embedded.broker import HOST, EmbeddedBroker, free_port

#: What a transaction asks of the brokers, by Kafka's api keys.
ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT = 25, 26, 28
TRANSACTIONAL = frozenset({ADD_OFFSETS, END_TXN, TXN_OFFSET_COMMIT})

_HEADER = struct.Struct(">hhi")


class When(enum.Enum):
    """Where on its way an exchange is disturbed."""

    REQUEST = "request"
    ANSWER = "answer"


class Fault(NamedTuple):
    """What happens to a request, or to its answer: it waits, and then its connection is cut, or it goes on."""

    when: When
    seconds: float = 0.0
    cut: bool = False


class KafkaProxy(_OwnLoop):
    """Passes requests and answers on, each disturbed as `judge` says; what waits holds up what is behind it.

    Attributes:
        judge: Called with each request's api key, on the proxy's thread; returns what happens to the exchange.
        seen: How often each api was asked for.
        passed: How often its requests were passed on.
    """

    def __init__(self, target_port: int) -> None:
        super().__init__()
        self.target_port = target_port
        self.judge: Callable[[int], Fault | None] = lambda api: None
        self.seen: Counter[int] = Counter()
        self.passed: Counter[int] = Counter()
        self._gates: dict[int, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server = self._do(asyncio.start_server(self._serve, HOST, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def calm(self) -> None:
        """Disturb nothing from now on; what waits continues at once."""
        self.judge = lambda api: None
        self._do(self._release())

    def waiting(self, api: int) -> bool:
        """Tell whether a request or an answer of this api is held up."""
        return api in self._gates

    def release(self, api: int) -> None:
        """Let what waits of one api continue at once."""
        self._do(self._release(api))

    async def _release(self, *apis: int) -> None:
        for api in apis or tuple(self._gates):
            self._gates.pop(api, asyncio.Event()).set()

    async def _wait(self, api: int, seconds: float) -> None:
        gate = self._gates.setdefault(api, asyncio.Event())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(gate.wait(), seconds)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            from_there, there = await asyncio.open_connection(HOST, self.target_port)
            faults: asyncio.Queue[tuple[int, Fault | None]] = asyncio.Queue()
            await asyncio.gather(self._requests(reader, there, faults), self._answers(from_there, writer, faults))
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # one side is gone, the connection was cut, or the proxy has ended
        finally:
            for each in (writer, there):
                if each is not None:
                    each.transport.abort()
            self._tasks.discard(task)

    async def _requests(self, reader: Any, there: Any, faults: asyncio.Queue[tuple[int, Fault | None]]) -> None:
        while True:
            frame = await _frame(reader)
            api, _, _ = _HEADER.unpack_from(frame, 4)
            self.seen[api] += 1
            fault = self.judge(api)
            if fault is not None and fault.when is When.REQUEST:
                await self._disturb(api, fault)
            faults.put_nowait((api, fault))
            there.write(frame)
            await there.drain()
            self.passed[api] += 1

    async def _answers(self, from_there: Any, writer: Any, faults: asyncio.Queue[tuple[int, Fault | None]]) -> None:
        # A broker answers in the order of the requests; producers here wait for all replicas, so each has an answer.
        while True:
            frame = await _frame(from_there)
            api, fault = await faults.get()
            if fault is not None and fault.when is When.ANSWER:
                await self._disturb(api, fault)
            writer.write(frame)
            await writer.drain()

    async def _disturb(self, api: int, fault: Fault) -> None:
        await self._wait(api, fault.seconds)
        if fault.cut:
            raise ConnectionResetError

    async def _end(self) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def _frame(reader: asyncio.StreamReader) -> bytes:
    size = await reader.readexactly(4)
    return size + await reader.readexactly(struct.unpack(">i", size)[0])


def proxied_broker(own_kafka: Callable[..., EmbeddedBroker], count: int) -> tuple[EmbeddedBroker, list[KafkaProxy]]:
    """Start a broker that `count` proxies stand in front of; each has all that its clients send, and nothing else."""
    clients, controller = free_port(), free_port()
    inner = [free_port() for _ in range(count)]
    proxies = [KafkaProxy(port) for port in inner]
    names = [f"PROXY{n}" for n in range(count)]
    own = [f"PLAINTEXT://{HOST}:{clients}", f"CONTROLLER://{HOST}:{controller}"]
    listeners = [*own, *(f"{name}://{HOST}:{port}" for name, port in zip(names, inner, strict=True))]
    advertised = [*own, *(f"{name}://{proxy.address}" for name, proxy in zip(names, proxies, strict=True))]
    broker = own_kafka(
        port=clients,
        properties={
            "listeners": ",".join(listeners),
            "advertised.listeners": ",".join(advertised),
            "listener.security.protocol.map": ",".join(f"{n}:PLAINTEXT" for n in ("PLAINTEXT", "CONTROLLER", *names)),
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.quorum.bootstrap.servers": f"{HOST}:{controller}",
        },
    )
    return broker, proxies
