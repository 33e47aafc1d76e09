"""The status line of `tidemill dev`: what runs, what waits, and what people should look at."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from tidemill.cli.status_text import count_cells
from tidemill.core.errors import RemoteError
from tidemill.core.wording import format_count
from tidemill.store.people_calls import CountStore, ListRuns, StoreCounts

if TYPE_CHECKING:
    from tidemill.services.dev.process import Dev

_LOOK_SECONDS = 0.5
#: How tasks are called in the line, in its order.
_STATES = {
    "running": "running",
    "deferred": "deferred",
    "queued": "queued",
    "scheduled": "waiting for a slot",
    "up_for_retry": "waiting to be retried",
}


class DevLine:
    """What the line says."""

    def __init__(self) -> None:
        """Say that everything begins."""
        self._parts = ["starting"]

    async def follow(self, dev: Dev) -> None:
        """Look at the store again and again, until cancelled."""
        while True:
            try:
                counts = await dev.database.call(CountStore())
                page = await dev.database.call(ListRuns(states=("running",), limit=3))
                names = [f"{run.dag_id} {run.run_id}" for run in page.rows]
                self._parts = list_parts(counts, names)
            except RemoteError:
                self._parts = ["the store cannot be reached"]
            await asyncio.sleep(_LOOK_SECONDS)

    def format(self, width: int) -> str:
        """Return the line; what does not fit is left out from its end."""
        text = ""
        for part in self._parts:
            longer = f"{text}, {part}" if text else part
            if count_cells(longer) > width:
                break
            text = longer
        return text or self._parts[0][:width]


def list_parts(counts: StoreCounts, runs: list[str]) -> list[str]:
    """Return what the line says, the most important first.

    Example:
        >>> list_parts(StoreCounts({"running": 2, "deferred": 1}, {"running": 1}, 0), ["report r1"])
        ['1 run', 'tasks: 2 running', '1 deferred', 'report r1']
        >>> list_parts(StoreCounts({}, {}, 2), [])
        ['2 files with errors: tidemill dags errors', 'nothing runs']
    """
    parts = []
    if counts.broken_files:
        parts.append(f"{format_count(counts.broken_files, 'file')} with errors: tidemill dags errors")
    active = sum(counts.runs.get(state, 0) for state in ("running", "queued"))
    if not active:
        return [*parts, "nothing runs"]
    parts.append(format_count(active, "run"))
    tasks = [f"{counts.tasks[state]} {text}" for state, text in _STATES.items() if counts.tasks.get(state)]
    if tasks:
        tasks[0] = f"tasks: {tasks[0]}"
    return [*parts, *tasks, *runs]
