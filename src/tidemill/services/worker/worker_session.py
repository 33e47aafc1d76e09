"""One session of a worker: its start, its turns with the store, the drain, and its end.

Invariant: heartbeats are sent from the start of the session to its end, also while the zygote imports modules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError, describe_error
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.runtime.process.service_signals import finish_or_stop
from tidemill.services.sessions.beginning import identify_request
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.sessions.releasing import note_stopping
from tidemill.services.worker.store_link import beat, beat_once, call_unfenced
from tidemill.services.worker.worker import Worker
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.store.calls.service_calls import BeginSession, EndSession
from tidemill.store.database import StoreClient

log = structlog.get_logger(__name__)

#: After the grace period: time for the processes to exit and for their reports to be stored.
_LAST_SECONDS = 10.0


def read_config(settings: Settings, folder: Path) -> WorkerConfig:
    """Return the configuration of a worker."""
    worker = settings.worker
    # Twice, because the parser imports one file after another, but several task processes import one concurrently.
    import_seconds = 2 * settings.dags.parse_timeout_seconds
    limits = WorkerLimits(
        worker.concurrency, worker.recycle_after_tasks, worker.term_grace_seconds, import_seconds=import_seconds
    )
    return WorkerConfig(
        folder,
        limits,
        tuple(worker.queues),
        settings.logs.max_bytes_per_try,
        settings.logging.level,
        tuple(worker.reuse_processes),
        settings.dags.reparse_seconds,
        ServiceLease(settings.services.lease_seconds),
    )


class WorkerSession:
    """One session of a worker.

    Args:
        config: The configuration of the worker.
        drain_seconds: How long tasks may run on after the stop.
        about: The request that begins the session; queues and concurrency are those of the configuration.
        store: The store.
        zygote: Forks task processes; closed by the caller.
        secrets: The secrets that this process masks; those of tasks are added.
        on_ready: Called once the worker can claim tasks.
    """

    def __init__(
        self,
        config: WorkerConfig,
        drain_seconds: float,
        about: BeginSession,
        store: StoreClient,
        zygote: ZygoteClient,
        secrets: KnownSecrets,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_ready = on_ready
        self._config, self._drain_seconds = config, drain_seconds
        self._about = msgspec.structs.replace(about, queues=config.queues, capacity=config.limits.concurrency)
        self._store, self._zygote, self._secrets = store, zygote, secrets

    async def run(self, stop: asyncio.Event) -> None:
        """Run tasks until `stop` is set, and end the session.

        Raises:
            WorkerFencedError: The store has ended the session; no process of it is left.
        """
        begun = await finish_or_stop(self._begin(), stop)
        if begun is None:
            return
        session, config = begun.result(), self._config
        log.info(
            "the worker is ready", folder=str(config.folder), concurrency=config.limits.concurrency, session=session
        )
        self._on_ready()
        worker = Worker(session, config, self._store, self._store.doorbell, self._zygote, self._secrets)
        await self._serve(worker, session, stop)
        try:
            await asyncio.wait_for(self._store.call(EndSession(session)), _LAST_SECONDS)
        except (TimeoutError, RemoteError) as error:
            log.warning("cannot record in the store that this worker has ended", error=describe_error(error))

    async def _begin(self) -> int:
        """Begin the session; return its number once the zygote is ready."""
        zygote = self._zygote
        starting = asyncio.ensure_future(zygote.start() if zygote.pid is None else zygote.ready.wait())
        tasks: list[asyncio.Future[Any]] = [starting]
        try:
            session = await call_unfenced(self._store, identify_request(self._about))
            # Without the time of the store, the first tasks would go by the clock of this host.
            await beat_once(self._store, session, {})
            # Preloaded user modules may take minutes to import; without heartbeats the worker would be declared dead.
            beating = beat(self._store, session, dict, self._config.lease.beat_seconds)
            tasks.append(asyncio.ensure_future(beating))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for each in tasks:
                if each.done():
                    each.result()
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.wait(tasks)
        return session

    async def _serve(self, worker: Worker, session: int, stop: asyncio.Event) -> None:
        """Run the worker until the stop; then let tasks run for a while, and return the others to the queue."""
        running = asyncio.ensure_future(worker.run())
        stopping = asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                worker.drain()
                # What manages services may kill this one before its tasks have ended.
                noting = asyncio.ensure_future(note_stopping(self._store, session))
                await asyncio.wait({running}, timeout=self._drain_seconds)
                await noting
            if not running.done():
                log.warning("tasks are still running; queueing them again", tasks=worker.processes.running)
                worker.end_all()
                await asyncio.wait({running}, timeout=self._config.limits.grace_seconds + _LAST_SECONDS)
            if running.done():
                running.result()
            else:
                log.warning("the store cannot be reached; the next start will queue the remaining tasks again")
        finally:
            stopping.cancel()
            running.cancel()
            await asyncio.wait({running})
