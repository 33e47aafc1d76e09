"""What executors do is told only while somebody watches."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.pipeline.conftest import Rig, message
from tests.pipeline.inspection.test_standstill import Work

from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.pipeline.inspection.live_feed import LiveFeed
from tidemill.runtime.link.live_tasks import LiveState

Make = Callable[..., Rig]
SECRET = "password=hunter2"


class Labelled(Work):
    """Tasks with labels, of which one runs long and one fails at once."""

    async def arrange(self, messages, pending):
        scripts = {0: "sleep 60", 1: "exit 3"}
        return [
            ExecutorTask(
                f"task-{m.offset}\ud800",
                ["-c", scripts.get(m.offset, "true")],
                source_offsets=[m.offset],
                binary_path="sh",
                labels={"tenant": "acme", "note": SECRET},
            )
            for m in messages
        ]


def feed_of(run: Rig) -> LiveFeed:
    feed = run.engine.live
    assert isinstance(feed, LiveFeed)
    return feed


async def test_running_ended_waiting_and_backing_off_tasks_and_windows_are_told(rig: Make) -> None:
    backoff = {"initial_seconds": 3600, "max_seconds": 3600}
    executor = {"max_executors": 2, "max_retries": 3, "retry_backoff": backoff, "window_size": 50}
    messages = [message(offset) for offset in range(40)]
    run = rig(Labelled(), messages, executor=executor, debug={"ws_min_duration_ms": 60_000})
    feed = feed_of(run)
    assert feed.take_state() is None
    assert run.engine.context.pool.on_ended is None
    feed.renew(3600.0)
    states: list[LiveState] = []

    def has_seen_all() -> bool:
        state = feed.take_state()
        assert state is not None
        states.append(state)
        # A task has ended a moment before its window knows.
        are_settled = [window.tasks for window in state.windows] == [2]
        return are_settled and sum(task.of for each in states for task in each.ended) == 39

    await run.until(has_seen_all)
    last, ended = states[-1], [task for state in states for task in state.ended]
    assert (last.executors, last.queued, last.retrying, last.left_out) == (2, 0, 1, 0)
    (running,) = last.running
    assert (running.topic, running.partition, running.offset, running.attempt) == ("t", 0, 0, 1)
    assert abs(time.time() - running.at) < 60
    assert (running.seconds, running.outcome) == (0.0, "")
    assert "\ud800" not in running.task_id
    assert running.label.startswith("tenant=acme")
    assert "hunter2" not in str(states)
    (failed,) = [task for task in ended if task.outcome != "ok"]
    assert (failed.offset, failed.outcome, failed.of) == (1, "exit", 1)
    assert {task.slot for task in ended} <= {0, 1}
    assert len(ended) < 39, "fast tasks are sampled"
    (waiting,) = last.backing_off
    assert (waiting.offset, waiting.attempt) == (1, 2)
    assert waiting.at > time.time() - 60
    (window,) = last.windows
    assert (window.topic, window.first, window.messages, window.tasks) == ("t", 0, 40, 2)


async def test_tasks_that_wait_are_told_in_their_order_and_few_of_them(rig: Make) -> None:
    messages = [message(offset) for offset in range(100)]
    run = rig(Work("sleep 60"), messages, executor={"max_executors": 1, "window_size": 100}, debug={})
    feed = feed_of(run)
    feed.renew(3600.0)
    await run.until(lambda: run.engine.progress().tasks_running == 1)
    state = feed.take_state()
    assert state is not None
    assert [task.offset for task in state.waiting[:3]] == [1, 2, 3]
    assert len(state.waiting) == 20
    assert state.queued == run.engine.progress().tasks_queued > 20


async def test_a_watch_that_is_not_renewed_ends_and_costs_nothing_any_more(rig: Make) -> None:
    run = rig(Work("true"), [message(0)], debug={})
    feed, now = feed_of(run), [100.0]
    feed._clock = lambda: now[0]
    feed.renew(5.0)
    now[0] += 4.9
    assert feed.take_state() is not None
    feed.renew(5.0)
    now[0] += 5.0
    assert feed.take_state() is None
    assert run.engine.context.pool.on_ended is None
    await run.committed(1)


async def test_without_a_web_ui_there_is_no_feed(rig: Make) -> None:
    run: Any = rig(Work("true"), [message(0)])
    assert run.engine.live is None
    await run.committed(1)
