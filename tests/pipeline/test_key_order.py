"""Order per key through the engine: what waits, what does not, and that nothing waits forever."""

from __future__ import annotations

import asyncio
import random
import sys
from collections import defaultdict
from typing import Any

import pytest
from tests.pipeline.conftest import P0, P1

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.payloads import CollectResult, FilePayload

BY_KEY: dict[str, Any] = {"order_by": "key"}
QUICK: dict[str, Any] = {"retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.02}}


def keyed(offset: int, key: str | None, partition: int = 0) -> SourceMessage:
    return SourceMessage("t", partition, offset, key.encode() if key is not None else None, b"x")


def known(task_id: str, *offsets: int) -> ExecutorTask:
    return ExecutorTask(task_id, source_offsets=offsets, precomputed=PrecomputedResult("ok"))


def line(offset: int) -> CollectResult:
    return CollectResult(files=[FilePayload(path="out", data=offset)])


class Gated(Handler[Any, Any]):
    """One precomputed task per message; its hook waits for the message's gate, which is open unless it was closed."""

    def __init__(self, *closed: int) -> None:
        self.gates: dict[int, asyncio.Event] = defaultdict(asyncio.Event)
        self.closed = set(closed)
        self.begun: list[int] = []
        self.done: list[int] = []

    async def arrange(self, messages, pending):
        return [known(str(m.offset), m.offset) for m in messages]

    async def on_task_complete(self, result):
        offset = int(result.task.task_id)
        self.begun.append(offset)
        if offset in self.closed:
            await self.gates[offset].wait()
        self.done.append(offset)
        return line(offset)


async def test_a_task_waits_for_the_hook_of_the_one_before_it_with_its_key_and_other_keys_continue(rig) -> None:
    handler = Gated(0)
    run = rig(handler, [keyed(0, "a"), keyed(1, "a"), keyed(2, "b"), keyed(3, None), keyed(4, "b")], executor=BY_KEY)
    await run.until(lambda: handler.done == [2, 3, 4])
    await run.settled()
    assert handler.begun == [0, 2, 3, 4], "a precomputed task waits too"
    assert run.engine.progress().tasks_queued == 1
    handler.gates[0].set()
    await run.committed(5)
    assert handler.done == [2, 3, 4, 0, 1]
    assert [payload.data for payload in run.files.payloads] == [2, 3, 4, 0, 1]


async def test_without_it_keys_mean_nothing(rig) -> None:
    handler = Gated(0)
    run = rig(handler, [keyed(0, "a"), keyed(1, "a")])
    await run.until(lambda: handler.done == [1])
    assert all(lane.order is None for lane in run.engine.intake.partitions.values())
    handler.gates[0].set()
    await run.committed(2)


async def test_partitions_have_nothing_to_do_with_each_other(rig) -> None:
    handler = Gated(0)
    run = rig(handler, [keyed(0, "a"), keyed(1, "a", partition=1)], executor=BY_KEY)
    await run.committed(2, P1)
    assert handler.done == [1]
    handler.gates[0].set()
    await run.committed(1)


async def test_tasks_of_one_message_run_side_by_side_and_the_next_message_waits_for_all_of_them(rig) -> None:
    class FanOut(Handler[Any, Any]):
        begun: list[str] = []
        gate = asyncio.Event()

        async def arrange(self, messages, pending):
            return [known(f"{m.offset}.{n}", m.offset) for m in messages for n in range(3)]

        async def on_task_complete(self, result):
            self.begun.append(result.task.task_id)
            if result.task.task_id == "0.1":
                await self.gate.wait()

    run = rig(FanOut(), [keyed(0, "a"), keyed(1, "a")], executor=BY_KEY)
    await run.until(lambda: len(FanOut.begun) == 3)
    await run.settled()
    assert FanOut.begun == ["0.0", "0.1", "0.2"]
    FanOut.gate.set()
    await run.committed(2)
    assert FanOut.begun[3:] == ["1.0", "1.1", "1.2"]


async def test_a_task_keeps_its_turn_through_its_retries(rig, tmp_path) -> None:
    class Failing(Handler[Any, Any]):
        done: list[int] = []

        async def arrange(self, messages, pending):
            again = f"echo x >> {tmp_path}/tries; test $(wc -l < {tmp_path}/tries) -ge 3"
            return [
                ExecutorTask(
                    str(m.offset),
                    ["-c", again if m.offset == 0 else "true"],
                    source_offsets=[m.offset],
                    binary_path="sh",
                )
                for m in messages
            ]

        async def on_task_complete(self, result):
            self.done.append(int(result.task.task_id))

    run = rig(Failing(), [keyed(0, "a"), keyed(1, "a"), keyed(2, "b")], executor=BY_KEY | QUICK)
    await run.committed(3)
    assert (tmp_path / "tries").read_text() == "x\n" * 3
    assert [offset for offset in Failing.done if offset != 2] == [0, 1]


@pytest.mark.parametrize("answer", [ErrorAction.DLQ, ErrorAction.SKIP])
async def test_a_task_that_fails_for_good_passes_its_turn_on_after_on_error(rig, answer) -> None:
    class Failing(Handler[Any, Any]):
        gate = asyncio.Event()
        begun: list[str] = []

        async def arrange(self, messages, pending):
            first = ExecutorTask("0", source_offsets=[0], binary_path="false")
            return [first if m.offset == 0 else known(str(m.offset), m.offset) for m in messages]

        async def on_error(self, task, error):
            self.begun.append("error")
            await self.gate.wait()
            return answer

        async def on_task_complete(self, result):
            self.begun.append(result.task.task_id)

    handler = Failing()
    handler.gate, handler.begun = asyncio.Event(), []
    run = rig(handler, [keyed(0, "a"), keyed(1, "a")], executor=BY_KEY)
    await run.until(lambda: handler.begun)
    await run.settled()
    assert handler.begun == ["error"]
    handler.gate.set()
    await run.committed(2)
    assert handler.begun == ["error", "1"]


async def test_replacements_have_the_turn_of_the_task_that_they_replace(rig) -> None:
    class Replacing(Handler[Any, Any]):
        gate = asyncio.Event()
        begun: list[str] = []

        async def arrange(self, messages, pending):
            first = ExecutorTask("0", source_offsets=[0], binary_path="false")
            return [first if m.offset == 0 else known(str(m.offset), m.offset) for m in messages]

        async def on_error(self, task, error):
            return [known("0a"), known("0b")]

        async def on_task_complete(self, result):
            self.begun.append(result.task.task_id)
            if result.task.task_id == "0b":
                await self.gate.wait()

    handler = Replacing()
    run = rig(handler, [keyed(0, "a"), keyed(1, "a")], executor=BY_KEY)
    await run.until(lambda: len(handler.begun) == 2)
    await run.settled()
    assert handler.begun == ["0a", "0b"]
    handler.gate.set()
    await run.committed(2)
    assert handler.begun == ["0a", "0b", "1"]


async def test_the_hook_of_a_message_is_part_of_its_turn(rig) -> None:
    class Whole(Gated):
        async def on_task_complete(self, result):
            self.begun.append(int(result.task.task_id))

        async def on_message_complete(self, group):
            offset = group.source_message.offset
            if offset in self.closed:
                await self.gates[offset].wait()
            return line(offset)

    handler = Whole(0)
    run = rig(handler, [keyed(0, "a"), keyed(1, "a"), keyed(2, "b")], executor=BY_KEY)
    await run.until(lambda: len(run.files.payloads) == 1)
    await run.settled()
    assert handler.begun == [0, 2]
    handler.gates[0].set()
    await run.committed(3)
    assert [payload.data for payload in run.files.payloads] == [2, 0, 1]


async def test_messages_that_wait_for_their_key_do_not_count_against_the_executors(rig) -> None:
    handler = Gated(0)
    limits = {"max_executors": 1, "backpressure_high_multiplier": 4, "backpressure_low_multiplier": 1, "window_size": 4}
    run = rig(handler, [*(keyed(n, "hot") for n in range(200)), keyed(200, "cold")], executor=BY_KEY | limits)
    await run.until(lambda: handler.done == [200])
    assert run.engine.progress().consumed == 201
    handler.gates[0].set()
    await run.committed(201)
    assert handler.done == [200, *range(200)]


@pytest.mark.parametrize("limit", [{"max_uncommitted": 50}, {"max_queued_bytes": 500, "window_max_bytes": 100}])
async def test_messages_that_wait_for_their_key_count_against_max_uncommitted_and_bytes(rig, limit) -> None:
    handler = Gated(0)
    messages = [SourceMessage("t", 0, n, b"hot", b"x" * 7) for n in range(200)]
    run = rig(handler, messages, executor=BY_KEY | {"window_size": 10} | limit)
    await run.until(lambda: run.engine.progress().consumed == 50)
    await run.settled()
    assert run.engine.progress().consumed == 50
    handler.gates[0].set()
    await run.committed(200)
    assert handler.done == list(range(200))


async def test_a_lost_partition_leaves_nothing_of_its_order_behind(rig) -> None:
    handler = Gated(0)
    run = rig(handler, [keyed(0, "a"), keyed(1, "a")], executor=BY_KEY)
    await run.until(lambda: handler.begun == [0])
    lane = run.engine.intake.partitions[P0]
    run.source.lose(P0)
    assert lane.order.waiting == 0
    run.source.feed(keyed(5, "a"), keyed(6, "a"))
    run.source.events.on_assigned([P0])
    await run.committed(7)
    assert handler.begun == [0, 5, 6], "those before were dropped, and nothing waits for them"
    handler.gates[0].set()
    await run.settled()
    assert handler.begun == [0, 5, 6]


async def test_a_revoked_partition_leaves_nothing_of_its_order_behind(rig) -> None:
    handler = Gated(1)
    run = rig(handler, [keyed(n, "a") for n in range(4)], executor=BY_KEY | {"drain_timeout_seconds": 0.2})
    await run.until(lambda: handler.begun == [0, 1])
    lane = run.engine.intake.partitions[P0]
    await run.source.revoke(P0)
    assert run.source.committed[P0] == 1
    assert lane.order.waiting == 0
    handler.gates[1].set()
    await run.settled()
    assert handler.begun == [0, 1]


async def test_a_revoke_waits_for_nothing_behind_a_task_that_waits_for_its_key(rig) -> None:
    handler = Gated(0, 2)
    messages = [keyed(0, "a"), keyed(1, "a"), keyed(2, "b")]
    run = rig(handler, messages, executor=BY_KEY | {"drain_timeout_seconds": 60})
    await run.until(lambda: handler.begun == [0, 2])
    revoked = asyncio.ensure_future(run.source.revoke(P0))
    await run.settled()
    assert not revoked.done(), "what runs is waited for"
    handler.gates[0].set()
    await asyncio.wait_for(revoked, 30)
    assert run.source.committed[P0] in (1, 2), "the next one takes no time, and may have been done"
    handler.gates[2].set()


#: Answers with how many requests it found in its pipe.
COUNT = """
import json, os, time
while data := os.read(0, 1 << 20):
    time.sleep(0.1)
    data += os.read(0, 1 << 20) if __import__("select").select([0], [], [], 0)[0] else b""
    tasks = data.splitlines()
    for task in tasks:
        print(json.dumps({"id": json.loads(task)["id"], "stdout": str(len(tasks))}), flush=True)
"""


@pytest.mark.parametrize(("keys", "ahead"), [("aaaaaa", False), ("abcdef", True)])
async def test_nothing_is_sent_ahead_to_a_resident_copy_past_its_turn(rig, keys: str, ahead: bool) -> None:
    class Counting(Handler[Any, Any]):
        counts: list[int] = []

        async def arrange(self, messages, pending):
            return [ExecutorTask(str(m.offset), source_offsets=[m.offset]) for m in messages]

        async def on_task_complete(self, result):
            self.counts.append(int(result.stdout))

    handler = Counting()
    handler.counts = []
    resident = {
        "mode": "resident",
        "binary_path": sys.executable,
        "max_executors": 1,
        "resident": {"args": ["-I", "-S", "-c", COUNT], "send_ahead": 8},
    }
    run = rig(handler, [keyed(n, key) for n, key in enumerate(keys)], executor=BY_KEY | resident)
    await run.committed(len(keys))
    assert (max(handler.counts) > 1) is ahead
    await run.end()


class Shuffling(Handler[Any, Any]):
    """Tasks of one message, of several and of all of a window, which fail, are replaced and take their time."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.keys: dict[int, bytes | None] = {}
        self.open: dict[str, set[bytes]] = {}
        self.rank: dict[str, tuple[int, int, int]] = {}
        self.of: dict[str, list[int]] = {}
        self.window = 0
        self.wrong: list[str] = []
        self.failed: set[str] = set()

    async def arrange(self, messages, pending):
        self.window += 1
        self.keys |= {m.offset: m.key for m in messages}
        offsets = [m.offset for m in messages]
        tasks = []
        for index in range(len(messages) * 2):
            count = self.dice.choice([1, 1, 1, 2, 3])
            mine = sorted(self.dice.sample(offsets, min(count, len(offsets))))
            fails = self.dice.random() < 0.1
            how: Any = {"binary_path": "false"} if fails else {"precomputed": PrecomputedResult("ok")}
            task = ExecutorTask(f"{self.window}.{index}", source_offsets=mine, **how)
            self.of[task.task_id] = mine
            self.rank[task.task_id] = (self.window, mine[0], index)
            self.open[task.task_id] = {key for key in (self.keys[offset] for offset in mine) if key is not None}
            tasks.append(task)
        return tasks

    def check(self, name: str) -> None:
        for other, keys in self.open.items():
            if self.rank[other] < self.rank[name]:
                for key in keys & self.open[name]:
                    theirs = {offset for offset in self.of[other] if self.keys[offset] == key}
                    mine = {offset for offset in self.of[name] if self.keys[offset] == key}
                    if not (theirs == mine and len(mine) == 1):
                        self.wrong.append(f"{name} ran while {other} was open")

    async def pause(self) -> None:
        if self.dice.random() < 0.3:
            await asyncio.sleep(self.dice.random() * 0.004)

    async def on_task_complete(self, result):
        name = result.task.task_id.partition("/")[0]
        self.check(name)
        await self.pause()
        if result.task.task_id == name or result.task.task_id.endswith("last"):
            del self.open[name]

    async def on_error(self, task, error):
        self.check(task.task_id)
        await self.pause()
        match self.dice.choice(["skip", "dlq", "replace", "retry"]):
            case "replace":
                return [known(f"{task.task_id}/last")]
            case "retry" if task.task_id not in self.failed:
                self.failed.add(task.task_id)
                return ErrorAction.RETRY
            case "dlq":
                del self.open[task.task_id]
                return ErrorAction.DLQ
            case _:
                del self.open[task.task_id]
                return ErrorAction.SKIP


@pytest.mark.parametrize("seed", range(6))
async def test_random_schedules_with_fan_in_keep_the_order_and_come_to_an_end(rig, seed: int) -> None:
    handler = Shuffling(seed)
    dice = random.Random(seed)
    messages = [keyed(n, dice.choice(["a", "b", "c", "d", None])) for n in range(150)]
    run = rig(handler, messages, executor=BY_KEY | QUICK | {"window_size": 7, "max_uncommitted": 60})
    await run.until(lambda: run.source.committed.get(P0) == 150, 30)
    assert handler.wrong == []
    assert handler.open == {}
