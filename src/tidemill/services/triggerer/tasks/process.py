"""The process that runs the triggers of deferred tasks: `python -m tidemill.services.triggerer.tasks.process ADDRESS`.

It reaches the store by named calls over a Unix socket, and has no database connection. SIGTERM stops it: its triggers
are released, and run by the next triggerer; if the parent did not request the stop, that counts as a crash. It also
ends with its parent, which holds the other end of its standard input. With `--session` it runs only the triggers
reserved for that session, for a limited time: triggers that may have killed an earlier process.

Invariants: it survives an outage or restart of the store; no trigger fails because the process ends; programs that
triggers started end with it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import structlog
from msgspec.structs import replace

from tidemill.config.known_secrets import KnownSecrets
from tidemill.config.loading import load_settings
from tidemill.config.settings import Settings
from tidemill.core.errors import TidemillError
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.log.setup import configure
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.service_signals import Signals
from tidemill.services.parent import watch_parent
from tidemill.services.sessions.describing import describe_session
from tidemill.services.sessions.lease import ServiceLease
from tidemill.services.triggerer.hosting.leaving import end_anyway
from tidemill.services.triggerer.hosting.trigger_loop import TriggerLoop
from tidemill.services.triggerer.tasks.folder_code import FolderCode
from tidemill.services.triggerer.tasks.host import TaskHost
from tidemill.services.triggerer.tasks.left_processes import end_left_processes
from tidemill.services.triggerer.tasks.output import route_output
from tidemill.services.triggerer.tasks.stuck_watch import end_stuck
from tidemill.store.calls.service_calls import BeginSession, TrialKind
from tidemill.store.calls.trigger_calls import ClaimedTrigger
from tidemill.store.wire.remote import RemoteStore

log = structlog.get_logger("tidemill.services.triggerer.tasks.process")

#: How long after a signal the parent's stop request may arrive.
_WORD_SECONDS = 1.0
#: How long triggers may take to clean up once the parent has exited and nothing can be stored.
_ORPHAN_SECONDS = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run triggers until a signal arrives or the parent exits; return the exit code."""
    parser = argparse.ArgumentParser(prog="tidemill.services.triggerer.tasks.process", description=__doc__)
    parser.add_argument("address", help="the Unix socket of the process that serves the store")
    parser.add_argument("--config", help="the configuration file")
    parser.add_argument("--folder", default=".", help="the folder of DAGs, whose modules may define triggers")
    parser.add_argument("--session", type=int, help="run only the triggers that are reserved for this session")
    parser.add_argument("--seconds", type=float, default=0.0, help="with --session: how long to run")
    parser.add_argument("--trial", type=int, default=0, help="with --session: its kind of trial")
    parser.add_argument("--capacity", type=int, help="how many triggers run at once")
    parser.add_argument("--queues", help="the queues whose triggers it runs, separated by commas")
    parser.add_argument("--parent", type=int, help="the session of the process that started this one")
    given = parser.parse_args(arguments)
    signals = Signals(is_child=True)
    signals.listen()
    # Ctrl-C reaches all processes of a terminal; the parent decides when this one stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    runner = asyncio.Runner(loop_factory=TriggerLoop)
    code = ExitCode.OK
    try:
        settings = load_settings(given.config)
        name = find_worker_name(settings)
        # Pass the real stream: `sys.stderr` is about to send the triggers' output to the logs of their tasks.
        secrets = KnownSecrets()
        configure(settings.logging, stream=sys.stderr, relayed=True, secrets=secrets, worker_id=name)
        with route_output():
            trial = None if given.session is None else (given.session, given.seconds)
            loop = cast(TriggerLoop, runner.get_loop())
            capacity = given.capacity or settings.triggerer.capacity
            queues = tuple(given.queues.split(",")) if given.queues else tuple(settings.triggerer.queues)
            about = replace(
                describe_session("triggerer", name, given.parent),
                capacity=capacity,
                queues=queues,
                trial=TrialKind(given.trial),
            )
            loop.run_to_end(_run(settings, given.address, about, Path(given.folder), signals, secrets, trial))
    except TidemillError as error:
        code = find_exit_code(error)
        print(error, file=sys.stderr)
    finally:
        timer = end_anyway(code)
        runner.close()
        timer.cancel()
    return code


async def _run(
    settings: Settings,
    address: str,
    about: BeginSession,
    folder: Path,
    signals: Signals,
    secrets: KnownSecrets,
    trial: tuple[int, float] | None,
) -> None:
    signals.attach()
    loop = asyncio.get_running_loop()
    told = threading.Event()

    def end_with_parent() -> None:
        told.set()
        loop.call_soon_threadsafe(signals.stop.set)

    # Without a parent no stop can be confirmed, so every signal counts.
    if not watch_parent(end_with_parent, _ORPHAN_SECONDS, told.set):
        told.set()
    store = RemoteStore(Path(address))
    try:
        log_bytes = settings.logs.max_bytes_per_try
        limit_seconds = settings.triggerer.block_limit_seconds

        def end(session: int, claim: ClaimedTrigger | None, stack: str) -> None:
            end_stuck(Path(address), session, claim, stack, limit_seconds)

        grace_seconds, code = settings.worker.term_grace_seconds, FolderCode(folder)
        host = TaskHost(
            store,
            settings.triggerer,
            about,
            code,
            log_bytes,
            secrets,
            on_stuck=end,
            grace_seconds=grace_seconds,
            is_told=lambda: _wait_told(told),
            lease=ServiceLease(settings.services.lease_seconds),
        )
        with end_left_processes():
            await (host.run(signals.stop) if trial is None else host.try_out(*trial, signals.stop))
    finally:
        await store.close()
    log.info("the triggerer has ended")


async def _wait_told(told: threading.Event) -> bool:
    """Return whether the parent has requested the stop; its request may arrive after its signal."""
    until = time.monotonic() + _WORD_SECONDS
    while not told.is_set() and time.monotonic() < until:  # noqa: ASYNC110 - a thread sets it
        await asyncio.sleep(0.02)
    return told.is_set()


if __name__ == "__main__":
    sys.exit(main())
