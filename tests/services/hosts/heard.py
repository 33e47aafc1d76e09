"""A Kafka topic whose records many deferred tasks wait for, and what the triggerers make of it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaException, TopicPartition
from tests.until import until

from tidemill.core.streams.offset_metadata import decode_metadata
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.testing.kafka import FAST_CLIENT, consume, produce, unique_name, wait_for_committed

#: The keys of a run, and the tasks that wait for the record of each key.
KEYS, LISTENERS = 3, 3
PARTITIONS = 2
#: The run that is created when all others have ended: its triggers read the topic to its end.
LAST = "last"
#: Selects the results of the tasks.
HEARD_VALUES = """
SELECT r.run_id, t.task_id, x.value FROM xcom x JOIN task_instance t ON t.id = x.task JOIN dag_run r ON r.id = t.run
JOIN dag d ON d.id = r.dag WHERE d.dag_id = 'heard' AND x.key = 'return_value'
"""
#: Selects the tasks whose events are stored.
_STORED = """
SELECT r.run_id, t.task_id FROM trigger_event e JOIN trigger g ON g.id = e.trigger_id
JOIN task_instance t ON t.id = g.task_id JOIN dag_run r ON r.id = t.run JOIN dag d ON d.id = r.dag
WHERE d.dag_id = 'heard'
"""
#: The most seconds until the tasks of a run have subscribed.
_SUBSCRIBED_SECONDS = 300.0
_WATCH_SECONDS = 0.25

Rows = Callable[[str], Awaitable[Sequence[Sequence[Any]]]]


class _Look(NamedTuple):
    """The records that will not be read again, by partition, and the tasks whose events were stored afterwards.

    Those are the records below the committed offset, and those that are listed with it.
    """

    committed: dict[int, tuple[int, tuple[tuple[int, int], ...]]]
    stored: frozenset[tuple[str, str]]

    def is_over(self, partition: int, offset: int) -> bool:
        """Return whether a record will not be read again."""
        floor, clean = self.committed[partition]
        return offset < floor or any(first <= offset < behind for first, behind in clean)


class Topic:
    """A topic that the triggers of tasks share.

    Args:
        broker: Has the topic.
        folder: The triggers make a file here when they have subscribed: `RUN.TASK`.
        choose: The source of chance.

    Attributes:
        kwargs: The arguments of `KafkaTrigger`, without its selection.
        looks: How often the committed offsets were compared with what was stored.
    """

    def __init__(self, broker: EmbeddedBroker, folder: Path, choose: random.Random) -> None:
        folder.mkdir()
        self._folder, self._choose, self._bootstrap = folder, choose, broker.bootstrap
        self._name = broker.create_topic(unique_name("heard"), PARTITIONS)
        self.kwargs = {"topic": self._name, "brokers": self._bootstrap, "group": self._name}
        self._written = 0
        self._expected: dict[tuple[str, str], str] = {}
        self._looks: list[_Look] = []

    @property
    def looks(self) -> int:
        """How often the committed offsets were compared with what was stored."""
        return len(self._looks)

    async def write_all(self, runs: Iterable[str]) -> None:
        """Write the records of runs, each once all tasks of the run have subscribed."""
        async with asyncio.TaskGroup() as group:
            for run in runs:
                group.create_task(self._write(run))

    async def _wait_subscribed(self, run: str) -> None:
        made = {f"{run}.l{number}" for number in range(KEYS * LISTENERS)}

        def are_subscribed() -> bool:
            return made <= {path.name for path in self._folder.iterdir()}

        await until(are_subscribed, _SUBSCRIBED_SECONDS, what=f"the tasks of {run} have subscribed", pause_seconds=0.05)

    async def _write(self, run: str) -> None:
        await self._wait_subscribed(run)
        for key in self._choose.sample(range(KEYS), KEYS):
            await asyncio.sleep(self._choose.uniform(0.0, 2.0))
            value = f"{run}.{key} is here"
            # Records that no task waits for are read and acknowledged, too.
            for name, text in ((f"other{self._written}", "other"), (f"{run}.{key}", value)):
                self._written += 1
                await asyncio.to_thread(produce, self._bootstrap, self._name, [text], key=name)
            for number in range(key, KEYS * LISTENERS, KEYS):
                self._expected[run, f"l{number}"] = value

    async def finish(self) -> None:
        """Check that everything is acknowledged, before and after the records of the last run are written."""
        await self._wait_subscribed(LAST)
        await self._wait_committed()
        await self._write(LAST)
        await self._wait_committed()

    async def _wait_committed(self) -> None:
        await asyncio.to_thread(
            wait_for_committed, self._bootstrap, self._name, self._name, self._written, timeout_seconds=60.0
        )

    async def watch(self, rows: Rows) -> None:
        """Note again and again what is committed and, afterwards, what is stored."""
        settings: dict[str, Any] = {**FAST_CLIENT, "bootstrap.servers": self._bootstrap, "group.id": self._name}
        consumer = Consumer(settings)
        places = [TopicPartition(self._name, number) for number in range(PARTITIONS)]
        try:
            while True:
                with contextlib.suppress(KafkaException):  # the group has no coordinator yet
                    found = await asyncio.to_thread(consumer.committed, places, 10.0)
                    committed = {one.partition: (one.offset, _read_clean(one.metadata)) for one in found}
                    if not self._looks or committed != self._looks[-1].committed:
                        stored = frozenset((run, task) for run, task in await rows(_STORED))
                        self._looks.append(_Look(committed, stored))
                await asyncio.sleep(_WATCH_SECONDS)
        finally:
            consumer.close()

    def check(self, values: Sequence[Sequence[Any]]) -> None:
        """Check the results of the tasks, and that no offset was committed before the events were stored.

        Args:
            values: The rows of `HEARD_VALUES`.
        """
        assert {(run, task): json.loads(value) for run, task, value in values} == self._expected
        waiting: dict[str, set[tuple[str, str]]] = {}
        for task, value in self._expected.items():
            waiting.setdefault(value, set()).add(task)
        for message in consume(self._bootstrap, self._name, self._written):
            wanted = waiting.get(message.value().decode(), set())
            for look in self._looks:
                if look.is_over(message.partition(), message.offset()):
                    assert wanted <= look.stored, (message.value(), look)


def _read_clean(metadata: str | None) -> tuple[tuple[int, int], ...]:
    found = decode_metadata("", metadata)
    return () if found is None else tuple(found.clean)
