"""The process of a trigger host: it opens the store, runs the list or waits for it, and handles signals.

The first SIGTERM or SIGINT stops gracefully, the second at once; SIGHUP reloads the list. If the new list has an error,
the old one keeps running.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.wording import format_count
from tidemill.runtime.identity import find_worker_name
from tidemill.runtime.process.exitcode import ExitCode, find_exit_code
from tidemill.runtime.process.identity_lock import IdentityLock
from tidemill.runtime.process.service_signals import Signals
from tidemill.services.lost_store import check_files, recover_store, watch_files
from tidemill.services.triggerer.hosting.leaving import end_anyway
from tidemill.services.triggerer.hosting.stream_keys import describe_key
from tidemill.services.triggerer.hosting.trigger_loop import TriggerLoop
from tidemill.services.triggerer.lists.checking import add_import_folders, read_checked
from tidemill.services.triggerer.lists.control import control_server
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.replica import Replica
from tidemill.services.triggerer.lists.reporting.monitoring import HostMonitor
from tidemill.services.triggerer.lists.reporting.recording import record_host
from tidemill.services.triggerer.lists.reporting.web_ui import serve_host_web
from tidemill.services.triggerer.lists.sessions import Ownership, SessionPace
from tidemill.store.database import Database
from tidemill.store.engines.opening import choose_store_url, has_one_writer, open_store
from tidemill.store.engines.recovery import StoreLostError
from tidemill.store.records import TriggerSpec
from tidemill.store.retention import Retention
from tidemill.triggers.shared_stream import StreamReport

log = structlog.get_logger(__name__)


class HostRunsError(ConfigError):
    """Another host runs this list of triggers, and the store supports only one process."""


def run_host(settings: Settings, specs: Path, pace: SessionPace | None = None) -> ExitCode:
    """Run the triggers of a list until a signal arrives or no trigger is left to run.

    Args:
        settings: Uses the sections `store`, `triggerer` and `logging`.
        specs: The YAML file of the list.
        pace: How fast the death of another host is noticed; None: within 35 seconds.

    Raises:
        ConfigError: The list or the settings are wrong, or another process runs the list.
        RemoteError: The store cannot be reached at startup.
    """
    signals = Signals()
    signals.listen()
    add_import_folders(specs)
    found = read_checked(specs)  # before anything is started
    runner = asyncio.Runner(loop_factory=TriggerLoop)
    code = ExitCode.INTERNAL
    try:
        code = cast(TriggerLoop, runner.get_loop()).run_to_end(_run(settings, specs, found, signals, pace))
    except BaseException as error:
        code = find_exit_code(error)
        raise
    finally:
        signals.close()
        timer = end_anyway(code)
        runner.close()
        timer.cancel()
    return code


def _find_url(settings: Settings, specs: Path) -> str:
    return choose_store_url(settings.store.url, specs.resolve().parent)


def list_name(settings: Settings, specs: Path) -> str:
    """Return the configured name of a list, or the path of its file."""
    # A path may contain bytes that are not UTF-8; escape them.
    return settings.triggerer.list_name or os.fsencode(specs.resolve()).decode("utf-8", "backslashreplace")


async def _run(
    settings: Settings, specs: Path, found: list[TriggerSpec], signals: Signals, pace: SessionPace | None
) -> ExitCode:
    url, name = _find_url(settings, specs), list_name(settings, specs)
    exclusive = has_one_writer(url)
    lock = IdentityLock("triggers", str(specs.resolve()) if exclusive else name)  # noqa: ASYNC240 - hardly any I/O
    try:
        if not lock.acquire() and exclusive:
            raise HostRunsError(
                f"process {lock.holder} on this machine already runs {specs}; stop that process, or make it reload the "
                f"list: kill -HUP {lock.holder}"
            )
        worker = find_worker_name(settings)
        monitor = HostMonitor(settings.metrics, worker, name, settings.debug.db_dir if settings.debug.enabled else "")
        with contextlib.ExitStack() as stack:
            monitor.recorder = stack.enter_context(record_host(settings, worker, name, monitor.book))
            stack.enter_context(monitor.serve())
            web = stack.enter_context(serve_host_web(settings, monitor))
            database = await _open_store(url, signals)
            if database is None:
                return ExitCode.OK
            try:
                ownership = Ownership(database, name, name=worker, lock=lock, pace=pace)
                replica = monitor.replica = Replica(
                    ownership,
                    lambda: ListHost(database, settings.triggerer, ownership, book=monitor.book),
                    lambda: read_checked(specs),
                    Retention(database, settings.store).run,
                )
                log.info("the trigger host is starting", triggers=len(found), store=database.label, list=name)
                report = partial(_report, replica, monitor, web.address if web is not None else None)
                unconfirmed = await _take_part(replica, report, specs, found, signals, database)
                await check_files(database)
            except StoreLostError as loss:
                await recover_store(database, loss, "tidemill triggers run")
            finally:
                await database.close()
    finally:
        lock.release()
    if unconfirmed:
        raise RemoteError(
            f"{format_count(unconfirmed, 'event')} may not be stored, because the store {database.label} does not "
            "work; acknowledged streams redeliver them; repair the store, and run the list again"
        )
    log.info("the trigger host has ended")
    return ExitCode.OK


async def _open_store(url: str, signals: Signals) -> Database | None:
    """Open the store; return None if a signal stopped the host first."""
    signals.attach()
    opening = asyncio.ensure_future(open_store(url))
    stopping = asyncio.ensure_future(signals.stop.wait())
    try:
        await asyncio.wait({opening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            await asyncio.wait({opening})
        return None if opening.cancelled() else opening.result()
    finally:
        stopping.cancel()


async def _take_part(
    replica: Replica,
    report: Callable[[], dict[str, Any]],
    specs: Path,
    found: list[TriggerSpec],
    signals: Signals,
    database: Database,
) -> int:
    """Run the list, or wait for it, until a signal or until no trigger is left; return the number of unstored events.

    Raises:
        StoreLostError: The file of the store was removed or moved away.
    """
    control = control_server(specs, report)
    await control.start()
    running = asyncio.ensure_future(replica.run(found))
    stopping, watching = asyncio.ensure_future(signals.stop.wait()), asyncio.ensure_future(watch_files(database))
    signals.on_hangup(replica.read_again)
    try:
        await asyncio.wait({running, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
        for each in (running, watching):
            if each.done():
                each.result()
    finally:
        stopping.cancel()
        running.cancel()
        watching.cancel()
        await asyncio.wait({running, watching})
        unconfirmed = await replica.stop()
        await control.close()
    return unconfirmed


def _describe_lane(lane: object) -> str:
    if isinstance(lane, tuple):
        return "/".join(str(part) for part in lane)
    return "" if lane is None else str(lane)


def _report(replica: Replica, monitor: HostMonitor, web: str | None) -> dict[str, Any]:
    host = replica.host
    report = {"pid": os.getpid(), **replica.report(), "running": 0, "store": None, "streams": []}
    report |= {"metrics": monitor.address, "web": web}
    if host is not None:
        now = host.now()
        streams = [_describe_stream(stream, now) for stream in host.report()]
        report |= {"running": host.running, "store": host.events.standing.value, "streams": streams}
    return report


def _describe_stream(report: StreamReport, now: float) -> dict[str, Any]:
    return {
        "key": describe_key(report.key),
        "subscribers": [str(name) for name in report.subscribers],
        "failed": {str(name): now - at for name, at in report.failed.items()},
        "outstanding": report.outstanding,
        "full_seconds": None if report.full_since is None else now - report.full_since,
        "lanes": [
            {
                "lane": _describe_lane(lane.lane),
                "outstanding": lane.outstanding,
                "head": lane.head,
                "age_seconds": now - lane.since,
                "holders": [str(name) for name in lane.holders],
            }
            for lane in report.lanes
        ],
    }
