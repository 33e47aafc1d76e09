"""The doorbell of PostgreSQL stores: LISTEN on a dedicated connection, NOTIFY in separate transactions.

NOTIFY inside the writing transactions would serialize their commits. The connection must lead directly to the server:
behind a transaction-mode pooler no bell arrives, and services rely on polling every two seconds.

Invariants: a bell that cannot be delivered is dropped. All bells ring once after each new connection.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import asyncpg
import structlog

from tidemill.core.tasks.inputs import Channel
from tidemill.runtime.log.setup import throttle
from tidemill.store.doorbell import SCAN_SECONDS, BellBatches, Doorbell

log = structlog.get_logger(__name__)

_PREFIX = "tidemill_"
_CONNECT_SECONDS = 5.0
_FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, TimeoutError)


class PostgresDoorbell(Doorbell):
    """The bells of all processes that use a database; connects on the first wait or ring, or for the first listener.

    Args:
        url: The database URL.

    Attributes:
        session_settings: The settings of the next connection.
    """

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.session_settings = {"application_name": "tidemill doorbell"}
        self._pending: set[Channel] = set()
        self._wanted = asyncio.Event()
        self._batches = BellBatches(self._send)
        self._task: asyncio.Task[None] | None = None

    def ring(self, channels: Iterable[Channel]) -> None:
        """Ring bells in all processes; see `Doorbell.ring`."""
        for channel in channels:
            self.ring_here(channel)
            self._start()
            self._batches.add(channel)

    def listen(self, listener: Callable[[Channel], None]) -> None:
        """Call `listener` whenever a bell rings; must be called on the loop."""
        self._start()
        super().listen(listener)

    async def wait(self, channel: Channel, timeout_seconds: float = SCAN_SECONDS) -> bool:
        """Wait for a bell; see `Doorbell.wait`."""
        self._start()
        return await super().wait(channel, timeout_seconds)

    async def close(self) -> None:
        self._batches.close()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    def _send(self, channels: set[Channel]) -> None:
        self._pending |= channels
        self._wanted.set()

    def _start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="doorbell of the store")

    async def _run(self) -> None:
        while True:
            try:
                await self._serve()
            except _FAILURES as error:
                throttle(log, 60.0).info(
                    "the store's doorbell is disconnected; services poll for work every two seconds",
                    error=f"{type(error).__name__}: {error}",
                )
            await asyncio.sleep(SCAN_SECONDS)

    async def _serve(self) -> None:
        settings = dict(self.session_settings)
        connection = await asyncpg.connect(self._url, timeout=_CONNECT_SECONDS, server_settings=settings)
        lost = asyncio.Event()

        def note_lost(_connection: object) -> None:
            lost.set()
            self._wanted.set()

        connection.add_termination_listener(note_lost)
        try:
            for channel in Channel:
                await connection.add_listener(_PREFIX + channel.value, self._hear)
            for channel in Channel:
                self.ring_here(channel)
            while not lost.is_set():
                await self._wanted.wait()
                self._wanted.clear()
                pending, self._pending = self._pending, set()
                for channel in sorted(pending):
                    await connection.execute(f"NOTIFY {_PREFIX}{channel.value}")
        finally:
            with contextlib.suppress(*_FAILURES):
                connection.terminate()

    def _hear(self, connection: Any, process: int, name: str, payload: object) -> None:
        # `ring` has already rung this process's own bells here.
        if process != connection.get_server_pid():
            self.ring_here(Channel(name.removeprefix(_PREFIX)))
