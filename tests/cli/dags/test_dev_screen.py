from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

from tidemill.cli.dags.dev_screen import DevScreen, format_runs, list_parts
from tidemill.cli.terminal.status_text import count_cells
from tidemill.core.errors import RemoteError
from tidemill.store.calls.count_calls import CountStore, StoreCounts
from tidemill.store.calls.run_calls import RunProgress, RunRecord

NOW = 1_000_000.0


def run(dag: str, name: str, state: str, done: int, running: int, waiting: int, age: float) -> RunProgress:
    at = round((NOW - age) * 1e6)
    ended = at if state in ("success", "failed") else None
    record = RunRecord(1, dag, name, "manual", state, None, 1, None, None, None, "{}", "me", at - 5, at, ended)
    return RunProgress(record, done + running + waiting, done, running, waiting)


RUNS = (
    run("daily_report", "manual__2026-11-23T08:14:36.017114+00:00", "running", 3, 2, 7, 12),
    run("täglich", "漢字", "queued", 0, 0, 4, 3),
    run("ended\x1b[31m", "r", "failed", 9, 0, 0, 7_300),
)


class Store:
    def __init__(self, *counts: StoreCounts | RemoteError) -> None:
        self.counts = list(counts)

    async def call(self, request):
        if not isinstance(request, CountStore):
            return RUNS
        found = self.counts.pop(0)
        if isinstance(found, RemoteError):
            raise found
        return found


async def follow(screen: DevScreen, store: Store) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.2):
            await screen.follow(SimpleNamespace(database=store))  # type: ignore[arg-type]


async def test_the_line_says_what_runs_and_that_the_store_is_away():
    screen = DevScreen()
    assert screen.format(80) == "starting"
    await follow(screen, Store(StoreCounts({"running": 3}, {"running": 1, "queued": 1}, 0)))
    assert screen.format(80).splitlines()[0] == "2 runs, tasks: 3 running"
    await follow(screen, Store(RemoteError("away")))
    assert screen.format(80).splitlines()[0] == "the store cannot be reached"


async def test_what_does_not_fit_is_left_out_from_the_end():
    screen = DevScreen()
    await follow(screen, Store(StoreCounts({"running": 3, "deferred": 12}, {"running": 1}, 0)))
    assert screen.format(80).splitlines()[0] == "1 run, tasks: 3 running, 12 deferred"
    assert screen.format(30) == "1 run, tasks: 3 running"
    assert screen.format(3) == "1 r"


def test_files_that_cannot_be_parsed_come_first():
    assert list_parts(StoreCounts({"queued": 1}, {"running": 1}, 1))[0] == "1 file with errors: tidemill dags errors"


def test_the_table_says_how_far_each_run_is_and_since_when():
    assert format_runs(RUNS, NOW, 100) == [
        "DAG           RUN                                       STATE    DONE  RUNNING  WAITING  SINCE",
        "daily_report  manual__2026-11-23T08:14:36.017114+00:00  running  3/12        2        7    12s",
        "täglich       漢字                                      queued    0/4        0        4     3s",
        "ended [31m    r                                         failed    9/9                       2h",
    ]


@pytest.mark.parametrize("width", [40, 60, 77, 100, 300])
def test_no_line_is_wider_than_the_terminal_or_has_control_characters(width: int):
    lines = format_runs(RUNS, NOW, width)

    assert len(lines) == 4
    assert all(count_cells(line) <= width and line.isprintable() for line in lines)
    assert format_runs((), NOW, width) == []
