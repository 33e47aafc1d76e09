"""Slots on real Spark with real worker processes; only what an engine does is faked."""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.spark.live.handlers import Quiet, Refusing, SecondWaits, SlowFirst
from tests.until import slack, wait_until

from tidemill.config.sections.executor_settings import ExecutorSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import UserActionError
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import RunFinished
from tidemill.core.supervision.slot_limits import SlotLimits
from tidemill.pipeline.handler.base import Handler
from tidemill.runtime.link.frames import LinkAddress
from tidemill.runtime.link.live_tasks import LiveState
from tidemill.runtime.process.table import is_running
from tidemill.spark.engine.process import EngineJob
from tidemill.spark.live.supervisor import Supervisor
from tidemill.spark.progress import EngineStatus
from tidemill.spark.session.packaging import pack_handler
from tidemill.spark.session.session import Spark

pytestmark = pytest.mark.spark


class Running:
    """Slots that run, and what came of them."""

    def __init__(self, spark: Spark, count: int, handler: Handler[Any, Any], factory: str, **limits: float):
        settings = Settings(executor=ExecutorSettings(drain_timeout_seconds=5.0))
        packed = pack_handler(handler)

        def make_job(slot: int, job_token: int, address: LinkAddress, packed: bytes = packed) -> EngineJob:
            return EngineJob(slot, job_token, "w", address, settings, packed, {}, f"fake_engine:{factory}")

        self.make_job = make_job
        #: How many times all engines were ready.
        self.ready = 0
        self.ends: queue.SimpleQueue[RunFinished] = queue.SimpleQueue()
        self.live = Supervisor(
            spark, "w", count, make_job, self.ends.put, SlotLimits(**limits), on_all_ready=self.note_ready
        )
        self.live.start()

    def note_ready(self) -> None:
        self.ready += 1

    def engine(self, slot: int) -> EngineStatus:
        return self.live.progress().engines[slot]

    def works(self, slot: int = 0) -> bool:
        progress = self.engine(slot).progress
        return progress is not None and progress.consumed > 0

    def finish(self, timeout: float = 60.0) -> RunFinished:
        return self.ends.get(timeout=timeout)


@pytest.fixture
def running(spark: Spark) -> Iterator[Callable[..., Running]]:
    made: list[Running] = []

    def start(
        count: int = 1, handler: Handler[Any, Any] | None = None, factory: str = "build", **limits: float
    ) -> Running:
        made.append(Running(spark, count, handler or Quiet(), factory, **limits))
        return made[-1]

    yield start
    for one in made:
        one.live.exit_now()
        one.live.close()
        spark.context.cancelAllJobs()


def test_engines_start_say_how_they_stand_and_drain_over_the_link(running: Callable[..., Running]) -> None:
    run = running(2)
    wait_until(lambda: run.works(0) and run.works(1))
    progress = run.live.progress()
    assert progress.partitions == ["topic/0", "topic/1"]
    found = run.live.find_message("topic", 1, 17)
    assert found is not None
    assert (found.engine, found.stage.pid) == (1, run.engine(1).pid)
    taken: queue.SimpleQueue[tuple[int, str, LiveState]] = queue.SimpleQueue()
    run.live.watch(lambda *given: taken.put(given), 60.0)
    assert {taken.get(timeout=100)[0] for _ in range(8)} == {0, 1}
    assert found.text == f"task task-17 has been running for 3 s (process {found.stage.pid})"
    assert progress.consumed == sum(e.progress.consumed for e in progress.engines if e.progress)
    pids = [engine.pid for engine in progress.engines]
    assert len(set(pids)) == 2
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)
    wait_until(lambda: all(not is_running(pid) for pid in pids if pid is not None))


def test_engines_are_replaced_by_ones_with_other_jobs_on_the_same_spark(running: Callable[..., Running]) -> None:
    run = running(2)
    wait_until(lambda: run.works(0) and run.works(1))
    old = {engine.pid for engine in run.live.progress().engines}
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)
    consumed = run.live.progress().consumed

    other = pack_handler(Quiet(drain_seconds=0.1))
    run.live.restart(lambda slot, token, address: run.make_job(slot, token, address, other), SlotLimits())

    wait_until(lambda: old.isdisjoint({engine.pid for engine in run.live.progress().engines}))
    wait_until(lambda: run.works(0) and run.works(1))
    assert run.live.progress().consumed > consumed, "what the engines before did still counts"
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)
    assert run.ready == 2


def test_engines_that_hung_and_were_killed_can_be_replaced(running: Callable[..., Running]) -> None:
    run = running(1, Quiet(drain_seconds=3600.0), drain_seconds=0.5)
    wait_until(run.works)
    run.live.drain()
    assert run.finish().ending is EngineEnding.OVERDUE

    hung = run.engine(0).pid
    wait_until(lambda: run.engine(0).silent_seconds is None, what="its link is closed")
    run.live.restart(
        lambda slot, token, address: run.make_job(slot, token, address, pack_handler(Quiet())), SlotLimits()
    )

    wait_until(lambda: run.engine(0).pid not in (None, hung) and run.works())
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)


