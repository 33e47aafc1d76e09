"""Windows without tasks under `kafka.exactly_once`: each result is committed once, with its message, or has a letter.

A real engine with sinks, letters and commits as they are; only the brokers are scripted: they refuse records, and abort
transactions.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
from structlog.testing import capture_logs
from tests.pipeline.test_run_properties import Known, Scenario, Transforming, draw, expect
from tests.until import until

from tidemill.config.settings import Settings
from tidemill.core.delivery.transaction import judge_records
from tidemill.core.retry import Backoff
from tidemill.deadletters.letter import decode_letter
from tidemill.pipeline import commits
from tidemill.pipeline.build import build_engine
from tidemill.pipeline.delivery import transactional_letters
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.kafka import KafkaSink
from tidemill.sources.base import CommitStatus, Outgoing, Records, TopicPartition
from tidemill.testing.scripted import ScriptedSource

REFUSED = ("no", "large", "raise")


class Brokers(ScriptedSource):
    """Carries out transactions: all of one is in its topics, or nothing."""

    def __init__(self, messages: list[SourceMessage], chance: random.Random) -> None:
        super().__init__(messages)
        self.chance = chance
        self.seen: set[bytes] = set()
        #: What is in the topics, with the transaction's first and next offset of the message's partition.
        self.written: list[tuple[Outgoing, TopicPartition, int, int]] = []

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        given = [(partition, record) for partition, each in (records or {}).items() for record in each]
        aborted = self.chance.random() < 0.2
        for _, record in given:
            fate = self.find_fate(record)
            aborted = aborted or fate is not None
            if fate in REFUSED:
                record.error, record.oversize = "no", fate == "large"
        suspects = [record for _, record in given if record.error is not None]
        for record, verdict in zip(suspects, judge_records([each.isolated for each in suspects]), strict=True):
            record.verdict = verdict
        if not aborted:
            for partition, record in given:
                before = self.committed.get(partition, 0)
                self.written.append((record, partition, before, offsets[partition]))
        self.answers.append(CommitStatus.AGAIN if aborted else CommitStatus.DONE)
        super().commit(offsets, records)

    def find_fate(self, record: Outgoing) -> str | None:
        """Return what is wrong with a record; None: nothing, or nothing any more."""
        if record.topic != "out" or record.value is None:
            return None
        fate = json.loads(record.value)[3]
        is_first = record.value not in self.seen
        self.seen.add(record.value)
        if fate in REFUSED or (fate in ("again", "down") and is_first):
            return str(fate)
        return None


def draw_for_topics(seed: int) -> Scenario:
    """Return a random scenario in which everything goes to one topic."""
    scenario = draw(seed)
    scenario.executor.pop("order_by", None)
    for plan in (plan for planned in scenario.plans for plan in planned):
        plan.payloads = [("topic", fate) for _, fate in plan.payloads]
    return scenario


async def play(scenario: Scenario, chance: random.Random) -> Brokers:
    messages = [
        SourceMessage("t", partition, offset, plan.key, b"value")
        for partition, planned in enumerate(scenario.plans)
        for offset, plan in enumerate(planned)
    ]
    settings = Settings.model_validate(
        {
            "kafka": {"brokers": "127.0.0.1:1", "source_topic": "t", "consumer_group": "g", "exactly_once": True},
            "executor": {"window_size": scenario.window_size, **scenario.executor},
            "sinks": {"kafka": {"out": {"topic": "out"}}},
            "debug": {"enabled": False},
            "dlq": {"topic": "letters"},
        }
    )
    source = Brokers(messages, chance)
    handler = Known(scenario) if scenario.is_known else Transforming(scenario)
    engine = build_engine(settings, handler, EngineIdentity("test", 0, "w", "g", 1), source)

    async def at_once() -> None:
        pass

    running = asyncio.ensure_future(engine.run(at_once))
    goal = {("t", n): len(planned) for n, planned in enumerate(scenario.plans) if planned}
    try:
        await until(lambda: source.committed == goal or running.done(), 30)
        for owned in engine.intake.partitions.values():
            await until(lambda owned=owned: not (owned.unresolved or owned.undelivered_bytes), 30)
            assert (owned.unresolved, owned.undelivered, owned.undelivered_bytes) == (0, 0, 0)
        assert engine.counters.in_flight == 0
    finally:
        engine.drain()
        await asyncio.wait_for(running, 30)
    return source


@pytest.fixture(autouse=True, scope="module")
def _quickly_and_without_brokers():
    async def look_up(sink: KafkaSink) -> None:
        return None

    with (
        mock.patch.object(commits, "COLLECT_SECONDS", 0.005),
        mock.patch.object(commits, "BACKOFF", Backoff(0.001, 0.002)),
        mock.patch.object(KafkaSink, "look_up", look_up),
        mock.patch.object(transactional_letters, "prepare_letter_topic", return_value=None),
    ):
        yield


@pytest.mark.parametrize("seed", range(30))
def test_each_result_is_committed_once_with_its_message_or_has_a_letter(seed: int) -> None:
    scenario = draw_for_topics(seed)
    with capture_logs():
        source = asyncio.run(play(scenario, random.Random(seed)))
    sent, lost, _ = expect(scenario)
    found: Counter[tuple[Any, ...]] = Counter()
    letters: Counter[tuple[int, int, str]] = Counter()
    order: dict[tuple[int, str], list[tuple[int, int]]] = {}
    for record, (_, partition), first, following in source.written:
        assert record.value is not None
        if record.topic == "out":
            name = (*json.loads(record.value),)
            found[name] += 1
            offsets = [name[1]]
            order.setdefault((partition, name[3]), []).append(name[1:3])
        else:
            letter = decode_letter(record.value)
            (place,) = letter.sources
            offsets = [place.offset]
            letters[place.partition, place.offset, letter.kind.value] += len(letter.original_payloads) or 1
        assert all(first <= offset < following for offset in offsets), "not in the transaction of its message"
    assert found == sent
    assert letters == lost
    # Aborted transactions and hooks that wait change nothing about the order.
    assert all(each == sorted(each) for (_, fate), each in order.items() if fate == "ok")
