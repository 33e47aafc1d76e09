"""What `tidemill backfill` shows while it runs and at its end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tidemill.cli.pipelines.backfill import list_fields
from tidemill.runtime.link.frames import HelloFrame
from tidemill.runtime.link.progress import EngineProgress, EngineSummary, StopReason
from tidemill.spark.bounded.run import BoundedProgress, BoundedRun
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunPhase, RunState


class Server:
    """Takes the place of the link's server: keeps what was sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, str]] = []

    def send(self, link: int, frame: Any) -> None:
        self.sent.append((link, type(frame).__name__))

    def close_link(self, link: int) -> None:
        self.sent.append((link, "closed"))


def hello(part: int, run_token: int = 0) -> HelloFrame:
    return HelloFrame(part, 0, run_token, "e", 1, "h")


@pytest.fixture
def run() -> BoundedRun:
    run = BoundedRun(SimpleNamespace(master="local[2]"), sizes=[100, 50], before=10)  # type: ignore[arg-type]
    run._server = Server()  # type: ignore[assignment]
    return run


def test_progress_counts_what_was_done_before_what_runs_and_what_is_done(run: BoundedRun) -> None:
    assert (run.progress().passed, run.progress().total) == (10, 160)
    run.on_hello(1, hello(0))
    run.on_beat(1, EngineProgress(messages_done=30, dead_lettered=1))
    assert (run.progress().passed, run.progress().dead_lettered) == (40, 1)
    # Half of the offsets had no message: the part is done all the same.
    run.on_ended(1, EngineSummary(0, StopReason.DRAINED, None, EngineProgress(messages_done=50, dead_lettered=2)))
    run.on_closed(1)
    now = run.progress()
    assert (now.passed, now.messages_done, now.dead_lettered, now.parts_done, now.parts) == (110, 50, 2, 1, 2)


def test_an_engine_that_dies_is_not_done_and_its_part_is_counted_again(run: BoundedRun) -> None:
    run.on_hello(1, hello(1))
    run.on_beat(1, EngineProgress(messages_done=30))
    run.on_closed(1)
    assert (run.progress().passed, run.progress().parts_done) == (10, 0)
    run.on_hello(2, hello(1))
    run.on_beat(2, EngineProgress(messages_done=5))
    assert run.progress().passed == 15


def test_an_engine_begins_at_once_and_is_refused_when_the_run_is_being_stopped(run: BoundedRun) -> None:
    server: Any = run._server
    run.on_hello(1, hello(0))
    assert server.sent == [(1, "WelcomeFrame"), (1, "BeginFrame"), (1, "GoFrame")]
    run._stopping = True
    server.sent.clear()
    run.on_hello(2, hello(1))
    assert server.sent == [(2, "RefusedFrame"), (2, "closed")]
    server.sent.clear()
    run.on_hello(3, hello(0, run_token=1))  # one that was at work, and lost its connection for a moment
    assert server.sent[-1] == (3, "DrainFrame")


def test_without_a_terminal_an_entry_says_how_far_it_is_and_how_long_the_rest_takes() -> None:
    progress = BoundedProgress(total=1_000, passed=250, parts=4, parts_done=1, waits={"kafka": "gone"})
    fields = list_fields(RunState(RunPhase.RUNNING), progress, 50.0)
    assert fields == {
        "state": "running",
        "passed": 250,
        "total": 1_000,
        "per_second": 50,
        "left_seconds": 15,
        "ranges_done": 1,
        "ranges": 4,
        "waits_for": {"kafka": "gone"},
    }
    starting = RunState(step="Spark is starting", step_seconds=2.0)
    assert list_fields(starting, PipelineProgress(), 0.0) == {
        "state": "starting",
        "waits_for": "Spark is starting (2 s)",
    }
