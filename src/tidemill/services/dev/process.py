"""The process of `tidemill dev`: opens the store, runs scheduler and parser, and supervises worker and triggerer.

On SQLite this process is the store's only writer and answers the calls of the others. SIGTERM, SIGINT and SIGHUP stop
it: the worker drains, then everything ends. A second signal ends it at once.

Invariants:
- Unfinished work of an earlier process is released before any service starts.
- The exit of a service is detected at once, and its work is released before it restarts.
- No process of this tree outlives this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.relayed_output import relayed_output
from tidemill.runtime.log.setup import version
from tidemill.runtime.loop.loop_calls import call_on_loop
from tidemill.runtime.process.boot import read_boot_id
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.service_signals import Signals, finish_or_stop
from tidemill.runtime.process.stop_signals import find_stop_signals
from tidemill.services.dag_store import choose_cipher, choose_url
from tidemill.services.dev.metrics import CallMeter, DagMetrics, MeasuredStore
from tidemill.services.dev.takeover import KIND, Lease, take_over
from tidemill.services.dev.web_ui import WatchedDags, serve_dags_metrics, serve_dags_web
from tidemill.services.lost_store import check_files, recover_store, watch_files
from tidemill.services.map_limits import build_map_limits
from tidemill.services.parser.service import ParserService
from tidemill.services.scheduler.scheduler import Scheduler
from tidemill.services.sessions.beats import SessionLostError, send_beats
from tidemill.services.sessions.describing import describe_session
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.observer import SessionObserver
from tidemill.services.supervision.call_socket import serve_calls
from tidemill.services.supervision.supervisor import ServiceFolder, ServiceSupervisor
from tidemill.store.calls.service_calls import (
    BeginSession,
    CheckKey,
    EndSession,
)
from tidemill.store.database import Database
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import find_file, open_store
from tidemill.store.engines.recovery import StoreLostError
from tidemill.store.run_retention import RunRetention

log = structlog.get_logger(__name__)

#: Another command may have the store open for a moment.
_BUSY_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
#: A loop that does not answer for this long hangs.
_LOOP_SECONDS = 5.0


def run_dev(about: ServiceFolder, on_ready: Callable[[Dev], Awaitable[None]] | None = None) -> ExitCode:
    """Run all services of a folder of DAGs until a signal.

    Args:
        about: The folder and its settings.
        on_ready: Called as a task once all services have started, for example to display their status.

    Raises:
        ConfigError: The settings are invalid, or another process runs this folder.
        RemoteError: The store cannot be reached.
    """
    signals = Signals()
    signals.listen(find_stop_signals())
    with asyncio.Runner() as runner:
        runner.run(_run(about, signals, on_ready))
    return ExitCode.OK


async def _run(about: ServiceFolder, signals: Signals, on_ready: Callable[[Dev], Awaitable[None]] | None) -> None:
    signals.attach()
    url = choose_url(about.settings, about.folder)
    if find_file(url) is None and not about.settings.store.encryption_key:
        log.warning(
            "store.encryption_key is not set: variables and connections are stored in PostgreSQL as readable text"
        )
    database = await _open(url, about.settings)
    try:
        if not database.exclusive:
            await database.call(CheckKey())
        await _serve_all(about, database, signals, on_ready)
        await check_files(database)
    except StoreLostError as loss:
        await recover_store(database, loss, "tidemill dev")
    finally:
        await database.close()
    log.info("tidemill dev has ended")


async def _serve_all(
    about: ServiceFolder, database: Database, signals: Signals, on_ready: Callable[[Dev], Awaitable[None]] | None
) -> None:
    meter = CallMeter()
    measured = MeasuredStore(database, meter)
    with relayed_output("tidemill-dev-output") as output:
        async with serve_calls(database, measured) as address:
            dev = Dev(about, database, address, output)
            with _serve_web(dev, measured, meter):
                await dev.run(signals.stop, on_ready)


async def _open(url: str, settings: Settings) -> Database:
    deadline = asyncio.get_running_loop().time() + _BUSY_SECONDS
    cipher = choose_cipher(settings, url)
    while True:
        try:
            return await open_store(url, cipher, listen_url=settings.store.listen_url)
        except StoreInUseError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)


@contextlib.contextmanager
def _serve_web(dev: Dev, store: MeasuredStore, meter: CallMeter) -> Iterator[None]:
    """Serve metrics, health and the web UI during the block, as far as they are enabled."""
    settings, loop = dev.about.settings, asyncio.get_running_loop()
    metrics = DagMetrics(store, loop, meter, (dev.name, version()))

    def find_dead() -> list[str]:
        try:
            call_on_loop(loop, lambda: None, _LOOP_SECONDS)
        except TimeoutError:
            return [f"the event loop has not answered for {_LOOP_SECONDS:g} s"]
        return []

    def find_unready() -> list[str]:
        return find_dead() or dev.find_unready()

    with serve_dags_metrics(settings, metrics, find_dead, find_unready) as address:
        name = str(dev.about.folder)
        with serve_dags_web(WatchedDags(settings, dev.name, name, store, loop, find_dead, find_unready, address)):
            yield


def _note_failure(shown: asyncio.Future[None]) -> None:
    """Log that the status display failed; the services continue."""
    if not shown.cancelled() and (error := shown.exception()) is not None:
        log.error("the status display failed; this is a bug in tidemill", exc_info=error)


class Dev:
    """All services of a folder of DAGs.

    Args:
        about: The folder and its settings.
        database: The store, open for writing.
        address: The socket on which this process answers calls.
        output: The descriptor to which other processes write their logs.
    """

    def __init__(self, about: ServiceFolder, database: Database, address: Path, output: int) -> None:
        self.about = about
        self.database = database
        self.name = find_worker_name(about.settings)
        self._lease = ServiceLease(about.settings.services.lease_seconds)
        self.lease = Lease(self._lease.seconds)
        self._host, self._boot_id = socket.gethostname(), read_boot_id()
        self._sessions: list[int] = []
        self.parser = ParserService(about)
        kinds = ("worker", "triggerer")
        self.supervisor = ServiceSupervisor(kinds, about, database, address, output, self._describe(KIND))
        self.children = self.supervisor.children

    async def run(self, stop: asyncio.Event, on_ready: Callable[[Dev], Awaitable[None]] | None) -> None:
        """Run until `stop` is set.

        Raises:
            ConfigError: Another `dev` runs on this store.
            RemoteError: A service cannot be kept running.
        """
        dev = await self._begin(KIND)
        taken = await finish_or_stop(self._take_over(dev), stop)
        if taken is None or taken.exception() is not None:
            await self._stop([], [])
        if taken is None:
            return
        taken.result()
        scheduler = await self._begin("scheduler", dev)
        settings = self.about.settings
        log.info("tidemill dev is starting", folder=str(self.about.folder), store=self.database.label)
        tasks = [
            self._start(
                "scheduler",
                Scheduler(
                    self.database,
                    self.database.doorbell,
                    scheduler,
                    build_map_limits(settings.dags),
                    settings.dags.missing_file_seconds,
                ).run(),
            ),
            self._start("parser", self._parse(dev)),
            *(self._start("beats", self._beat(session)) for session in (dev, scheduler)),
            self._start("watch of the store's file", watch_files(self.database)),
            self._start("retention", RunRetention(self.database, settings.store).run()),
            *(self._start(name, work) for name, work in self.supervisor.build_works(dev)),
            *self._observe(dev),
        ]
        shown = [] if on_ready is None else [asyncio.ensure_future(on_ready(self))]
        for follower in shown:
            follower.add_done_callback(_note_failure)
        stopping = asyncio.ensure_future(stop.wait())
        try:
            done, _ = await asyncio.wait({*tasks, stopping}, return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopping}:
                task.result()
                raise RemoteError(f"the {task.get_name()} stopped unexpectedly; see the log")
        except StoreLostError:
            # Reports from now on would miss the saved copy, so kill the services; their work is repeated from the copy.
            self.supervisor.kill()
            raise
        finally:
            await self._stop(tasks, [stopping, *shown])

    async def _parse(self, dev: int) -> None:
        own = None if self.database.exclusive else await self._begin("parser", dev)
        await self.parser.run(self.database, own)

    def find_unready(self) -> list[str]:
        """Return the reasons why DAGs cannot run at the moment; callable from any thread."""
        reasons = [f"the {child.name} is not running" for child in self.children if child.pid is None]
        if not self.parser.is_ready:
            reasons.append("starting: some DAG files have not been read yet")
        return reasons

    @staticmethod
    def _start(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    async def _stop(self, tasks: list[asyncio.Task[None]], others: list[asyncio.Future[Any]]) -> None:
        """Stop the services in order: claims stop, attempts drain, then the scheduler ends."""
        await self.supervisor.stop()
        for task in [*tasks, *others]:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
        await self.parser.close()
        for session in reversed(self._sessions):
            with contextlib.suppress(RemoteError):
                await self.database.call(EndSession(session))

    async def _take_over(self, own: int) -> None:
        await take_over(self.database, own, self._host, self._boot_id, self.lease)

    async def _begin(self, kind: str, parent: int | None = None) -> int:
        session = await self.database.call(self._describe(kind, parent))
        self._sessions.append(session)
        return session

    def _describe(self, kind: str, parent: int | None = None) -> BeginSession:
        return describe_session(kind, self.name, parent)

    def _observe(self, own: int) -> list[asyncio.Task[None]]:
        if self.database.exclusive:
            return []  # all services are below this process
        return [self._start("observer of sessions", SessionObserver(self.database, own, self._lease).run())]

    async def _beat(self, session: int) -> None:
        try:
            await send_beats(self.database, session, self._lease)
        except SessionLostError:
            raise RemoteError("lost the lease: another `tidemill dev` has taken over") from None
