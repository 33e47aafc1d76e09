"""Order per key on a real broker: the last result of every key is that of its last message, rebalances included."""

from __future__ import annotations

import asyncio
import json
import random
from collections import defaultdict
from typing import Any

import confluent_kafka as ck
import pytest
from tests.sources.test_kafka import place  # noqa: F401  # a fixture

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ErrorAction, ExecutorTask, PrecomputedResult
from tidemill.sinks.payloads import CollectResult, FilePayload

KEYS = 9


class Late(Handler[Any, Any]):
    """Results that take their time, some of them only at the second try."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)

    async def arrange(self, messages, pending):
        tasks = []
        for m in messages:
            metadata = {"key": m.key.decode(), "n": int(m.value)}
            fails = self.dice.random() < 0.1
            how: Any = {"binary_path": "false"} if fails else {"precomputed": PrecomputedResult()}
            tasks.append(ExecutorTask(f"{m.partition}-{m.offset}", (), metadata, [m.offset], **how))
        return tasks

    async def on_error(self, task, error):
        await asyncio.sleep(self.dice.random() * 0.02)
        again = ExecutorTask(f"{task.task_id}-again", metadata=task.metadata, precomputed=PrecomputedResult())
        return [again] if self.dice.random() < 0.8 else ErrorAction.RETRY

    async def on_task_complete(self, result):
        await asyncio.sleep(self.dice.random() * 0.02)
        return CollectResult(files=[FilePayload(path="out", data=result.task.metadata)])


def feed(site: Any, first: int, last: int) -> None:
    producer = ck.Producer({"bootstrap.servers": site.broker.bootstrap})
    for n in range(first, last):
        key = n % KEYS
        producer.produce(site.topic, b"%d" % n, key=b"%d" % key, partition=key % site.partitions)
    assert producer.flush(20) == 0


@pytest.mark.kafka
async def test_results_of_a_key_come_in_the_order_of_its_messages_across_rebalances(place):  # noqa: F811
    executor = {"order_by": "key", "max_retries": 100, "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.02}}
    out = place.folder / "out"

    def results() -> list[dict[str, Any]]:
        # A line that is being appended has no end yet.
        return [json.loads(line) for line in out.read_text().splitlines(keepends=True) if line.endswith("\n")]

    feed(place, 0, 800)
    place.start(Late(1), "one", executor=executor)
    await place.until(lambda: out.exists() and len(results()) > 100)
    second = place.start(Late(2), "two", executor=executor)
    await place.until(lambda: second.progress().partitions, 40)
    feed(place, 800, 1_600)
    await place.until(lambda: second.progress().messages_done > 50, 40)
    feed(place, 1_600, 2_400)
    second.drain()
    await place.until(lambda: len({result["n"] for result in results()}) == 2_400, 60)
    seen = defaultdict(list)
    for result in results():
        seen[result["key"]].append(result["n"])
    for key, numbers in seen.items():
        assert list(dict.fromkeys(numbers)) == list(range(int(key), 2_400, KEYS)), "out of order"
        assert numbers[-1] == max(numbers), "the latest did not win"