def test_a_paused_pipeline_takes_nothing_until_it_is_resumed(running: Callable[..., Running]) -> None:
    run = running()
    wait_until(run.works)
    run.live.actions.pause(600.0, None, "ann")
    wait_until(lambda: run.live.progress().paused == ["topic/0"])
    before = run.live.progress().consumed
    assert run.live.actions.resume(None) == 1
    wait_until(lambda: run.live.progress().consumed > before)


def test_a_pause_ends_by_itself_and_survives_the_restart_of_an_engine(running: Callable[..., Running]) -> None:
    run = running(2)
    wait_until(lambda: run.works(0) and run.works(1))
    seen: list[tuple[int | None, bool]] = []
    run.live.actions.on_pause = lambda pause, begun: seen.append((pause.partition, begun))
    run.live.actions.pause(600.0, 1, "ann")
    wait_until(lambda: run.live.progress().paused == ["topic/1"])
    old = run.engine(1).pid
    run.live.actions.restart(1)
    with pytest.raises(UserActionError, match="engine 1 cannot be restarted now"):
        while True:
            run.live.actions.restart(1)
    wait_until(lambda: run.engine(1).pid not in (None, old) and run.engine(1).progress)
    wait_until(lambda: run.live.progress().paused == ["topic/1"])
    assert run.engine(1).starts == 2
    (pause,) = run.live.progress().pauses
    assert (pause.partition, pause.by) == (1, "ann")
    assert 0 < pause.left_seconds <= 600

    run.live.actions.pause(1.0, 1, "rob")
    wait_until(lambda: run.live.progress().paused == [] and run.live.progress().pauses == [])
    wait_until(lambda: run.works(1))
    assert seen == [(1, True), (1, True), (1, False)]
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)


def test_what_cannot_be_done_is_refused(running: Callable[..., Running]) -> None:
    run = running(1)
    actions = run.live.actions
    with pytest.raises(UserActionError, match="at most 7 days, not 691200 s; to stop for longer, drain"):
        actions.pause(8 * 86_400.0, None, "ann")
    for seconds in (0.0, -1.0, 1e-9, math.nan):
        with pytest.raises(UserActionError, match="at least 1 s, not "):
            actions.pause(seconds, None, "ann")
    with pytest.raises(UserActionError, match="no partition -1"):
        actions.pause(1.0, -1, "ann")
    with pytest.raises(UserActionError, match="there is no engine 1; use 0 to 0"):
        actions.restart(1)
    actions.pause(600.0, None, "ann")
    with pytest.raises(UserActionError, match="all partitions are paused"):
        actions.resume(0)
    assert actions.resume(None) == 1
    assert actions.resume(0) == 0


def test_slot_0_is_ready_before_the_others_begin(running: Callable[..., Running], tmp_path: Path) -> None:
    run = running(2, SlowFirst(journal=str(tmp_path / "journal")))
    wait_until(lambda: run.works(0) and run.works(1))
    lines = (tmp_path / "journal").read_text().splitlines()
    first = run.engine(0).pid
    second = run.engine(1).pid
    assert lines == [f"begin {first}", f"end {first}", f"begin {second}", f"end {second}"]


def test_a_driver_that_stood_still_takes_no_healthy_engine_for_dead(running: Callable[..., Running]) -> None:
    run = running(2, silent_seconds=1.5)
    wait_until(lambda: run.works(0) and run.works(1))
    pids = [run.engine(slot).pid for slot in (0, 1)]
    stood = threading.Event()

    def stand_still() -> None:
        time.sleep(3.0)
        stood.set()

    run.live._loop.call_soon_threadsafe(stand_still)
    assert stood.wait(60)
    seen = [progress.consumed for progress in (run.engine(slot).progress for slot in (0, 1)) if progress]
    wait_until(lambda: all(run.engine(slot).progress.consumed > seen[slot] for slot in (0, 1)))  # type: ignore[union-attr]
    assert [run.engine(slot).pid for slot in (0, 1)] == pids
    assert [run.engine(slot).starts for slot in (0, 1)] == [1, 1]
    assert [run.engine(slot).state for slot in (0, 1)] == ["running", "running"]


