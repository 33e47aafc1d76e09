"""A partition that stands still is named, with the message that holds it up and where that is."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.pipeline.conftest import P0, P1, Rig, message

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.runtime.link.progress import find_stalled_partitions
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.sources.base import CommitStatus

NAME = "partition t/0"
MESSAGES = [message(offset) for offset in (17, 18, 19)]
QUICK: dict[str, Any] = {"stall_seconds": 0.05, "max_executors": 1}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.pipeline.inspection.standstill.CHECK_SECONDS", 0.01)


class Work(Handler[bytes, Any]):
    """One task per message, of these arguments for `sh -c`; known results without any; waits in one hook."""

    def __init__(self, program: str = "", hook: str = "", *, delivers: bool = False) -> None:
        self.program = program
        self.hook = hook
        self.delivers = delivers

    async def arrange(self, messages, pending):
        await self._reach("arrange")
        known = None if self.program else PrecomputedResult(exit_code=0, stdout=b"")
        return [
            ExecutorTask(
                f"task-{m.offset}",
                ["-c", self.program, str(m.offset)],
                source_offsets=[m.offset],
                binary_path="sh",
                precomputed=known,
            )
            for m in messages
        ]

    async def on_task_complete(self, result):
        await self._reach("on_task_complete")
        return CollectResult(files=[FilePayload(path="out", data=1)]) if self.delivers else None

    async def on_message_complete(self, group):
        await self._reach("on_message_complete")

    async def _reach(self, hook: str) -> None:
        if hook == self.hook:
            await asyncio.Event().wait()


async def named(run: Rig, pattern: str) -> str:
    """Wait until the partition is named with such a text, and return it."""
    text = ""

    def found() -> bool:
        nonlocal text
        text = run.engine.progress().waits.get(NAME, "")
        return re.search(pattern, text) is not None

    try:
        await run.until(found)
    except AssertionError:
        pytest.fail(f"the text is {text!r}")
    assert text.startswith("nothing was committed for ")
    assert find_stalled_partitions(run.engine.progress().waits) == {"t/0"}
    return text


Make = Callable[..., Rig]


@pytest.mark.parametrize(
    ("handler", "settings", "pattern"),
    [
        (Work(hook="arrange"), {}, r"offset 17: arrange has not returned for \d+ s"),
        (Work("sleep 60"), {}, r"offset 17: task task-17 has been running for \d+ s \(process \d+\)"),
        (
            Work("exit 1"),
            {"max_retries": 3, "retry_backoff": {"initial_seconds": 60, "max_seconds": 60}},
            r"offset 17: task task-17 is in backoff: attempt 1 of 4 failed, the next is in \d+ s",
        ),
        (Work(hook="on_task_complete"), {}, r"offset 17: hook on_task_complete has not returned for \d+ s"),
        (Work(hook="on_message_complete"), {}, r"offset 17: hook on_message_complete has not returned for \d+ s"),
        (Work(), {"window_linger_ms": 60_000}, "offset 17: it waits for its window to fill"),
    ],
)
async def test_the_stage_of_the_oldest_message_is_named(
    rig: Make, handler: Work, settings: dict[str, Any], pattern: str
) -> None:
    run = rig(handler, MESSAGES, executor={**QUICK, **settings})
    await named(run, pattern)


async def test_a_queued_message_is_named_although_later_ones_are_processed(rig: Make) -> None:
    # The only executor is busy with another partition.
    run = rig(Work("sleep 60"), [message(5, partition=1), *MESSAGES], executor={**QUICK, "window_size": 1})
    await run.until(lambda: {"partition t/0", "partition t/1"} <= run.engine.progress().waits.keys())
    texts = " ".join(text for name, text in run.engine.progress().waits.items() if name.startswith("partition"))
    assert "has been running" in texts
    assert "is queued: all executors are busy" in texts


async def test_a_sink_that_hangs_and_one_that_fails_are_named(rig: Make) -> None:
    run = rig(Work(delivers=True), MESSAGES, executor=QUICK)
    run.files.open.clear()
    await named(run, "offset 17: its results wait for sinks.filesystem.files")
    run.files.refuse = lambda payload: Refusal("the disk is full", retryable=True)
    run.files.open.set()
    await named(run, r"offset 17: its results are not delivered \(sinks.filesystem.files: .*the disk is full")
    run.files.refuse = lambda payload: None
    await run.committed(20)


async def test_a_letter_that_is_not_confirmed_is_named(rig: Make) -> None:
    run = rig(Work("exit 1"), MESSAGES, executor={**QUICK, "max_retries": 0})
    run.letters.hold = True
    await named(run, r"offset 17: its dead letter is not confirmed \(held by the test\)")
    run.letters.hold = False
    run.letters.confirm()


async def test_a_held_message_is_named(rig: Make) -> None:
    settings = {**QUICK, "max_retries": 0, "max_failure_ratio": 0.1, "window_size": 50}
    run = rig(Work("exit 1"), [message(offset) for offset in range(17, 117)], executor=settings)
    await named(run, r"offset \d+: held by the failure brake")


async def test_a_commit_that_is_not_confirmed_is_named_once_in_the_log_and_so_is_its_end(rig: Make) -> None:
    with capture_logs() as logs:
        run = rig(Work(), MESSAGES, executor=QUICK)
        run.source.hold_commits = True
        await named(run, "offset 17: its commit is not confirmed")
        await run.until(lambda: "for 1 s" in run.engine.progress().waits[NAME])
        run.source.hold_commits = False
        run.source.answer()
        await run.committed(20)
        await run.until(lambda: NAME not in run.engine.progress().waits)
    lines = [line for line in logs if line.get("partition") == "t/0"]
    assert [line["event"] for line in lines] == ["a partition is stalled", "a partition makes progress again"]
    assert "offset 17: its commit is not confirmed" in lines[0]["why"]


async def test_commits_that_fail_are_named(rig: Make) -> None:
    run = rig(Work(), MESSAGES, executor=QUICK)
    run.source.answers.extend([CommitStatus.AGAIN] * 1000)
    await named(run, "offset 17: its commit is not confirmed")
    run.source.answers.clear()
    await run.committed(20)


async def test_what_a_user_paused_and_what_has_no_work_does_not_stand_still(rig: Make) -> None:
    run = rig(Work(), MESSAGES, executor={"stall_seconds": 60})
    now = [0.0]
    run.engine._standstill._clock = lambda: now[0]

    def stands_still() -> bool:
        now[0] += 61.0
        return NAME in run.engine.progress().waits

    await run.committed(20)
    await run.settled()
    assert not stands_still()
    assert not stands_still(), "it has no work"
    run.engine.pause()
    run.source.feed(message(20))
    assert run.source.buffered(P0) == 1
    assert not stands_still()
    assert not stands_still(), "a user paused it"
    run.engine.intake._open = False  # whatever keeps the engine from taking it
    run.engine.resume()
    assert not stands_still(), "it has had work for no time"
    assert stands_still()
    assert "; 1 message buffered: the engine is at its limits" in run.engine.progress().waits[NAME]
    run.engine.intake._open = True
    run.engine.resume()
    await run.committed(21)


async def test_only_the_partitions_that_a_user_paused_take_nothing(rig: Make) -> None:
    run = rig(Work(), [message(17), message(17, partition=1)], executor={"stall_seconds": 60})
    now = [0.0]
    run.engine._standstill._clock = lambda: now[0]
    await run.committed(18)
    await run.committed(18, P1)
    run.engine.pause([0])
    run.source.feed(*(message(offset, partition=number) for offset in (18, 19) for number in (0, 1)))
    await run.committed(20, P1)
    assert run.source.buffered(P0) == 2
    for _ in range(3):
        now[0] += 61.0
        assert run.engine.progress().waits == {}

    run.engine.pause([1])
    run.source.feed(message(20, partition=1))
    await run.committed(20)
    assert run.source.buffered(P1) == 1
    run.engine.resume()
    await run.committed(21, P1)


async def test_messages_of_a_partition_that_was_given_up_are_no_longer_uncommitted(rig: Make) -> None:
    settings = {"max_executors": 3, "drain_timeout_seconds": 0.1}
    run = rig(Work("test $0 = 17 || exec sleep 60"), MESSAGES, executor=settings)
    run.source.hold_commits = True
    await run.until(lambda: run.engine.progress().messages_done == 1)
    assert run.engine.progress().flow == {"t/0": (3, 0, 0)}
    await run.source.revoke(P0)
    assert run.engine.progress().flow == {"t/0": (3, 1, 2)}
