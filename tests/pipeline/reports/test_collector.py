"""Finished messages on their way to reports: in batches, never kept for long, and no report in the way of another."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from tests.pipeline.batches import make_batch
from tests.until import until

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorResult, ExecutorTask
from tidemill.pipeline.reports import collector
from tidemill.pipeline.reports.collector import FinishedMessages
from tidemill.pipeline.reports.parts import LONGS
from tidemill.pipeline.reports.report import NO_WINDOW, FinishedBatch, WindowTimes, stand_for
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.loop.engine_tasks import EngineTasks
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.testing.run import run_handler


class Kept:
    """Keeps the offsets of each batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.tasks = EngineTasks()
        self.closed = False
        self.needs_messages = False

    def take(self, batch: FinishedBatch) -> None:
        self.batches.append(list(batch.offsets))

    async def close(self) -> None:
        self.closed = True


class Raising(Kept):
    def take(self, batch: FinishedBatch) -> None:
        raise ValueError("it cannot take this")

    async def close(self) -> None:
        raise OSError("no disk")


def add(finished: FinishedMessages, *offsets: int, **more: Any) -> None:
    for offset in offsets:
        finished.add(("t", 0), SourceMessage("t", 0, offset), more.get("size_bytes", 1))


async def test_messages_go_out_in_order_and_in_batches_of_limited_size() -> None:
    kept = Kept()
    finished = FinishedMessages([kept])
    add(finished, *range(2500))
    assert [len(batch) for batch in kept.batches] == [1000, 1000]
    await finished.close()
    assert kept.closed
    assert [offset for batch in kept.batches for offset in batch] == list(range(2500))


async def test_messages_of_a_window_go_out_in_batches_of_the_same_limits() -> None:
    kept = Kept()
    finished = FinishedMessages([kept])
    add(finished, *range(300))
    messages = [SourceMessage("t", 0, offset) for offset in range(300, 2500)]
    finished.add_all(("t", 0), messages, [1] * len(messages), [()] * len(messages), NO_WINDOW)
    assert [len(batch) for batch in kept.batches] == [1000, 1000]
    finished.add_all(("t", 0), messages[:1], [collector.MAX_BYTES], [()], NO_WINDOW)
    assert [len(batch) for batch in kept.batches] == [1000, 1000, 501]
    finished.add_all(("t", 0), (), (), (), NO_WINDOW)
    await finished.close()
    assert [offset for batch in kept.batches for offset in batch] == [*range(2500), 300]


async def test_messages_that_no_other_follows_do_not_wait_for_a_full_batch() -> None:
    kept = Kept()
    add(FinishedMessages([kept]), 7)
    assert kept.batches == []
    await until(lambda: kept.batches == [[7]])


async def test_large_messages_and_large_outputs_are_not_kept_until_there_are_a_thousand() -> None:
    kept = Kept()
    finished = FinishedMessages([kept])
    add(finished, 1, 2, size_bytes=collector.MAX_BYTES // 2)
    assert kept.batches == [[1, 2]]
    result = ExecutorResult(0, b"o" * collector.MAX_BYTES, "", 0.1, ExecutorTask("t"), None)
    finished.add(("t", 0), SourceMessage("t", 0, 3), 1, [Task(result), Task()])  # type: ignore[list-item]
    assert kept.batches == [[1, 2], [3]]
    finished.add(("t", 0), SourceMessage("t", 0, 4), 1, [Task(result)])  # type: ignore[list-item]
    assert kept.batches == [[1, 2], [3]], "what is reported of one task that went well has no output"


class Watched(SourceMessage, weakref=True):
    """A message that tells when it is gone."""


class Task:
    """A task that went well."""

    def __init__(self, result: Any = None) -> None:
        self.task, self.result = ExecutorTask("t"), result
        self.error, self.attempts, self.payloads, self.ended_at, self.is_known = None, 1, 0, 7, False


@pytest.mark.parametrize("needs_messages", [False, True])
async def test_messages_and_tasks_that_went_well_stay_only_for_a_report_that_needs_them(needs_messages: bool) -> None:
    kept = Kept()
    kept.needs_messages = needs_messages
    finished, window = FinishedMessages([kept]), WindowTimes(1, 2, 3)
    window.known_runs = stand_for(1, 1, True)
    messages, task = [Watched("t", 0, offset, b"k") for offset in range(3)], Task()
    ran = Task()
    left: list[Any] = [weakref.ref(each) for each in (*messages, task, ran)]
    finished.add_all(("t", 0), messages[:2], [9, 9], [[task], [task]], window)  # type: ignore[list-item]
    finished.add(("t", 0), messages[2], 9, [ran], window)  # type: ignore[list-item]
    assert finished.size_bytes == (27 if needs_messages else 3)
    del messages, task, ran
    assert [each() is not None for each in left] == [needs_messages] * 5
    await finished.close()
    assert sorted(kept.batches[0]) == [0, 1, 2]


async def test_a_report_that_raises_takes_nothing_from_the_others() -> None:
    kept, raising = Kept(), Raising()
    finished = FinishedMessages([raising, kept])
    add(finished, 1)
    finished.flush()
    assert kept.batches == [[1]]
    try:
        await finished.close()
    except OSError:
        assert kept.closed
    else:
        raise AssertionError("the disk's error is not passed on")


def test_a_batch_knows_tasks_attempts_failures_and_times() -> None:
    class Run:
        def __init__(self, attempts: int, error: Any = None, *, replaced: bool = False) -> None:
            self.attempts, self.error, self.replaced, self.ended_at = attempts, error, replaced, 0

    def batch(*runs: Any) -> FinishedBatch:
        message = SourceMessage("t", 0, 5, timestamp=3)
        joined = FinishedBatch()
        for each in runs:
            joined.extend(make_batch([message], each))
        return joined

    failed, replaced = Run(3, "no"), Run(1, "no", replaced=True)
    ones = batch([Run(1)], [failed])
    assert (ones.tasks, ones.attempts, ones.failed) == ([1, 1], [1, 3], {1: failed})
    assert ones.parts["record_at"] == LONGS.pack([3, 3])
    several = batch([], [replaced, Run(2)], [Run(1), failed, Run(1, "later")])
    assert (several.tasks, several.attempts, several.failed) == ([0, 2, 3], [0, 3, 5], {2: failed})
    assert batch([Run(1)], [replaced]).failed == {}


def test_a_handler_s_outcomes_are_in_the_order_in_which_messages_finished() -> None:
    class DeliversEven(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [ExecutorTask(f"{m.offset}", ("-c", "sleep 0.03"), source_offsets=(m.offset,)) for m in messages]

        async def on_task_complete(self, result):
            is_even = int(result.task.task_id) % 2 == 0
            return CollectResult(files=[FilePayload(path="out", data="even")] if is_even else [])

    config = {"executor": {"binary_path": "sh", "max_executors": 1}}
    done = run_handler(DeliversEven(), [b"0", b"1", b"2", b"3"], config)
    assert [outcome.message.offset for outcome in done.outcomes] == [0, 1, 2, 3]
