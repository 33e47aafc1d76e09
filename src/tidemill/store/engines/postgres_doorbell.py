"""The doorbell of PostgreSQL stores: LISTEN on a dedicated connection, NOTIFY in separate transactions.

NOTIFY inside the writing transactions would serialize their commits. The connection must lead directly to the server:
behind a transaction-mode pooler no bell arrives, and services rely on polling every two seconds.

The connection may die without a word, for example with a firewall that forgets it. The server must therefore answer
something every `probe_seconds`; otherwise the connection is replaced.

Invariants: a bell that cannot be delivered waits for the next connection; until then nothing depends on it. All bells
ring once after each new connection. The log names the start and the end of each interruption once.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Mapping

import asyncpg
import structlog

from tidemill.core.tasks.inputs import Channel
from tidemill.store.doorbell import SCAN_SECONDS, BellBatches, Doorbell

log = structlog.get_logger(__name__)

_PREFIX = "tidemill_"
_NO_SETTINGS: Mapping[str, str] = {}
_FAILURES = (asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError, OSError, TimeoutError)


class PostgresDoorbell(Doorbell):
    """The bells of all processes that use a database; connects on the first wait or ring, or for the first listener.

    Args:
        url: The database URL.
        direct_settings: The settings of a connection that leads directly to the server; poolers refuse them.
        probe_seconds: The interval at which an idle connection is checked.
        answer_seconds: How long the server may take to answer.

    Attributes:
        is_direct: Whether the last connection led directly to the server.
    """

    def __init__(
        self,
        url: str,
        direct_settings: Mapping[str, str] = _NO_SETTINGS,
        *,
        probe_seconds: float = 10.0,
        answer_seconds: float = 5.0,
    ) -> None:
        super().__init__()
        self._url, self._direct_settings = url, direct_settings
        self._probe_seconds, self._answer_seconds = probe_seconds, answer_seconds
        self.is_direct = False
        self._pending: set[Channel] = set()
        self._wanted = asyncio.Event()
        self._batches = BellBatches(self._send)
        self._task: asyncio.Task[None] | None = None
        # The start of the current interruption, by the monotonic clock; None: the connection works.
        self._away_since: float | None = None

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
                self._note_away(f"{type(error).__name__}: {error}")
            except Exception as error:
                log.exception("the store's doorbell failed; this is a bug in tidemill")
                self._note_away(f"{type(error).__name__}: {error}")
            await asyncio.sleep(SCAN_SECONDS)

    async def _serve(self) -> None:
        connection = await asyncpg.connect(
            self._url,
            timeout=self._answer_seconds,
            statement_cache_size=0,  # a pooler may not know prepared statements
            server_settings={"application_name": "tidemill doorbell"},
        )
        lost = asyncio.Event()

        def note_lost(_connection: object) -> None:
            lost.set()
            self._wanted.set()

        connection.add_termination_listener(note_lost)
        try:
            async with asyncio.timeout(self._answer_seconds):
                await self._set_up(connection)
                for channel in Channel:
                    await connection.add_listener(_PREFIX + channel.value, self._hear)
            self._note_back()
            for channel in Channel:
                self.ring_here(channel)
            if self._pending:
                self._wanted.set()
            while not lost.is_set():
                await self._notify(connection)
            raise ConnectionResetError("the server has closed the connection")
        finally:
            with contextlib.suppress(*_FAILURES):
                connection.terminate()

    async def _set_up(self, connection: asyncpg.Connection) -> None:
        """Have the server notice the end of this host, if the connection leads to the server."""
        # All messages of a transaction go to one server. The connection is dropped if they fail; a rollback, as of
        # `connection.transaction()`, would wait for a server that does not answer.
        await connection.execute("BEGIN")
        found = await connection.fetchval("SELECT pg_backend_pid()")
        await connection.execute("COMMIT")
        self.is_direct = found == connection.get_server_pid()
        if self.is_direct:
            for name, value in self._direct_settings.items():
                await connection.execute(f"SET {name} = {value}")

    async def _notify(self, connection: asyncpg.Connection) -> None:
        """Carry the bells that ring next; if none does for long, check the connection."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._probe_seconds):
                await self._wanted.wait()
        self._wanted.clear()
        pending, self._pending = self._pending, set()
        statements = [f"NOTIFY {_PREFIX}{channel.value}" for channel in sorted(pending)]
        try:
            for statement in statements or ["SELECT 1"]:
                await connection.execute(statement, timeout=self._answer_seconds)
        except BaseException:
            self._pending |= pending
            raise

    def _note_away(self, error: str) -> None:
        """Log the start of an interruption."""
        if self._away_since is None:
            self._away_since = time.monotonic()
            log.warning(
                "the store's doorbell is disconnected; services look for work every two seconds until it is back",
                error=error,
            )

    def _note_back(self) -> None:
        """Log the end of an interruption."""
        if self._away_since is not None:
            seconds = round(time.monotonic() - self._away_since, 1)
            self._away_since = None
            log.info("the store's doorbell is connected again", after_seconds=seconds)

    def _hear(self, connection: asyncpg.Connection, process: int, name: str, payload: object) -> None:
        # `ring` has already rung this process's own bells here.
        if process != connection.get_server_pid():
            self.ring_here(Channel(name.removeprefix(_PREFIX)))
