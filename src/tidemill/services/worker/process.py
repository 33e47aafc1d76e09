"""The process of a worker: `python -m tidemill.services.worker.process ADDRESS`.

It reaches the store by named calls over a Unix socket, and has no database connection. At SIGTERM it claims nothing
more, lets its tasks run for a while, returns the others to the queue, and exits; a second SIGTERM ends it at once. It
also ends with its parent, which holds the other end of its standard input.

Invariants: it survives an outage or restart of the store; no process that it started outlives it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import structlog

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import TidemillError
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.setup import configure
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.service_signals import Signals
from tidemill.services.dag_store import make_absolute
from tidemill.services.parent import watch_parent
from tidemill.services.sessions.describing import describe_session
from tidemill.services.worker.preloads import PRELOADS
from tidemill.services.worker.worker_session import WorkerSession, read_config
from tidemill.services.zygote.client import ZygoteClient
from tidemill.services.zygote.messages import Setup
from tidemill.store.calls.service_calls import BeginSession
from tidemill.store.wire.remote import RemoteStore

log = structlog.get_logger("tidemill.services.worker.process")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks until a signal arrives or the parent exits; return the exit code."""
    parser = argparse.ArgumentParser(prog="tidemill.services.worker.process", description=__doc__)
    parser.add_argument("address", help="the Unix socket of the process that serves the store")
    parser.add_argument("--config", help="the configuration file")
    parser.add_argument("--folder", help="the folder of DAGs")
    parser.add_argument("--parent", type=int, help="the session of the process that started this one")
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
        about = describe_session("worker", name, given.parent)
        asyncio.run(_run(settings, Path(given.address), folder, about, signals, secrets))
    except TidemillError as error:
        code = find_exit_code(error)
        print(error, file=sys.stderr)
    return code


async def _run(
    settings: Settings,
    address: Path,
    folder: Path,
    about: BeginSession,
    signals: Signals,
    secrets: KnownSecrets,
) -> None:
    # The zygote and its warden end all other processes.
    watch_parent(lambda: log.warning("the process that started this worker has exited; the worker exits"), 0.0)
    signals.attach()
    config = read_config(settings, folder)
    # Start it first: it then inherits no connection of this process, and is ready when the first attempt is claimed.
    zygote = ZygoteClient(Setup(PRELOADS, tuple(settings.worker.preload), (str(folder),)))
    store = RemoteStore(address)
    try:
        session = WorkerSession(config, settings.worker.drain_timeout_seconds, about, store, zygote, secrets)
        await session.run(signals.stop)
    finally:
        await zygote.close()
        await store.close()
    log.info("the worker has ended")


if __name__ == "__main__":
    sys.exit(main())
