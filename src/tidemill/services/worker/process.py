"""The process of a worker: `python -m tidemill.services.worker.process ADDRESS`.

It reaches the store by named calls over a Unix socket, and has no database connection. At SIGTERM it claims nothing
more, lets its tasks run for a while, returns the others to the queue, and exits; a second SIGTERM ends it at once. It
also ends with its parent, which holds the other end of its standard input.

Invariants: it survives an outage or restart of the store; no process that it started outlives it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError, TidemillError, describe_error
from tidemill.core.tasks.worker_slots import WorkerLimits
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.setup import configure
from tidemill.runtime.process.boot import read_boot_id
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.service_signals import Signals, finish_or_stop
from tidemill.services.dag_store import make_absolute
from tidemill.services.parent import watch_parent
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.store_link import beat, call_unfenced
from tidemill.services.worker.worker import Worker
from tidemill.services.worker.worker_config import WorkerConfig
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import BeginSession, EndSession
from tidemill.store.wire.remote import RemoteStore

log = structlog.get_logger("tidemill.services.worker.process")

#: After the grace period: time for the processes to exit and for their reports to be stored.
_LAST_SECONDS = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks until a signal arrives or the parent exits; return the exit code."""
    parser = argparse.ArgumentParser(prog="tidemill.services.worker.process", description=__doc__)
    parser.add_argument("address", help="the Unix socket of the process that serves the store")
    parser.add_argument("--config", help="the configuration file")
    parser.add_argument("--folder", help="the folder of DAGs")
    given = parser.parse_args(arguments)
    signals = Signals(is_child=True)
    signals.listen()
    # Ctrl-C reaches all processes of a terminal; the parent decides when this one stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = ExitCode.OK
    try:
        settings = load_settings(given.config)
        name = find_worker_name(settings)
        secrets = KnownSecrets()
        configure(settings.logging, stream=sys.stderr, relayed=True, secrets=secrets, worker_id=name)
        folder = make_absolute(Path(given.folder or settings.dags.folder))
        asyncio.run(_run(settings, Path(given.address), folder, name, signals, secrets))
    except TidemillError as error:
        code = find_exit_code(error)
        print(error, file=sys.stderr)
    return code


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
    )


async def _run(
    settings: Settings, address: Path, folder: Path, name: str, signals: Signals, secrets: KnownSecrets
) -> None:
    # The zygote and its warden end all other processes.
    watch_parent(lambda: log.warning("the process that started this worker has exited; the worker exits"), 0.0)
    signals.attach()
    config = read_config(settings, folder)
    # Start it first: it then inherits no connection of this process, and is ready when the first attempt is claimed.
    zygote = ZygoteClient(Setup(PRELOADS, tuple(settings.worker.preload), (str(folder),)))
    store = RemoteStore(address)
    try:
        about = BeginSession(
            "worker", name, socket.gethostname(), read_boot_id(), os.getpid(), config.queues, config.limits.concurrency
        )
        begun = await finish_or_stop(_begin(zygote, store, about), signals.stop)
        if begun is None:
            return
        session = begun.result()
        log.info("the worker is ready", folder=str(folder), concurrency=config.limits.concurrency)
        worker = Worker(session, config, store, store.doorbell, zygote, secrets)
        await _serve(worker, settings.worker.drain_timeout_seconds, config.limits.grace_seconds, signals.stop)
        try:
            await asyncio.wait_for(store.call(EndSession(session)), _LAST_SECONDS)
        except (TimeoutError, RemoteError) as error:
            log.warning("cannot record in the store that this worker has ended", error=describe_error(error))
    finally:
        await zygote.close()
        await store.close()
    log.info("the worker has ended")


async def _begin(zygote: ZygoteClient, store: RemoteStore, about: BeginSession) -> int:
    """Begin the session; return its number once the zygote is ready."""
    starting = asyncio.ensure_future(zygote.start())
    tasks = [starting]
    try:
        session = await call_unfenced(store, about)
        # Preloaded user modules may take minutes to import; without heartbeats the worker would be declared dead.
        tasks.append(asyncio.ensure_future(beat(store, session, dict)))
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for each in tasks:
            if each.done():
                each.result()
    finally:
        for each in tasks:
            each.cancel()
        await asyncio.wait(tasks)
    return session


async def _serve(worker: Worker, drain_seconds: float, grace_seconds: float, stop: asyncio.Event) -> None:
    """Run the worker until it is told to stop; then let tasks run for a while, and return the others to the queue."""
    running = asyncio.ensure_future(worker.run())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({running, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not running.done():
            worker.drain()
            await asyncio.wait({running}, timeout=drain_seconds)
        if not running.done():
            log.warning("tasks are still running; queueing them again", tasks=worker.processes.running)
            worker.end_all()
            await asyncio.wait({running}, timeout=grace_seconds + _LAST_SECONDS)
        if running.done():
            running.result()
        else:
            log.warning("the store cannot be reached; the next start will queue the remaining tasks again")
    finally:
        stopping.cancel()
        running.cancel()
        await asyncio.wait({running})


if __name__ == "__main__":
    sys.exit(main())
