"""The brake through the engine: what fails is held instead of dead-lettered, tried, run again, or released."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from tests.pipeline.conftest import P0, P1, Rig, message

from tidemill.core.errors import TidemillError
from tidemill.core.pipeline.brake import LEAST
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.progress import StopReason
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.testing import run_handler

BRAKE: dict[str, Any] = {"max_failure_ratio": 0.5, "max_retries": 0, "window_size": 10}
ALL = [message(offset) for offset in range(200)]
COUNT = 2_000


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[Any]]:
    """Keep log lines: printed with the traceback of every failure they would be what takes the time."""
    with structlog.testing.capture_logs() as lines:
        yield lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let trials come quickly."""
    monkeypatch.setattr("tidemill.core.pipeline.brake.TRIAL_SECONDS", 0.3)


class Deployment(Handler[Any, Any]):
    """Something of it is broken until a test mends it."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.tried: list[int] = []

    def check(self, what: str) -> None:
        if self.broken == what:
            raise LookupError(f"{what} has no password=hunter2")

    def deserialize_message(self, message):
        if self.broken == "parse":
            self.tried.append(message.offset)
        self.check("parse")
        return message.value

    async def arrange(self, messages, pending):
        if self.broken == "arrange" and len(messages) == 1:
            self.tried.append(messages[0].offset)
        self.check("arrange")
        return [self.task(m) for m in messages]

    def task(self, m: SourceMessage) -> ExecutorTask:
        if self.broken == "task":
            self.tried.append(m.offset)
            return ExecutorTask(
                str(m.offset), ["-c", self.program(), str(m.offset)], source_offsets=[m.offset], binary_path="sh"
            )
        return ExecutorTask(str(m.offset), source_offsets=[m.offset], precomputed=PrecomputedResult("ok"))

    def program(self) -> str:
        return "exit 3"

    async def on_task_complete(self, result):
        if self.broken == "on_task_complete":
            self.tried.append(result.task.source_offsets[0])
        self.check("on_task_complete")
        return self.line(result.task.source_offsets[0])

    def line(self, offset: int) -> CollectResult:
        return CollectResult(files=[FilePayload(path="out", data=offset)])


class Grouping(Deployment):
    async def on_message_complete(self, group):
        if self.broken == "on_message_complete":
            self.tried.append(group.source_message.offset)
        self.check("on_message_complete")


class Windowed(Deployment):
    async def on_window_complete(self, results, messages):
        self.check("on_window_complete")


def lettered(run: Rig) -> list[int]:
    return sorted(source.offset for letter in run.letters.letters for source in letter.sources)


def braked(run: Rig) -> str:
    return run.engine.progress().waits.get("brake of engine 0", "")


HOOKS = ["parse", "arrange", "on_task_complete"]
ANY = [*((Deployment, hook) for hook in HOOKS), (Grouping, "on_message_complete"), (Windowed, "on_window_complete")]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("handler", "what"), ANY)
async def test_what_fails_is_held_until_a_trial_succeeds_and_then_everything_is_done(rig, handler, what) -> None:
    deployment = handler(what)
    run = rig(deployment, [message(offset) for offset in range(COUNT)], executor=BRAKE)
    await run.until(lambda: braked(run) and not run.engine.context.hooks.busy)
    before = lettered(run)
    # What is in flight is judged when it has finished.
    assert LEAST <= len(before) < LEAST + 50, "a broken deployment empties the topic into the dead letters"
    assert run.engine.progress().held
    assert run.engine.progress().consumed < COUNT / 2, "it takes new messages"
    assert f"with {what}: LookupError" in braked(run)
    assert "hunter2" not in braked(run)
    await run.settled()
    assert lettered(run) == before
    if handler is not Windowed:  # messages may be committed before what their window delivers
        assert run.source.committed[P0] == len(before), "a held message was committed"
    deployment.broken = ""
    await run.committed(COUNT)
    assert lettered(run) == before
    assert not braked(run)
    assert run.engine.progress().held == 0
    delivered = [payload.data for payload in run.files.payloads]
    rejected = set(before) if what in ("parse", "arrange", "on_task_complete") else set()
    assert sorted(delivered) == sorted(set(range(COUNT)) - rejected)


@pytest.mark.usefixtures("quick")
async def test_a_failed_task_is_held_and_run_again_with_all_its_retries(rig, tmp_path) -> None:
    class Program(Deployment):
        def program(self) -> str:
            return f"echo $0 >> {tmp_path}/runs; test -e {tmp_path}/mended || {{ echo no database >&2; exit 3; }}"

    deployment = Program("task")
    limits = BRAKE | {"max_retries": 1, "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.02}}
    run = rig(deployment, ALL, executor=limits)
    await run.until(lambda: braked(run) and run.engine.progress().held > 20, 30)
    before = lettered(run)
    assert LEAST <= len(before) < LEAST + 10
    assert "50 of the last 50 messages failed with task: exit code 3 (last: no database)" in braked(run)
    runs = tmp_path / "runs"
    await run.until(lambda: max(Counter(runs.read_text().split()).values()) == 4, 30)  # in the first trials
    (tmp_path / "mended").touch()
    await run.until(lambda: run.source.committed.get(P0) == 200, 30)
    assert lettered(run) == before
    assert len(run.files.payloads) == 200 - len(before)


@pytest.mark.usefixtures("quick")
async def test_held_messages_are_tried_one_at_a_time_in_turn(rig) -> None:
    deployment = Deployment("on_task_complete")
    run = rig(deployment, ALL[:64], executor=BRAKE)
    await run.until(lambda: braked(run) and not run.engine.context.hooks.busy)
    before, tried = lettered(run), len(deployment.tried)
    held = list(range(len(before), 64))
    assert run.engine.progress().held == len(held) > 1
    await run.until(lambda: len(deployment.tried) >= tried + len(held) + 2, 30)
    assert deployment.tried[tried : tried + len(held) + 2] == [*held, *held[:2]]
    assert lettered(run) == before


async def test_a_release_writes_what_is_held_and_takes_messages_again(rig, logs) -> None:
    run = rig(Deployment("on_task_complete"), [message(offset) for offset in range(300)], executor=BRAKE)
    run.engine.release()
    await run.until(lambda: run.engine.progress().held > 50 and not run.engine.context.hooks.busy)
    consumed = run.engine.progress().consumed
    run.engine.release()
    await run.until(lambda: len(lettered(run)) >= consumed)
    assert any("released" in line["event"] for line in logs)
    await run.until(lambda: braked(run))
    assert len(lettered(run)) >= consumed + LEAST
    while run.source.committed.get(P0) != 300:
        run.engine.release()
        await asyncio.sleep(0.01)
    assert lettered(run) == list(range(300))


async def test_it_says_what_failed_and_how_often_when_it_comes_on(rig, logs) -> None:
    run = rig(Deployment("arrange"), ALL, executor=BRAKE)
    await run.until(lambda: braked(run))
    (line,) = [line for line in logs if line["event"].startswith("the brake is on")]
    assert line["why"].startswith("50 of the last 50 messages failed with arrange: LookupError (last: LookupError: arr")
    assert line["log_level"] == "error"
    assert "hunter2" not in str(line)


async def test_what_is_skipped_and_what_sinks_refuse_does_not_count(rig) -> None:
    class Refused(Deployment):
        async def on_error(self, task, error):
            return ErrorAction.SKIP

        async def on_delivery_error(self, error):
            return DeliveryAction.DLQ

        def task(self, m):
            if m.offset % 2:
                return ExecutorTask(str(m.offset), source_offsets=[m.offset], binary_path="false")
            return super().task(m)

    run = rig(Refused(), ALL, executor=BRAKE)
    run.files.refuse = lambda payload: Refusal("not wanted", retryable=False)
    await run.until(lambda: run.source.committed.get(P0) == 200, 30)
    assert len(lettered(run)) == 100
    assert not braked(run)


async def test_fewer_failures_than_the_limit_are_dead_lettered_as_usual(rig) -> None:
    class Half(Deployment):
        async def on_task_complete(self, result):
            if result.task.source_offsets[0] % 2:
                raise LookupError("odd")

    run = rig(Half(), ALL, executor=BRAKE)
    await run.committed(200)
    assert lettered(run) == list(range(1, 200, 2))


async def test_without_it_everything_is_dead_lettered(rig) -> None:
    run = rig(Deployment("arrange"), ALL)
    await run.committed(200)
    assert run.engine.brake is None
    assert lettered(run) == list(range(200))
    run.engine.release()


async def test_neither_a_drain_nor_a_revoke_waits_for_what_is_held(rig, logs) -> None:
    messages = [*ALL, *(message(offset, partition=1) for offset in range(60))]
    run = rig(Deployment("on_task_complete"), messages, executor=BRAKE | {"drain_timeout_seconds": 60})
    await run.until(lambda: run.engine.progress().held and not run.engine.context.hooks.busy)
    await asyncio.wait_for(run.source.revoke(P0), 30)
    assert all(lane.partition == P1 for lane in run.engine.intake.partitions.values())
    summary = await asyncio.wait_for(run.end(), 30)
    assert summary.reason is StopReason.DRAINED
    assert any("left for the next run" in line["event"] for line in logs)
    assert len(lettered(run)) < LEAST + 50
    held = [offset for offset in range(200) if offset not in lettered(run)]
    assert run.source.committed.get(P0, 0) <= held[0], "what is held is given to the next one"


@pytest.mark.usefixtures("quick")
async def test_with_nothing_held_one_new_message_is_tried(rig) -> None:
    deployment = Deployment("on_task_complete")
    run = rig(deployment, ALL, executor=BRAKE)
    await run.until(lambda: run.engine.progress().held)
    run.source.lose(P0)
    assert run.engine.progress().held == 0
    deployment.tried.clear()
    run.source.feed(*ALL)
    run.source.events.on_assigned([P0])
    await run.until(lambda: run.engine.progress().held == 1)
    assert deployment.tried[0] == 0
    deployment.broken = ""
    await run.committed(200)


@pytest.mark.usefixtures("quick")
async def test_a_lone_message_is_tried_in_a_window_hook_that_fails(rig) -> None:
    deployment = Windowed("on_window_complete")
    run = rig(deployment, ALL, executor=BRAKE)
    await run.until(lambda: run.engine.progress().held)
    run.source.lose(P0)
    run.source.feed(*ALL)
    run.source.events.on_assigned([P0])
    await run.until(lambda: run.engine.progress().held == 1)
    assert braked(run), "its message ended well, but its window did not"
    deployment.broken = ""
    await run.committed(200)
    assert not braked(run)


class Early(Grouping):
    """What is broken is so for the first messages only."""

    def deserialize_message(self, message):
        return message.value if message.offset >= 51 else super().deserialize_message(message)

    async def arrange(self, messages, pending):
        if messages[0].offset >= 51:
            return [self.task(m) for m in messages]
        return await super().arrange(messages, pending)

    async def on_task_complete(self, result):
        offset = result.task.source_offsets[0]
        return self.line(offset) if offset >= 51 else await super().on_task_complete(result)

    async def on_message_complete(self, group):
        if group.source_message.offset < 51:
            await super().on_message_complete(group)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", [*HOOKS, "on_message_complete"])
async def test_a_held_message_keeps_its_place_in_the_order_of_its_key(rig, what) -> None:
    deployment = Early(what)
    messages = [SourceMessage("t", 0, n, b"%d" % (n % 3 if n >= 48 else n + 9), b"x") for n in range(60)]
    run = rig(deployment, messages[:50], executor=BRAKE | {"order_by": "key", "window_size": 1})
    await run.until(lambda: braked(run))
    assert lettered(run) == list(range(50))
    # In flight as if they had been read before.
    run.engine.intake.brake(False)
    run.source.feed(*messages[50:])
    await run.until(lambda: run.engine.progress().held == 1 and run.engine.progress().consumed == 60)
    await run.settled()
    delivered = [payload.data for payload in run.files.payloads if payload.data >= 51]
    behind = [offset for offset in range(51, 60) if offset % 3 == 50 % 3]
    assert delivered == [offset for offset in range(51, 60) if offset not in behind], "another key is held up"
    deployment.broken = ""
    await run.committed(60)
    delivered = [payload.data for payload in run.files.payloads if payload.data >= 50]
    assert [offset for offset in delivered if offset % 3 == 50 % 3] == [50, *behind]
    assert lettered(run) == list(range(50))


async def test_a_window_that_commits_as_a_whole_is_held_as_a_whole(rig) -> None:
    run = rig(Windowed("on_task_complete"), ALL, executor=BRAKE | {"commit": "window", "drain_timeout_seconds": 60})
    await run.until(lambda: run.engine.progress().held and not run.engine.context.hooks.busy)
    summary = await asyncio.wait_for(run.end(), 30)
    assert summary.reason is StopReason.DRAINED
    assert run.source.committed.get(P0, 0) % 10 == 0, "part of a window was committed"
    assert len(lettered(run)) < 200


def test_a_run_of_a_handler_over_given_messages_fails_instead() -> None:
    with pytest.raises(TidemillError, match=r"50 of the last 50 messages failed with on_task_complete: LookupError"):
        run_handler(Deployment("on_task_complete"), ["x"] * 200, {"executor": BRAKE})
