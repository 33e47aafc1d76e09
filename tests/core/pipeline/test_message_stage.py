"""Each stage in which a message can wait is said in words."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.core.pipeline.message_stage import MessageStage, OpenStage
from tidemill.core.pipeline.record_times import MAX_MARKS, RecordTimes

STAGES = [
    (MessageStage(stage=OpenStage.NO_OWNER), "no engine owns its partition"),
    (
        MessageStage(stage=OpenStage.NO_OWNER, why="it is assigned soon"),
        "no engine owns its partition (it is assigned soon)",
    ),
    (MessageStage(stage=OpenStage.NOT_READ), "it has not been read from its topic yet"),
    (
        MessageStage(stage=OpenStage.BUFFERED, why="a user paused it"),
        "it was read and waits to be taken: a user paused it",
    ),
    (MessageStage(stage=OpenStage.WINDOW, why="its window to fill"), "it waits for its window to fill"),
    (
        MessageStage(stage=OpenStage.ARRANGE, seconds=2.6, why="messages 7 to 9"),
        "arrange has not returned for 3 s (messages 7 to 9)",
    ),
    (
        MessageStage(stage=OpenStage.ARRANGE, why="it is busy with earlier messages"),
        "it waits for arrange (it is busy with earlier messages)",
    ),
    (MessageStage(stage=OpenStage.BEHIND_KEY), "it waits for an earlier message with its key"),
    (MessageStage(stage=OpenStage.BEHIND_KEY, behind=7), "it waits for an earlier message with its key (offset 7)"),
    (MessageStage(stage=OpenStage.BEHIND_KEY, task_id="t"), "task t waits for an earlier message with its key"),
    (
        MessageStage(stage=OpenStage.BEHIND_KEY, task_id="t", behind=7),
        "task t waits for an earlier message with its key (offset 7)",
    ),
    (
        MessageStage(stage=OpenStage.QUEUED, task_id="t", why="is queued: all executors are busy"),
        "task t is queued: all executors are busy",
    ),
    (MessageStage(stage=OpenStage.TASK, task_id="t" * 200, seconds=1.0), f"task {'t' * 100} has been running for 1 s"),
    (
        MessageStage(stage=OpenStage.TASK, task_id="t", seconds=61.0, pid=42),
        "task t has been running for 61 s (process 42)",
    ),
    (
        MessageStage(stage=OpenStage.BACKOFF, task_id="t", attempt=1, attempts=4, next_seconds=9.0),
        "task t is in backoff: attempt 1 of 4 failed, the next is in 9 s",
    ),
    (MessageStage(stage=OpenStage.BRAKE), "held by the failure brake"),
    (
        MessageStage(stage=OpenStage.HOOK, hook="on_task_complete", seconds=4.0),
        "hook on_task_complete has not returned for 4 s",
    ),
    (MessageStage(stage=OpenStage.HOOK), "it waits for a hook or a delivery"),
    (MessageStage(stage=OpenStage.SINK), "its results wait for their sinks"),
    (MessageStage(stage=OpenStage.SINK, sink="sinks.http.out"), "its results wait for sinks.http.out"),
    (
        MessageStage(stage=OpenStage.SINK, sink="sinks.http.out", why="refused"),
        "its results are not delivered (sinks.http.out: refused)",
    ),
    (MessageStage(stage=OpenStage.SINK, why="refused"), "its results are not delivered (refused)"),
    (MessageStage(stage=OpenStage.DEAD_LETTER, why="no leader"), "its dead letter is not confirmed (no leader)"),
    (MessageStage(stage=OpenStage.TRANSACTION), "its transaction is not committed"),
    (MessageStage(stage=OpenStage.COMMIT), "its commit is not confirmed"),
]


@pytest.mark.parametrize(("stage", "text"), STAGES, ids=[text[:40] for _, text in STAGES])
def test_a_stage_is_said_in_words(stage: MessageStage, text: str) -> None:
    assert stage.describe() == text


@pytest.mark.parametrize("stage", [stage for stage, _ in STAGES], ids=[text[:40] for _, text in STAGES])
def test_a_summary_does_not_change_while_a_message_stays_where_it_is(stage: MessageStage) -> None:
    changing = {"seconds": None if stage.seconds is None else 1e6, "next_seconds": 1e6}
    if stage.stage in (OpenStage.SINK, OpenStage.DEAD_LETTER, OpenStage.COMMIT, OpenStage.TRANSACTION):
        changing["why"] = "42 payloads wait for 99 s"
    assert replace(stage, **changing).summarize() == stage.summarize()


@pytest.mark.parametrize(
    ("stage", "text"),
    [
        (MessageStage(stage=OpenStage.TASK, task_id="t", seconds=1.0, pid=4), "task t runs (process 4)"),
        (MessageStage(stage=OpenStage.TASK, task_id="t", seconds=1.0), "task t runs"),
        (
            MessageStage(stage=OpenStage.BACKOFF, task_id="t", attempt=1, attempts=4, next_seconds=1.0),
            "task t is in backoff: attempt 1 of 4 failed",
        ),
        (
            MessageStage(stage=OpenStage.HOOK, hook="on_error", seconds=1.0, why="message 7"),
            "on_error has not returned",
        ),
        (MessageStage(stage=OpenStage.SINK, sink="sinks.http.out", why="503"), "its results wait for sinks.http.out"),
        (MessageStage(stage=OpenStage.COMMIT, why="no broker"), "its commit is not confirmed"),
        (MessageStage(stage=OpenStage.WINDOW, why="its window to fill"), "it waits for its window to fill"),
    ],
)
def test_a_stage_is_summarized(stage: MessageStage, text: str) -> None:
    assert stage.summarize() == text


def test_every_stage_is_said() -> None:
    assert {stage.stage for stage, _ in STAGES} == set(OpenStage)


def test_the_age_of_a_message_is_that_of_the_first_one_of_its_batch() -> None:
    times = RecordTimes()
    assert times.last == -1
    assert times.find(3) is None, "nothing was taken"
    times.note(10, 14, 5_000)
    times.note(15, 19, -1)
    times.note(20, 24, 7_000)
    assert times.last == 24
    assert times.find(9) is None, "it was taken by somebody else"
    assert times.find(12) == 5_000
    assert times.find(17) is None, "the broker did not say"
    assert times.find(24) == 7_000


def test_batches_are_merged_when_nothing_is_committed_and_no_age_is_too_low() -> None:
    times = RecordTimes()
    for number in range(5 * MAX_MARKS):
        times.note(number, number, number)
    assert len(times._marks) <= MAX_MARKS
    for offset in (0, 1, 1_000, 4_000, 5 * MAX_MARKS - 1):
        written = times.find(offset)
        assert written is not None
        assert written <= offset
