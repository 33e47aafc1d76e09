"""A service that runs by itself: its store, its signals, and its sessions.

Invariants: it waits out an outage of the database, also at its start. When its session was ended because it was taken
for dead, it stops what it runs and begins another session. It never changes the tables of the database.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import structlog
from msgspec.structs import replace

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.setup import version
from tidemill.runtime.loop.loop_calls import call_on_loop
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.runtime.process.service_signals import Signals, finish_or_stop
from tidemill.runtime.process.stop_signals import find_stop_signals
from tidemill.services.dag_store import choose_cipher
from tidemill.services.dev.metrics import CallMeter, DagMetrics, MeasuredStore
from tidemill.services.dev.web_ui import serve_dags_metrics
from tidemill.services.sessions.beats import SessionLostError, send_beats
from tidemill.services.sessions.beginning import begin_session
from tidemill.services.sessions.describing import describe_session
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.predecessor import end_predecessor, lock_name
from tidemill.services.sessions.releasing import note_stopping, release_rest
from tidemill.services.sessions.works import Work, run_works
from tidemill.services.supervision.supervisor import ServiceFolder
from tidemill.store.calls.call import CallRefusedError, RefusalKind
from tidemill.store.calls.service_calls import BeginSession, CheckKey, EndSession
from tidemill.store.database import Database, SchemaChange
from tidemill.store.engines.opening import has_one_writer, open_store
from tidemill.store.wire.remote import call_patiently

log = structlog.get_logger(__name__)

_BACKOFF = Backoff(0.2, 5.0)
#: A loop that does not answer for this long hangs.
_LOOP_SECONDS = 5.0
#: The pause before another session is begun.
_PAUSE_SECONDS = 0.5
#: How long recording the end of a session may take.
_END_SECONDS = 5.0


class ServiceHealth:
    """Whether a service is at work; read from any thread.

    Args:
        kind: The kind of the service.
        loop: Its event loop.
    """

    def __init__(self, kind: str, loop: asyncio.AbstractEventLoop) -> None:
        self._kind, self._loop = kind, loop
        self._works = False

    def note(self, *, works: bool) -> None:
        """Record whether the service has a session."""
        self._works = works

    def find_dead(self) -> list[str]:
        """Return the reasons to restart the process."""
        try:
            call_on_loop(self._loop, lambda: None, _LOOP_SECONDS)
        except TimeoutError:
            return [f"the event loop has not answered for {_LOOP_SECONDS:g} s"]
        return []

    def find_unready(self) -> list[str]:
        """Return the reasons why the service does not work at the moment."""
        return self.find_dead() or ([] if self._works else [f"the {self._kind} has no session in the store yet"])


@dataclass(frozen=True, slots=True)
class ServiceHost:
    """The parts that every service that runs by itself needs.

    Attributes:
        kind: The kind of the service.
        about: The folder and the settings.
        store: The store.
        stop: Set when the service is to stop.
        lock: The lock of its name on this machine.
        calls: The same store for calls, which are counted for the metrics.
        health: Whether the service is at work.
    """

    kind: str
    about: ServiceFolder
    store: Database
    stop: asyncio.Event
    lock: IdentityLock
    calls: MeasuredStore
    health: ServiceHealth

    @property
    def name(self) -> str:
        """The name of the service."""
        return find_worker_name(self.about.settings)

    def describe(self) -> BeginSession:
        """Return the request that begins a session."""
        return replace(describe_session(self.kind, self.name), lock=self.lock.identity)

    @property
    def lease(self) -> ServiceLease:
        """The lease of its sessions."""
        return ServiceLease(self.about.settings.services.lease_seconds)


class HostedService(Protocol):
    """The work of a service in its sessions."""

    def build_works(self, host: ServiceHost, session: int) -> list[Work]:
        """Return the parts that run during a session."""
        ...

    async def end(self) -> None:
        """End in order, at the end of a session, what must not be cancelled."""
        ...


def check_shared(kind: str, about: ServiceFolder) -> str:
    """Return the URL of a store that services on several hosts can share.

    Raises:
        ConfigError: The store is a SQLite file.
    """
    url = about.settings.store.url
    if url and not has_one_writer(url):
        return url
    raise ConfigError(
        f"`tidemill {kind}` needs a store in PostgreSQL: set store.url to postgresql://user:password@host/name; "
        "on SQLite, run all services by one `tidemill dev`"
    )


def run_service(kind: str, about: ServiceFolder, run: Callable[[ServiceHost], Awaitable[None]]) -> ExitCode:
    """Run a service until a signal.

    Args:
        kind: The kind of the service, which is also the name of the command.
        about: The folder and the settings.
        run: Runs the service until `stop` is set.

    Raises:
        ConfigError: The settings are invalid, the tables have another revision, or the key is not the database's.
        RemoteError: A part of the service stopped.
    """
    url = check_shared(kind, about)
    signals = Signals()
    signals.listen(find_stop_signals())
    with asyncio.Runner() as runner:
        runner.run(_run(kind, about, url, signals, run))
    return ExitCode.OK


async def _run(
    kind: str, about: ServiceFolder, url: str, signals: Signals, run: Callable[[ServiceHost], Awaitable[None]]
) -> None:
    signals.attach()
    settings = about.settings
    lock = lock_name(kind, find_worker_name(settings), url, settings.worker_name_env)
    if not about.settings.store.encryption_key:
        log.warning(
            "store.encryption_key is not set: variables and connections are stored in PostgreSQL as readable text"
        )
    opened = await finish_or_stop(open_shared_store(about.settings, url), signals.stop)
    if opened is None:
        return
    store = opened.result()
    try:
        checked = await finish_or_stop(call_patiently(store, CheckKey()), signals.stop)
        if checked is None:
            return
        checked.result()
        ended = await finish_or_stop(end_predecessor(store, kind, lock), signals.stop)
        if ended is not None:
            ended.result()
            meter, health = CallMeter(), ServiceHealth(kind, asyncio.get_running_loop())
            calls = MeasuredStore(store, meter)
            host = ServiceHost(kind, about, store, signals.stop, lock, calls, health)
            metrics = DagMetrics(calls, asyncio.get_running_loop(), meter, (host.name, version()))
            with serve_dags_metrics(settings, metrics, health.find_dead, health.find_unready):
                await run(host)
    finally:
        await store.close()
        lock.release()
    log.info(f"the {kind} has ended")


async def open_shared_store(settings: Settings, url: str) -> Database:
    """Open a store that services share, however long the database is unreachable.

    Raises:
        ConfigError: The tables have another revision, or a key is invalid.
    """
    cipher, attempt = choose_cipher(settings, url), 0
    while True:
        attempt += 1
        try:
            store = await open_store(url, cipher, schema=SchemaChange.NONE, listen_url=settings.store.listen_url)
        except RemoteError as error:
            if not error.retryable:
                raise
            if attempt == 1:
                log.warning("the store cannot be reached; everything waits for it", error=str(error))
        else:
            if attempt > 1:
                log.info("the store can be reached", store=store.label)
            return store
        await asyncio.sleep(_BACKOFF.compute_delay(attempt, random.getrandbits(JITTER_BITS)))


async def serve_sessions(host: ServiceHost, service: HostedService) -> None:
    """Run a service in one session after another until `stop` is set.

    Raises:
        RemoteError: A part of the service stopped.
    """
    request = host.describe()
    while not host.stop.is_set():
        begun = await finish_or_stop(begin_session(host.store, request), host.stop)
        if begun is None:
            return
        session = begun.result()
        host.health.note(works=True)
        log.info(f"the {host.kind} is running", session=session, store=host.store.label)
        works = [("heartbeat", send_beats(host.store, session, host.lease)), *service.build_works(host, session)]

        async def end(number: int = session) -> None:
            await note_stopping(host.store, number)
            await service.end()

        try:
            await run_works(works, host.stop, end)
        except SessionLostError:
            await note_lost(host)
            continue
        except CallRefusedError as error:
            if error.kind is not RefusalKind.FENCED:
                raise
            await note_lost(host)
            continue
        with contextlib.suppress(RemoteError, TimeoutError):
            async with asyncio.timeout(_END_SECONDS):
                await host.store.call(EndSession(session))
                await release_rest(host.store)


async def note_lost(host: ServiceHost) -> None:
    """Say that the session was ended, and wait before another one is begun."""
    host.health.note(works=False)
    log.warning(f"this {host.kind} was taken for dead, and others continue its work; beginning another session")
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(host.stop.wait(), _PAUSE_SECONDS)
