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
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.runtime.files.folders import OwnedFolder
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.relayed_output import relayed_output
from tidemill.runtime.log.setup import version
from tidemill.runtime.loop.loop_calls import call_on_loop
from tidemill.runtime.process.boot import read_boot_id
from tidemill.runtime.process.exitcode import ExitCode
from tidemill.runtime.process.service_signals import Signals, finish_or_stop
from tidemill.runtime.process.stop_signals import find_stop_signals
from tidemill.services.dag_store import choose_cipher, choose_url
from tidemill.services.dev.child import Child, Death
from tidemill.services.dev.metrics import CallMeter, DagMetrics, MeasuredStore
from tidemill.services.dev.silence import wait_until_silent
from tidemill.services.dev.takeover import KIND, Lease, take_over
from tidemill.services.dev.trials import Trials
from tidemill.services.dev.web_ui import WatchedDags, serve_dags_metrics, serve_dags_web
from tidemill.services.lost_store import check_files, recover_store, watch_files
from tidemill.services.parser.manager import ParserManager
from tidemill.services.parser.reading import PRELOAD
from tidemill.services.scheduler.scheduler import Scheduler
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import (
    BeatSession,
    BeginSession,
    EndSession,
    ListSessions,
    LoseSession,
)
from tidemill.store.database import Database, StoreClient
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import find_file, open_store
from tidemill.store.engines.recovery import StoreLostError
from tidemill.store.run_retention import RunRetention
from tidemill.store.wire.call_server import CallServer

log = structlog.get_logger(__name__)

#: Another command may have the store open for a moment.
_BUSY_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
#: The heartbeat interval of services.
BEAT_SECONDS = 5.0
#: A loop that does not answer for this long hangs.
_LOOP_SECONDS = 5.0
#: How long the triggerer may take to release its triggers.
_TRIGGERER_SECONDS = 10.0
#: A service without a heartbeat for this long hangs; a triggerer also gets the time for which a trigger may block it.
_SILENT_SECONDS = 30.0
#: A process that has not begun its session by then hangs; before that it only imports modules of tidemill.
_START_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class DevFolder:
    """The arguments of `tidemill dev`.

    Attributes:
        settings: The settings.
        folder: The folder of DAG files, absolute.
        config: The file of the settings; None if there is none.
    """

    settings: Settings
    folder: Path
    config: Path | None = None


def run_dev(about: DevFolder, on_ready: Callable[[Dev], Awaitable[None]] | None = None) -> ExitCode:
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


async def _run(about: DevFolder, signals: Signals, on_ready: Callable[[Dev], Awaitable[None]] | None) -> None:
    signals.attach()
    url = choose_url(about.settings, about.folder)
    if find_file(url) is None and not about.settings.store.encryption_key:
        log.warning(
            "store.encryption_key is not set: variables and connections are stored in PostgreSQL as readable text"
        )
    database = await _open(url, about.settings)
    try:
        await _serve_all(about, database, signals, on_ready)
        await check_files(database)
    except StoreLostError as loss:
        await recover_store(database, loss, "tidemill dev")
    finally:
        await database.close()
    log.info("tidemill dev has ended")


async def _serve_all(
    about: DevFolder, database: Database, signals: Signals, on_ready: Callable[[Dev], Awaitable[None]] | None
) -> None:
    meter = CallMeter()
    measured = MeasuredStore(database, meter)
    with relayed_output("tidemill-dev-output") as output:
        async with _serve(database, measured) as address:
            dev = Dev(about, database, address, output)
            with _serve_web(dev, measured, meter):
                await dev.run(signals.stop, on_ready)


async def _open(url: str, settings: Settings) -> Database:
    deadline = asyncio.get_running_loop().time() + _BUSY_SECONDS
    cipher = choose_cipher(settings, url)
    while True:
        try:
            return await open_store(url, cipher)
        except StoreInUseError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)


