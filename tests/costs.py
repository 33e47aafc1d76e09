"""Which files of tests cost most processor time: `pytest --durations=10` shows the first ten of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import pytest
from tests.prepared import Forked


class Cost(NamedTuple):
    """What the tests of a file took, with the processes whose end they saw."""

    file: str
    cpu_seconds: float
    seconds: float


class Moment(NamedTuple):
    """What this process and those whose end it saw took so far, and the time."""

    cpu_seconds: float
    at: float

    @classmethod
    def now(cls) -> Moment:
        times = os.times()
        return cls(sum(times[:4]) + Forked.cpu_seconds, times[4])


def find_file(item: pytest.Item) -> str:
    """Return the file of a test, below the folder of all tests."""
    return item.nodeid.partition("::")[0].removeprefix("tests/")


class Costs:
    """The plugin of a process that runs all tests itself: sums up what those of each file take."""

    def __init__(self) -> None:
        self._costs: dict[str, Cost] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Add what a test takes."""
        before, file = Moment.now(), find_file(item)
        try:
            return (yield)
        finally:
            after, so_far = Moment.now(), self._costs.get(file, Cost(file, 0.0, 0.0))
            cpu_seconds = so_far.cpu_seconds + after.cpu_seconds - before.cpu_seconds
            self._costs[file] = Cost(file, cpu_seconds, so_far.seconds + after.at - before.at)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what costs most."""
        show(terminalreporter, self._costs.values())


def show(terminalreporter: pytest.TerminalReporter, costs: Iterable[Cost]) -> None:
    """Show what costs most; `--durations` says how many files."""
    costs, count = list(costs), terminalreporter.config.option.durations
    if count is None or not costs:
        return
    total = sum(cost.cpu_seconds for cost in costs)
    terminalreporter.section(f"CPU seconds of files, {total:,.0f} in all, shared servers not counted")
    for cost in sorted(costs, key=lambda cost: -cost.cpu_seconds)[:count]:
        terminalreporter.write_line(f"{cost.cpu_seconds:7.1f} s of CPU in {cost.seconds:6.1f} s  {cost.file}")
