"""The process of a trigger host: opens the store, runs the list, and obeys signals.

SIGTERM and SIGINT stop in good order, a second one at once; SIGHUP reads the list again. A list that is wrong changes
nothing: the old one goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.runtime.exitcode import ExitCode, exit_code_of
from tidemill.store.opening import open_store, store_url
from tidemill.store.records import TriggerSpec
from tidemill.triggers.control import ControlServer
from tidemill.triggers.host import TriggerHost
from tidemill.triggers.shared_stream import StreamReport
from tidemill.triggers.spec import read_specs

log = structlog.get_logger(__name__)

#: What triggers leave behind may take so long to end.
_END_SECONDS = 5.0


def run_host(settings: Settings, specs: Path) -> ExitCode:
    """Run the triggers of a list until a signal ends it, or none is left to run.

    Args:
        settings: `store`, `triggerer` and `logging` are read.
        specs: The YAML file.

    Raises:
        ConfigError: The list or the settings are wrong, or another process runs it.
        RemoteError: The store cannot be reached at the start.
    """
    for folder in (str(specs.resolve().parent), str(Path.cwd())):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    found = read_specs(specs)  # before anything is started
    url = store_url(settings.store.url, specs.resolve().parent)
    list_name = str(specs.resolve())
    runner = asyncio.Runner()
    code = ExitCode.INTERNAL
    try:
        code = runner.run(_run(settings, specs, found, url, list_name))
    except BaseException as error:
        code = exit_code_of(error)
        raise
    finally:
        timer = end_anyway(code)
        runner.close()
        timer.cancel()
    return code


def end_anyway(code: ExitCode) -> threading.Timer:
    """End the process in some seconds, unless the timer is cancelled.

    For when only tasks and threads of triggers are left, which may never end, and all that is to be kept is kept.
    """

    def end() -> None:
        with contextlib.suppress(OSError, ValueError):
            print("something of a trigger does not end; the process ends without it", file=sys.stderr, flush=True)
        os._exit(code)

    timer = threading.Timer(_END_SECONDS, end)
    timer.daemon = True
    timer.start()
    return timer


async def _run(settings: Settings, specs: Path, found: list[TriggerSpec], url: str, list_name: str) -> ExitCode:
    host: TriggerHost | None = None
    control = ControlServer(specs, lambda: _report(host))
    control.acquire()
    try:
        database = await open_store(url)
        try:
            host = TriggerHost(database, settings.triggerer, list_name)
            signals = _Signals(lambda: _reload(host, specs))
            signals.listen()
            log.info("the trigger host starts", triggers=len(found), store=database.label)
            try:
                await control.start()
                await _until_over(host, found, signals)
            finally:
                await signals.close()
                unconfirmed = await host.stop()
        finally:
            await database.close()
    finally:
        await control.close()
    if unconfirmed:
        raise RemoteError(
            f"{unconfirmed} events may not be stored, because the store {database.label} does not work; shared streams "
            "that acknowledge give them again; look after the store, and run the list again"
        )
    log.info("the trigger host has ended")
    return ExitCode.OK


async def _until_over(host: TriggerHost, found: list[TriggerSpec], signals: _Signals) -> None:
    """Run a list until a signal ends it, or no trigger is left, nor a list that is being read."""
    stopping = asyncio.ensure_future(signals.stop.wait())
    starting = asyncio.ensure_future(host.start(found))
    try:
        # A store that went away meanwhile is waited for, but not against the will of who wants to stop.
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return
        starting.result()
        while not stopping.done():
            idle = asyncio.ensure_future(host.wait_idle())
            await asyncio.wait({idle, stopping}, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            if stopping.done():
                return
            if not signals.reloads:
                log.info("no trigger is left to run; the host ends")
                return
            await asyncio.wait(signals.reloads)
    finally:
        stopping.cancel()
        starting.cancel()
        await asyncio.wait({starting})


async def _reload(host: TriggerHost | None, specs: Path) -> None:
    try:
        found = await asyncio.to_thread(read_specs, specs)
    except ConfigError as error:
        text = str(error)  # what is wrong is in the list: a traceback tells nothing more
        log.error("the list of triggers is wrong; the old one goes on", error=text)  # noqa: TRY400
        return
    if host is not None:
        changes = await host.reload(found)
        log.info(
            "the list of triggers was read again",
            started=changes.started,
            removed=changes.removed,
            replaced=changes.replaced,
        )


class _Signals:
    """What the process was told from outside."""

    def __init__(self, reload: Callable[[], Any]) -> None:
        self.stop = asyncio.Event()
        self._ending = self._closed = False
        self._loop = asyncio.get_running_loop()
        self.reloads: set[asyncio.Task[None]] = set()
        self._reload = reload
        self._last: asyncio.Task[None] | None = None

    def listen(self) -> None:
        # Not the loop's own handlers: a trigger that blocks the loop is when a second signal is needed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._end)
        self._loop.add_signal_handler(signal.SIGHUP, self._again)

    def _end(self, number: int, frame: object) -> None:
        if self._ending:
            os._exit(ExitCode.STOPPED)
        self._ending = True
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        log.info("stopping; a second signal stops at once")
        self.stop.set()

    async def close(self) -> None:
        """Read no list any more."""
        self._closed = True
        if self.reloads:
            for task in self.reloads:
                task.cancel()
            await asyncio.wait(self.reloads)

    def _again(self) -> None:
        before = self._last
        if self._closed:
            return

        async def one_after_another() -> None:
            if before is not None:
                await asyncio.wait([before])
            await self._reload()

        self._last = task = asyncio.get_running_loop().create_task(one_after_another(), name="reload")
        self.reloads.add(task)
        task.add_done_callback(self.reloads.discard)


def _name(lane: object) -> str:
    if isinstance(lane, tuple):
        return "/".join(str(part) for part in lane)
    return "" if lane is None else str(lane)


def _report(host: TriggerHost | None) -> dict[str, Any]:
    if host is None:
        return {"pid": os.getpid(), "streams": [], "running": 0}
    now = host.now()
    streams = [_stream(report, now) for report in host.report()]
    return {"pid": os.getpid(), "running": host.running, "store": host.events.standing.value, "streams": streams}


def _stream(report: StreamReport, now: float) -> dict[str, Any]:
    return {
        "key": repr(report.key),
        "subscribers": [str(name) for name in report.subscribers],
        "failed": {str(name): now - at for name, at in report.failed.items()},
        "outstanding": report.outstanding,
        "full_seconds": None if report.full_since is None else now - report.full_since,
        "lanes": [
            {
                "lane": _name(lane.lane),
                "outstanding": lane.outstanding,
                "head": lane.head,
                "age_seconds": now - lane.since,
                "holders": [str(name) for name in lane.holders],
            }
            for lane in report.lanes
        ],
    }