@contextlib.asynccontextmanager
async def _serve(database: Database, store: StoreClient) -> AsyncIterator[Path]:
    """Answer calls on a socket of this process during the block; yields the socket's path.

    Args:
        database: Publishes the path to other processes.
        store: Answers the calls.
    """
    # A temporary folder, because the path of a socket is limited to about 100 bytes. If this process is killed, the
    # next one removes the folder.
    owned = OwnedFolder("tidemill-dev-")
    server = CallServer(store, owned.path / "store.sock")
    try:
        await server.start()
        database.publish(str(server.path))
        yield server.path
    finally:
        await server.close()
        owned.cleanup()


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

    def __init__(self, about: DevFolder, database: Database, address: Path, output: int) -> None:
        self.about = about
        self.database = database
        self.name = find_worker_name(about.settings)
        self.lease = Lease()
        self._host, self._boot_id = socket.gethostname(), read_boot_id()
        self._sessions: list[int] = []
        self.zygote = ZygoteClient(Setup(tuple(PRELOAD)))
        triggerer = self._build_arguments("tidemill.services.triggerer.tasks.process", address)
        # A blocked triggerer reports the blocking trigger itself, long before this limit.
        silent_seconds = 1.5 * about.settings.triggerer.block_limit_seconds + _SILENT_SECONDS
        self._silent_seconds = {"worker": _SILENT_SECONDS, "triggerer": silent_seconds}
        self.trials = Trials(
            database, triggerer, os.environ, output, self._describe("triggerer"), silent_seconds=silent_seconds
        )
        self.children = [
            Child(
                "worker",
                self._build_arguments("tidemill.services.worker.process", address),
                os.environ,
                output,
                self._note_death,
            ),
            Child("triggerer", triggerer, os.environ, output, self._note_death),
        ]
        self.parser: ParserManager | None = None

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
        scheduler = await self._begin("scheduler")
        settings = self.about.settings
        log.info("tidemill dev is starting", folder=str(self.about.folder), store=self.database.label)
        tasks = [
            self._start("scheduler", Scheduler(self.database, self.database.doorbell, scheduler).run()),
            self._start("parser", self._parse()),
            self._start("beats", self._beat(dev, scheduler)),
            self._start("trials of triggers", self.trials.run(dev)),
            self._start("watch of the store's file", watch_files(self.database)),
            self._start("retention", RunRetention(self.database, settings.store).run()),
            *(self._start(child.name, child.run()) for child in self.children),
            *(self._start(f"watch of the {child.name}", self._watch(child)) for child in self.children),
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
            for child in self.children:
                child.kill()
            raise
        finally:
            await self._stop(tasks, [stopping, *shown])

    async def _parse(self) -> None:
        # The zygote's imports run while the worker and the triggerer import.
        await self.zygote.start()
        dags = self.about.settings.dags
        self.parser = ParserManager(
            self.database,
            self.zygote,
            self.about.folder,
            dags.parse_timeout_seconds,
            dags.paused_at_creation,
            dags.reparse_seconds,
        )
        await self.parser.run()

    def find_unready(self) -> list[str]:
        """Return the reasons why DAGs cannot run at the moment; callable from any thread."""
        reasons = [f"the {child.name} is not running" for child in self.children if child.pid is None]
        if self.parser is None or not self.parser.ready.is_set():
            reasons.append("starting: some DAG files have not been read yet")
        return reasons

    @staticmethod
    def _start(name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, name=name)

    async def _stop(self, tasks: list[asyncio.Task[None]], others: list[asyncio.Future[Any]]) -> None:
        """Stop the services in order: claims stop, attempts drain, then the scheduler ends."""
        settings = self.about.settings
        drains = [settings.worker.drain_timeout_seconds, _TRIGGERER_SECONDS]
        await asyncio.gather(*(child.stop(drain) for child, drain in zip(self.children, drains, strict=True)))
        for task in [*tasks, *others]:
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
        await self.zygote.close()
        for session in reversed(self._sessions):
            with contextlib.suppress(RemoteError):
                await self.database.call(EndSession(session))

    async def _take_over(self, own: int) -> None:
        await take_over(self.database, own, self._host, self._boot_id, self.lease)

    async def _begin(self, kind: str) -> int:
        session = await self.database.call(self._describe(kind))
        self._sessions.append(session)
        return session

    def _describe(self, kind: str) -> BeginSession:
        return BeginSession(kind, self.name, self._host, self._boot_id, os.getpid())

    async def _beat(self, *sessions: int) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            for session in sessions:
                try:
                    lives = await self.database.call(BeatSession(session))
                except RemoteError as error:
                    log.warning("the store cannot be reached", error=str(error))
                    continue
                if not lives:
                    raise RemoteError("lost the lease: another `tidemill dev` has taken over")

    def _build_arguments(self, module: str, address: Path) -> list[str]:
        """Return the arguments of the Python interpreter for a service."""
        config = [] if self.about.config is None else ["--config", str(self.about.config)]
        return ["-m", module, str(address), "--folder", str(self.about.folder), *config]

    async def _watch(self, child: Child) -> None:
        """Kill a hanging service, whose work its successor continues."""
        while True:
            await wait_until_silent(
                self.database,
                lambda one: (one.pid, one.host, one.boot_id) == (child.pid, self._host, self._boot_id),
                self._silent_seconds[child.name],
                find_process=lambda: child.pid,
                start_seconds=_START_SECONDS,
            )
            log.error(f"the {child.name} hangs: it has sent no heartbeat for too long; killing it", pid=child.pid)
            child.replace()

    async def _note_death(self, death: Death) -> None:
        """Release the work of a dead process, except triggers that may have caused its death."""
        for session in await self.database.call(ListSessions()):
            if session.pid == death.pid and session.host == self._host and session.boot_id == self._boot_id:
                if session.kind == "triggerer" and not death.explained:
                    await self.trials.note_death(session.id, death)
                await self.database.call(LoseSession(session.id))
