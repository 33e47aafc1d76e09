"""Processes that stand still for longer than an engine may be silent, and go on: what the driver holds against whom.

The standstills are what is tested and what costs time, so all pipelines of this module stand still side by side.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.conftest import PipelineProcess, ShellPipeline, Site
from tests.until import wait_until

from tidemill.runtime.process.table import read_state

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]

STANDSTILL_SECONDS = 20.0
#: Runs when the standstill begins and when it ends.
LONG_TASK_SECONDS = 25.0


def send(number: signal.Signals, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


class Case:
    """One pipeline with tasks that run, that is stopped and goes on."""

    def __init__(self, site: Site, *, in_shell: bool = False) -> None:
        self.site = site
        self.pipeline: PipelineProcess = site.start(in_shell=in_shell)
        self.engines: list[int] = []
        self.stopped: list[int] = []
        self.stopped_at = 0.0
        #: How many results there were when it was stopped, and when it went on.
        self.rows = (0, 0)

    def work(self) -> None:
        """Wait until both engines work, and what they had is committed."""
        self.site.feed(40)
        self.pipeline.wait_working(150)
        wait_until(lambda: self.site.shares() == [2, 2], 60, what="two engines that share the partitions")
        self.site.wait_all_committed(60)
        self.engines = wait_until(self._two_engines, 60, what="two engines")

    def run_long_tasks(self) -> None:
        """Have tasks that run when it is stopped."""
        self.site.feed(4, sleep=LONG_TASK_SECONDS)
        wait_until(lambda: self._long_tasks() == 4, 60, what="four long tasks run")

    def _two_engines(self) -> list[int] | None:
        # A process that is being started looks like its parent for a moment.
        found = self.pipeline.engines()
        return found if len(found) == 2 else None

    def _long_tasks(self) -> int:
        return sum(command.startswith("sleep ") for command in self.pipeline.marked().values())

    def stop(self, pids: list[int]) -> None:
        self.stopped = pids
        send(signal.SIGSTOP, pids)

    def go_on(self) -> None:
        send(signal.SIGCONT, self.stopped)

    def finish(self) -> None:
        """See that it works on: what came meanwhile and what comes now is handled, and no work is left."""
        self.site.feed(40)
        self.site.wait_all_committed(90)

    def undisturbed(self) -> None:
        """See that no engine was replaced, reported or refused, and that nothing was handled twice."""
        assert self.pipeline.engines() == self.engines, self.pipeline.log
        assert self.pipeline.log.count('"engine connected"') == 2, self.pipeline.log
        assert '"level": "warning"' not in self.pipeline.log, self.pipeline.log
        assert not self.site.assert_nothing_lost(), "work was repeated"

    def drains(self) -> None:
        """Press Ctrl-C, and see that it ends well with all committed and nothing left behind."""
        self.pipeline.ctrl_c()
        assert self.pipeline.wait(60) == 0, self.pipeline.log
        wait_until(lambda: not self.pipeline.marked(), 60, what="nothing is left behind")
        assert sum(self.site.committed().values()) == self.site.fed


class Cases:
    """The pipelines of this module, after their standstill."""

    def __init__(self, folder: Path, bootstrap: str, create_topic: Callable[..., object]) -> None:
        def site(name: str) -> Site:
            (folder / name).mkdir()
            return Site(folder / name, bootstrap, create_topic)

        self.terminal = Case(site("terminal"), in_shell=True)
        self.driver = Case(site("driver"))
        self.engine = Case(site("engine"))
        self.host = Case(site("host"))
        self.all = [self.terminal, self.driver, self.engine, self.host]

    def stand_still(self) -> None:
        for case in self.all:
            case.work()
        for case in self.all:
            case.run_long_tasks()
        shell = self.terminal.pipeline
        assert isinstance(shell, ShellPipeline)
        shell.ctrl_z()
        wait_until(lambda: read_state(shell.driver) == "T", 60, what="the driver is stopped")
        self.driver.stop([self.driver.pipeline.driver])
        self.engine.stop(self.engine.engines[:1])
        self.host.stop(list(self.host.pipeline.marked()))
        before = [len(case.site.rows()) for case in self.all]
        for case in self.all:
            case.stopped_at = time.time()
            case.site.feed(40)
        time.sleep(STANDSTILL_SECONDS)
        for case, rows in zip(self.all, before, strict=True):
            case.rows = (rows, len(case.site.rows()))
        shell.fg()
        for case in self.all:
            case.go_on()
        for case in self.all:
            case.finish()

    def end(self) -> None:
        for case in self.all:
            case.pipeline.end()


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory, embedded_kafka: Any) -> Iterator[Cases]:
    cases = Cases(tmp_path_factory.mktemp("cases"), embedded_kafka.bootstrap, embedded_kafka.create_topic)
    try:
        cases.stand_still()
        yield cases
    finally:
        cases.end()


def test_ctrl_z_and_fg_on_a_terminal_disturb_no_engine_and_ctrl_c_drains_after_that(cases: Cases) -> None:
    case = cases.terminal
    case.undisturbed()
    assert case.rows == (40, 80), "the engines go on without their driver"
    done = f"{case.site.fed:,} messages done"
    wait_until(lambda: done in case.pipeline.log, 60, what="a status line that goes on")
    case.drains()


def test_a_driver_that_was_stopped_alone_replaces_no_engine(cases: Cases) -> None:
    case = cases.driver
    case.undisturbed()
    assert case.rows == (40, 80), "the engines go on without their driver"
    case.drains()


def test_a_host_that_stood_still_replaces_no_engine(cases: Cases) -> None:
    case = cases.host
    case.undisturbed()
    assert case.rows == (40, 40), "it did not stand still"
    case.drains()


def test_an_engine_that_was_stopped_alone_is_replaced_and_what_it_had_is_done_by_the_next(cases: Cases) -> None:
    case = cases.engine
    log = case.pipeline.log
    assert log.count('"about": "silent"') == 1, log
    assert log.count('"engine connected"') == 3, log
    new = case.pipeline.engines()
    assert case.engines[0] not in new
    assert case.engines[1] in new
    assert len(new) == 2
    assert case.rows[1] >= 40 + 20, "the other engine was disturbed"
    again = case.site.assert_nothing_lost()
    assert set(again) <= set(range(40, 84)), "what was committed was repeated"
    case.drains()
    first: dict[int, float] = {}
    for row in case.site.rows():
        if row["n"] >= 44:  # what came while it was stopped
            first[row["partition"]] = min(first.get(row["partition"], row["at"]), row["at"])
    idle = sorted(at - case.stopped_at for at in first.values())
    print("idle for", [round(seconds, 1) for seconds in idle], "s; repeated:", sum(again.values()))
    assert idle[1] < 15 < idle[2]
    assert idle[3] < 45, "only the group's session timeout gave them away"
