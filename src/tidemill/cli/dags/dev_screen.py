"""The status display of `tidemill dev` at the bottom of a terminal: a summary line and a table of the latest runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tidemill.cli.terminal.status_text import count_cells
from tidemill.cli.terminal.tables import Column, format_age, format_table
from tidemill.core.errors import RemoteError
from tidemill.core.wording import format_count
from tidemill.store.calls.count_calls import CountStore, StoreCounts
from tidemill.store.calls.run_calls import RunProgress, WatchRuns

if TYPE_CHECKING:
    from tidemill.services.dev.process import Dev

_LOOK_SECONDS = 0.5
#: Reading the store takes at most 1/20 of the time, however large the runs are.
_SHARE = 20
#: The maximum number of runs.
_RUNS = 8
#: The table needs at least this many columns.
_MIN_WIDTH = 40
#: The names of task states, in the order of the summary line.
_STATES = {
    "running": "running",
    "deferred": "deferred",
    "queued": "queued",
    "scheduled": "waiting for a slot",
    "up_for_retry": "waiting for a retry",
    "ending": "ending",
}
_COLUMNS = (
    Column("DAG", cut=True),
    Column("RUN", cut=True, optional=True),
    Column("STATE"),
    Column("DONE", right=True),
    Column("RUNNING", right=True, optional=True),
    Column("WAITING", right=True, optional=True),
    Column("SINCE", right=True),
)


class DevScreen:
    """The status display.

    Args:
        now: Returns the time, in seconds since the epoch.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._parts = ["starting"]
        self._runs: tuple[RunProgress, ...] = ()

    async def follow(self, dev: Dev) -> None:
        """Read the store periodically, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                counts = await dev.database.call(CountStore())
                self._runs = await dev.database.call(WatchRuns(_RUNS))
                self._parts = list_parts(counts)
            except RemoteError:
                self._parts = ["the store cannot be reached"]
            await asyncio.sleep(max(_LOOK_SECONDS, _SHARE * (loop.time() - began)))

    def format(self, width: int) -> str:
        """Return the summary line, and the lines of the table below it; parts that do not fit are left out."""
        runs = self._runs if width >= _MIN_WIDTH else ()
        return "\n".join([fit_parts(self._parts, width), *format_runs(runs, self._now(), width)])


def fit_parts(parts: Sequence[str], width: int) -> str:
    """Return a line of as many leading parts as fit."""
    text = ""
    for part in parts:
        longer = f"{text}, {part}" if text else part
        if count_cells(longer) > width:
            break
        text = longer
    return text or parts[0][:width]


def format_runs(runs: Sequence[RunProgress], now: float, width: int) -> list[str]:
    """Return the lines of the table of runs; none without runs."""
    if not runs:
        return []
    return list(format_table(_COLUMNS, [_build_row(one, now) for one in runs], width))


def _build_row(one: RunProgress, now: float) -> tuple[str, ...]:
    run = one.run
    ended = run.ended_us is not None
    since_us = next(time_us for time_us in (run.ended_us, run.started_us, run.created_us) if time_us is not None)
    running, waiting = ("", "") if ended else (str(one.running), str(one.waiting))
    age = format_age(now - since_us / 1_000_000)
    return run.dag_id, run.run_id, run.state, f"{one.done}/{one.total}", running, waiting, age


def list_parts(counts: StoreCounts) -> list[str]:
    """Return the parts of the summary line, the most important first.

    Example:
        >>> list_parts(StoreCounts({"running": 2, "deferred": 1}, {"running": 1}, 0))
        ['1 run', 'tasks: 2 running', '1 deferred']
        >>> list_parts(StoreCounts({}, {}, 2))
        ['2 files with errors: tidemill dags errors', 'no runs']
    """
    parts = []
    if counts.broken_files:
        parts.append(f"{format_count(counts.broken_files, 'file')} with errors: tidemill dags errors")
    active = sum(counts.runs.get(state, 0) for state in ("running", "queued"))
    if not active:
        return [*parts, "no runs"]
    parts.append(format_count(active, "run"))
    tasks = [f"{counts.tasks[state]} {text}" for state, text in _STATES.items() if counts.tasks.get(state)]
    if tasks:
        tasks[0] = f"tasks: {tasks[0]}"
    return [*parts, *tasks]
