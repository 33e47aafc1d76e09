"""Where an open message is can be asked at any moment, for each stage in which it can wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.pipeline.conftest import P0, Rig, message
from tests.pipeline.inspection.test_standstill import MESSAGES, QUICK, Work

from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Refusal

Make = Callable[..., Rig]
#: How much later than it is the questions are asked.
LATER = 1000.0


def find(run: Rig, offset: int = 17, partition: int = 0) -> MessageStage | None:
    return run.engine._locator.find(("t", partition), offset, time.monotonic() + LATER)


async def wait_for(run: Rig, stage: OpenStage, offset: int = 17, partition: int = 0) -> MessageStage:
    """Wait until a message is in a stage."""
    found: MessageStage | None = None

    def is_there() -> bool:
        nonlocal found
        found = find(run, offset, partition)
        return found is not None and found.stage is stage

    try:
        await run.until(is_there)
    except AssertionError:
        pytest.fail(f"it is {found}")
    assert found is not None
    return found


async def test_arrange_and_what_waits_for_it(rig: Make) -> None:
    run = rig(Work(hook="arrange"), [*MESSAGES], executor={**QUICK, "window_size": 1})
    await run.until(lambda: (find(run) or MessageStage(stage=OpenStage.COMMIT)).seconds is not None)
    called = await wait_for(run, OpenStage.ARRANGE)
    assert (called.hook, called.why) == ("arrange", "message 17")
    behind = await wait_for(run, OpenStage.ARRANGE, 19)
    assert (behind.seconds, behind.why) == (None, "it is busy with earlier messages")


async def test_a_task_that_runs_with_its_process_and_one_that_is_queued(rig: Make) -> None:
    run = rig(Work("sleep 60"), MESSAGES, executor=QUICK)
    task = await wait_for(run, OpenStage.TASK)
    assert (task.task_id, task.attempt, task.attempts) == ("task-17", 1, 4)
    assert task.pid
    assert task.seconds is not None
    assert LATER <= task.seconds < LATER + 60
    queued = await wait_for(run, OpenStage.QUEUED, 18)
    assert (queued.task_id, queued.attempt, queued.why) == ("task-18", 1, "is queued: all executors are busy")


async def test_a_task_in_its_back_off_with_the_time_of_the_next_attempt(rig: Make) -> None:
    backoff = {"initial_seconds": 5000, "max_seconds": 5000}
    run = rig(Work("exit 1"), MESSAGES, executor={**QUICK, "max_retries": 3, "retry_backoff": backoff})
    stage = await wait_for(run, OpenStage.BACKOFF)
    assert (stage.attempt, stage.attempts) == (1, 4)
    assert stage.next_seconds is not None
    assert 0 <= stage.next_seconds <= 5000 - LATER


@pytest.mark.parametrize("hook", ["on_task_complete", "on_message_complete"])
async def test_a_hook_of_the_message_that_is_asked_about(rig: Make, hook: str) -> None:
    run = rig(Work(hook=hook), MESSAGES, executor=QUICK)
    await run.until(
        lambda: (find(run, 18) or MessageStage(stage=OpenStage.HOOK)).hook == hook
    )  # it may have to begin yet
    stage = await wait_for(run, OpenStage.HOOK, 18)
    assert (stage.hook, stage.why) == (hook, "message 18")


async def test_a_window_that_fills(rig: Make) -> None:
    run = rig(Work(), MESSAGES, executor={**QUICK, "window_linger_ms": 60_000})
    assert (await wait_for(run, OpenStage.WINDOW)).why == "its window to fill"


class Keyed(Work):
    """All messages have one key."""

    async def arrange(self, messages, pending):
        tasks = await super().arrange(messages, pending)
        return [ExecutorTask(t.task_id, t.args, source_offsets=t.source_offsets, binary_path="sh") for t in tasks]


async def test_the_message_that_goes_first_because_of_its_key(rig: Make) -> None:
    keyed = [SourceMessage("t", 0, offset, b"key", b"x") for offset in (17, 18, 19)]
    run = rig(Keyed("sleep 60"), keyed, executor={**QUICK, "order_by": "key", "max_executors": 3})
    await wait_for(run, OpenStage.TASK)
    stage = await wait_for(run, OpenStage.BEHIND_KEY, 18)
    assert (stage.task_id, stage.behind) == ("task-18", 17)
    assert (await wait_for(run, OpenStage.BEHIND_KEY, 19)).behind == 17


async def test_the_hook_that_goes_first_because_of_its_key_where_there_are_no_tasks(rig: Make) -> None:
    class InTurn(Handler[Any, Any]):
        async def transform(self, messages):
            return [None for _ in messages]

        async def on_message_complete(self, group):
            await asyncio.Event().wait()

    keyed = [SourceMessage("t", 0, offset, b"key", b"x") for offset in (17, 18, 19)]
    run = rig(InTurn(), keyed, executor={"order_by": "key", "window_size": 2, "drain_timeout_seconds": 0.1})
    for offset in (18, 19):  # of the same window, and of the next one
        stage = await wait_for(run, OpenStage.BEHIND_KEY, offset)
        assert stage.describe() == "it waits for an earlier message with its key (offset 17)"


async def test_a_sink_with_its_last_error_and_a_commit_that_waits_for_an_earlier_message(rig: Make) -> None:
    run = rig(Work("test $0 != 17 || exec sleep 60", delivers=True), MESSAGES, executor={**QUICK, "max_executors": 3})
    run.files.open.clear()
    assert (await wait_for(run, OpenStage.SINK, 18)).sink == "sinks.filesystem.files"
    run.files.refuse = lambda payload: Refusal("the disk is full", retryable=True)
    run.files.open.set()
    await run.until(lambda: "the disk is full" in (find(run, 18) or MessageStage(stage=OpenStage.SINK)).why)
    run.files.refuse = lambda payload: None
    stage = await wait_for(run, OpenStage.COMMIT, 18)
    assert (stage.behind, stage.why) == (17, "offset 17 goes first")


async def test_a_letter_the_brake_and_a_commit(rig: Make) -> None:
    run = rig(Work("exit 1"), MESSAGES, executor={**QUICK, "max_retries": 0})
    run.letters.hold = True
    assert (await wait_for(run, OpenStage.DEAD_LETTER)).why == "held by the test"
    run.source.hold_commits = True
    run.letters.hold = False
    run.letters.confirm()
    await wait_for(run, OpenStage.COMMIT)
    many = [message(offset) for offset in range(17, 117)]
    settings = {**QUICK, "max_retries": 0, "max_failure_ratio": 0.1, "window_size": 50}
    braked = rig(Work("exit 1"), many, executor=settings)
    await braked.until(lambda: braked.engine.progress().held)
    held = min(braked.engine.intake.partitions[P0].held)
    await wait_for(braked, OpenStage.BRAKE, held)


async def test_a_message_that_was_read_and_not_taken_and_one_that_was_not_read(rig: Make) -> None:
    run = rig(Work(), MESSAGES)
    await run.committed(20)
    await run.until(lambda: find(run, 18) is None)  # it is done
    assert find(run, 18, partition=5) is None, "another engine owns it"
    await wait_for(run, OpenStage.NOT_READ, 20)
    run.engine.pause()
    run.source.feed(message(20), message(21))
    stage = await wait_for(run, OpenStage.BUFFERED, 21)
    assert stage.why == "a user paused it"
    assert find(run, 19) is None
    later = find(run, 22)
    assert later is not None
    assert (later.stage, later.why) == (OpenStage.NOT_READ, "a user paused it")
    run.engine.intake._open = False
    run.engine.resume()
    assert (await wait_for(run, OpenStage.BUFFERED, 20)).why == "the engine is at its limits"


async def test_beats_have_the_oldest_message_of_each_partition_its_age_and_stage(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidemill.pipeline.inspection.standstill.CHECK_SECONDS", 0.01)
    written = [SourceMessage("t", 0, offset, None, b"x", timestamp=1_700_000_000_000 + offset) for offset in (17, 18)]
    run = rig(Work("sleep 60"), [*written, message(5, partition=1)], executor={"max_executors": 2})
    begun = time.time()

    def heads() -> dict[str, Any]:
        return run.engine.progress().heads

    await run.until(lambda: {name: head.stage for name, head in heads().items()} == {"t/0": "task", "t/1": "queued"})
    first = heads()["t/0"]
    assert (first.offset, first.written_at, first.buffered) == (17, 1_700_000_000.017, 0)
    assert first.since == pytest.approx(begun, abs=30)
    assert first.text.startswith("task task-17 runs (process ")
    assert heads()["t/1"].written_at is None, "the broker did not say"


async def test_a_partition_that_moves_has_no_stage_and_one_without_work_no_message(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rig(Work(), MESSAGES)
    now = [1000.0]
    run.engine._standstill._clock = lambda: now[0]
    run.source.hold_commits = True
    await run.until(lambda: run.engine.progress().messages_done == 3)
    now[0] += 2.0
    assert run.engine.progress().heads["t/0"].stage == "", "it was not there at the look before"
    now[0] += 2.0
    held = run.engine.progress().heads["t/0"]
    assert (held.offset, held.stage, held.text) == (17, "commit", "its commit is not confirmed")
    assert time.time() - held.since == pytest.approx(now[0] - 1002.0, abs=30)
    run.source.hold_commits = False
    run.source.answer()
    await run.committed(20)
    await run.settled()
    now[0] += 2.0
    assert run.engine.progress().heads == {}


async def test_a_transaction_that_is_not_committed_and_a_partition_that_is_given_up(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rig(Work("test $0 = 17 || exec sleep 60"), MESSAGES, executor={**QUICK, "max_executors": 3})
    monkeypatch.setattr(run.engine.context.mode, "cut", lambda lane, prefix: len(prefix), raising=False)
    run.source.hold_commits = True
    await wait_for(run, OpenStage.TRANSACTION)
    owned = run.engine.intake.partitions[P0]
    run.engine.intake.hand_over(owned)
    await wait_for(run, OpenStage.TASK, 18)  # what runs may finish
    run.source.feed(message(20))
    assert (await wait_for(run, OpenStage.BUFFERED, 20)).why == "the partition is being handed over"


async def test_what_users_put_into_ids_can_be_sent(rig: Make) -> None:
    class Odd(Work):
        async def arrange(self, messages, pending):
            return [ExecutorTask("\ud800" * 5000, ["60"], binary_path="sleep")]

    run = rig(Odd(), MESSAGES, executor=QUICK)
    stage = await wait_for(run, OpenStage.TASK)
    assert stage.task_id is not None
    assert len(stage.task_id.encode()) <= 2_000


async def test_a_head_is_not_sent_again_while_its_message_stays_where_it_is(
    rig: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = rig(Work("sleep 60"), [message(17)], executor={"max_executors": 1})
    now = [1000.0]
    monkeypatch.setattr(run.engine._standstill, "_clock", lambda: now[0])
    await run.until(lambda: run.engine.progress().tasks_running == 1)
    for _ in range(3):
        now[0] += 2.0
        run.engine.beat(whole=False)
    now[0] += 2.0
    changes = run.engine.beat(whole=False).changes
    assert (changes.heads, changes.heads_gone) == ({}, [])
    assert run.engine.progress().heads["t/0"].stage == "task"