def test_no_engine_takes_messages_before_all_of_the_first_start_have_partitions(
    running: Callable[..., Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.core.supervision.slot_group.HOLD_SECONDS", 120.0)
    run = running(2, SecondWaits(folder=str(tmp_path)))
    wait_until(lambda: (tmp_path / "second").exists() or run.works(0))
    snapshot = run.engine(0).progress
    wait_until(lambda: run.engine(0).progress is not snapshot)
    assert not run.works(0)
    (tmp_path / "go").touch()
    wait_until(lambda: run.works(0) and run.works(1))


def test_a_pause_outlasts_the_first_start(running: Callable[..., Running]) -> None:
    run = running(2)
    run.live.actions.pause(600.0, None, "ann")
    wait_until(lambda: run.live.progress().partitions == ["topic/0", "topic/1"])
    wait_until(lambda: not run.live._group.holding)
    wait_until(lambda: run.live.progress().paused == ["topic/0", "topic/1"])
    assert run.live.progress().consumed == 0
    run.live.actions.resume(None)
    wait_until(lambda: run.works(0) and run.works(1))


def test_a_killed_engine_is_replaced_and_what_it_did_still_counts(running: Callable[..., Running]) -> None:
    run = running(2)
    wait_until(lambda: run.works(0) and run.works(1))
    victim, other, done = run.engine(0).pid, run.engine(1).pid, run.live.progress().consumed
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    wait_until(lambda: run.engine(0).pid not in (victim, None) and run.works(0))
    seconds = time.monotonic() - killed_at
    print(f"working again {seconds:.2f} s after SIGKILL")
    assert seconds < slack(5)
    assert run.engine(1).pid == other
    assert run.live.progress().consumed >= done
    run.live.drain()
    assert run.finish() == RunFinished(EngineEnding.DRAINED)


def test_an_engine_that_hangs_is_killed_and_replaced(running: Callable[..., Running]) -> None:
    run = running(silent_seconds=1.5)
    wait_until(run.works)
    victim = run.engine(0).pid
    os.kill(victim, signal.SIGSTOP)
    stopped_at = time.monotonic()
    wait_until(lambda: run.engine(0).pid not in (victim, None) and run.works(0))
    print(f"replaced {time.monotonic() - stopped_at:.2f} s after SIGSTOP, with a limit of 1.5 s")
    wait_until(lambda: not is_running(victim))


def test_an_engine_ignores_sigterm_and_sigint(running: Callable[..., Running]) -> None:
    run = running()
    wait_until(run.works)
    pid, done = run.engine(0).pid, run.live.progress().consumed
    os.kill(pid, signal.SIGTERM)
    os.kill(pid, signal.SIGINT)
    wait_until(lambda: run.live.progress().consumed > done + 20)
    assert run.engine(0).pid == pid


def test_sighup_drains_an_engine_that_nobody_else_would_end(running: Callable[..., Running]) -> None:
    run = running()
    wait_until(run.works)
    victim = run.engine(0).pid
    os.kill(victim, signal.SIGHUP)
    wait_until(lambda: not is_running(victim))
    wait_until(lambda: run.engine(0).pid not in (victim, None) and run.works(0))


def test_a_failure_at_the_first_start_ends_the_run(running: Callable[..., Running]) -> None:
    finished = running(2, Refusing()).finish()
    assert finished.ending is EngineEnding.FAILED
    assert finished.error == "HandlerError: the database is not migrated"


def test_a_handler_that_calls_sys_exit_is_a_failed_engine(running: Callable[..., Running]) -> None:
    finished = running(factory="build_exiting").finish()
    assert (finished.ending, finished.error) == (EngineEnding.FAILED, "SystemExit: 3")


def test_an_engine_that_dies_in_the_first_start_is_replaced(running: Callable[..., Running], tmp_path: Path) -> None:
    run = running(2, Quiet(folder=str(tmp_path / "died")), factory="build_dying_once")
    wait_until(lambda: run.works(0) and run.works(1))
    assert sorted(run.engine(slot).starts for slot in (0, 1)) == [1, 2]


def test_engines_that_die_again_and_again_in_the_first_start_end_the_run(running: Callable[..., Running]) -> None:
    finished = running(factory="build_dying").finish(60.0)
    assert finished.ending is EngineEnding.CRASHED
    assert finished.error is not None
    assert "Python process died" in finished.error


def test_a_fenced_engine_ends_the_run_and_the_others_drain(running: Callable[..., Running]) -> None:
    run = running(2, Quiet(ends={1: "fenced"}))
    finished = run.finish()
    assert (finished.ending, finished.slot) == (EngineEnding.FENCED, 1)
    # The place of slot 1 in the group is somebody else's by now.
    assert run.live.find_left_behind() == [0]


def test_a_slot_that_died_last_is_named_as_not_having_left_its_group(running: Callable[..., Running]) -> None:
    run = running(handler=Quiet(drain_seconds=30.0))
    wait_until(run.works)
    run.live.drain()
    os.kill(run.engine(0).pid, signal.SIGKILL)
    assert run.finish().ending is EngineEnding.CRASHED
    assert run.live.find_left_behind() == [0]


def test_exit_now_ends_the_processes_at_once(running: Callable[..., Running]) -> None:
    run = running(handler=Quiet(drain_seconds=30.0))
    wait_until(run.works)
    pid = run.engine(0).pid
    run.live.drain()
    run.live.exit_now()
    wait_until(lambda: not is_running(pid), slack(3))
