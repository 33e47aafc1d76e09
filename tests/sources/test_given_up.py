"""Partitions that go while a transaction with their offsets is open: source and producer over scripted clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
import pytest
from tests.sources.test_kafka import Events, carry_out
from tests.sources.test_transactional_producer import Moving, Producer, error
from tests.sources.topic_ids import ScriptedIds

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.settings import Settings
from tidemill.sources.base import CommitStatus, Fatal, Outgoing
from tidemill.sources.kafka import KafkaSource
from tidemill.sources.transactional_producer import TransactionalProducer

KEPT, GONE = ("t", 0), ("t", 1)
POSITIONS = [ck.TopicPartition(*KEPT), ck.TopicPartition(*GONE)]


class Broker(Producer):
    """Accepts offsets of the current generation only, and keeps what was committed."""

    member: Member
    committed: list[dict[tuple[str, int], int]]
    busy: list[Any]

    def send_offsets_to_transaction(self, positions: Any, place: bytes, seconds: float) -> None:
        if self.busy:
            raise self.busy.pop()
        if place != self.member.consumer_group_metadata():
            raise error(ck.KafkaError.ILLEGAL_GENERATION, abort=True)
        self.offsets = {(p.topic, p.partition): p.offset for p in positions}

    def commit_transaction(self, seconds: float) -> None:
        self.committed.append(self.offsets)


class Member(Moving):
    """A consumer whose rebalances are played by hand."""

    def committed(self, partitions, timeout):
        return [ck.TopicPartition(p.topic, p.partition, 0) for p in partitions]

    def incremental_assign(self, partitions): ...
    def incremental_unassign(self, partitions): ...
    def resume(self, partitions): ...
    def commit(self, offsets, asynchronous):
        raise AssertionError("offsets were committed without their transaction")


class Side:
    """One engine's source, with its producer, its consumer and its broker."""

    def __init__(self) -> None:
        self.member = Member()
        self.kind: Any = type(
            "Scripted", (Broker,), {"made": [], "script": {}, "member": self.member, "committed": [], "busy": []}
        )
        self.events = Events()

    def open(self) -> None:
        producer = TransactionalProducer(KafkaSettings(), "id", {}, [])
        producer.open(lambda: False)
        self.source = KafkaSource(Settings(), "x", producer, ScriptedIds())
        self.source._consumer, self.source._events = self.member, self.events  # type: ignore[assignment]
        self.source._loop = asyncio.get_running_loop()

    async def on_thread(self, function: Callable[..., Any], *arguments: Any) -> None:
        await asyncio.to_thread(function, *arguments)
        await asyncio.sleep(0)

    async def commit(self, offsets: dict[tuple[str, int], int]) -> None:
        self.source.commit(offsets, {tp: [Outgoing("out", None, b"%d" % tp[1])] for tp in offsets})
        await self.on_thread(carry_out, self.source)
        await self.on_thread(self.source._pending.send, self.member)

    def ends(self) -> list[tuple[dict[tuple[str, int], int], CommitStatus]]:
        return [event[1:] for event in self.events.told if event[0] == "on_committed"]


@pytest.fixture
async def side(monkeypatch):
    made = Side()
    monkeypatch.setattr("tidemill.sources.transactional_producer.ck.Producer", made.kind)
    made.open()
    await made.on_thread(made.source._on_assign, made.member, POSITIONS)
    return made


def unavailable() -> Exception:
    return error(ck.KafkaError._TIMED_OUT, retriable=True)


async def test_a_member_that_was_expelled_and_taken_in_again_publishes_nothing_of_what_it_had(side):
    await side.commit({KEPT: 10})
    assert side.kind.committed == [{KEPT: 10}]
    # Its client joined again under a new id, and continues with what it was assigned under the old one.
    side.member.generation += 2
    side.member.member_id = "another"
    await side.commit({KEPT: 11, GONE: 20})
    assert side.kind.committed == [{KEPT: 10}]
    [(_, fatal, text)] = [event for event in side.events.told if event[0] == "on_fatal"]
    assert fatal is Fatal.FAILED
    assert "expelled this engine while it was stopped" in text


async def test_a_revoke_of_what_an_earlier_membership_had_is_a_loss(side):
    async def finishes(partitions):
        side.source.commit({GONE: 20}, {})
        return {GONE: 21}

    side.events.on_revoked = finishes
    side.member.generation += 2
    side.member.member_id = "another"
    await side.on_thread(side.source._on_revoke, side.member, POSITIONS[1:])
    assert side.kind.committed == []
    assert ("on_lost", [GONE]) in side.events.told


async def test_a_member_that_is_assigned_partitions_again_under_another_id_continues(side):
    await side.on_thread(side.source._on_lost, side.member, POSITIONS)
    side.member.generation += 2
    side.member.member_id = "another"
    await side.on_thread(side.source._on_assign, side.member, POSITIONS)
    await side.commit({KEPT: 11, GONE: 20})
    assert side.kind.committed == [{KEPT: 11, GONE: 20}]


@pytest.mark.parametrize("how", ["lost", "revoked", "not waited for"])
async def test_no_transaction_commits_a_partition_that_is_gone(side, how):
    side.kind.busy.append(unavailable())
    await side.commit({KEPT: 10, GONE: 20})
    assert side.ends() == []
    if how == "lost":
        await side.on_thread(side.source._on_lost, side.member, POSITIONS[1:])
    else:
        side.source._revoke_seconds = -9.9
        side.events.never = how == "not waited for"
        # While a revoke is waited for, the transaction continues.
        side.kind.busy.extend([unavailable()] * 100 if how == "revoked" else [unavailable()] * 1_000_000)
        await side.on_thread(side.source._on_revoke, side.member, POSITIONS[1:])
    side.kind.busy.clear()
    side.member.generation = 2
    await side.on_thread(side.source._pending.send, side.member)
    assert side.kind.committed == []
    assert {status for _, status in side.ends()} == {CommitStatus.AGAIN}
    assert KEPT in side.ends()[0][0]
    await side.commit({KEPT: 10})
    assert side.kind.committed == [{KEPT: 10}]


async def test_an_abort_that_ends_after_its_partition_came_back_says_nothing_of_its_new_work(side, monkeypatch):
    monkeypatch.setattr("tidemill.sources.pending_commits.GIVE_UP_SECONDS", 0.01)
    side.kind.busy.append(unavailable())
    await side.commit({KEPT: 10, GONE: 20})
    side.kind.script["abort_transaction"] = [unavailable()] * 1_000_000
    await side.on_thread(side.source._on_lost, side.member, POSITIONS[1:])
    assert side.ends() == []
    monkeypatch.setattr("tidemill.sources.pending_commits.TRANSACTION_END_SECONDS", 0.01)
    await side.on_thread(side.source._on_assign, side.member, POSITIONS[1:])
    side.kind.script.clear()
    await side.commit({GONE: 20})
    await side.on_thread(side.source._pending.send, side.member)
    assert side.ends() == [({KEPT: 10}, CommitStatus.AGAIN), ({GONE: 20}, CommitStatus.DONE)]
    assert side.kind.committed == [{GONE: 20}]


async def test_a_partition_that_comes_back_is_read_only_after_the_transaction_that_was_open_when_it_went(
    side, monkeypatch
):
    monkeypatch.setattr("tidemill.sources.pending_commits.GIVE_UP_SECONDS", 0.01)
    side.kind.busy.append(unavailable())
    await side.commit({KEPT: 10, GONE: 20})
    side.kind.script["abort_transaction"] = [unavailable()] * 1_000_000
    await side.on_thread(side.source._on_lost, side.member, POSITIONS[1:])
    assert side.source._pending._producer.busy
    side.kind.script["abort_transaction"] = [unavailable()] * 3
    asked: list[bool] = []
    committed = side.member.committed
    side.member.committed = lambda partitions, timeout: (
        asked.append(side.source._pending._producer.busy) or committed(partitions, timeout)
    )
    await side.on_thread(side.source._on_assign, side.member, POSITIONS[1:])
    assert asked == [False], "brokers do not tell a committed offset while a transaction with it is open"
    assert side.ends() == [({KEPT: 10}, CommitStatus.AGAIN)]
    assert side.source.describe_wait() is None


async def test_an_accepted_transaction_is_committed_while_its_partition_goes(side):
    refused = [unavailable()]
    commit = side.kind.commit_transaction

    def slowly(self: Any, seconds: float) -> None:
        if refused:
            raise refused.pop()
        commit(self, seconds)

    side.kind.commit_transaction = slowly
    await side.commit({KEPT: 10, GONE: 20})
    assert side.ends() == []
    await side.on_thread(side.source._on_lost, side.member, POSITIONS[1:])
    assert side.kind.committed == [{KEPT: 10, GONE: 20}]
    names = [event[0] for event in side.events.told]
    assert names.index("on_committed") < names.index("on_lost"), "the engine counts it before it forgets it"


async def test_a_generation_that_is_over_aborts_the_transaction_and_all_of_it_is_offered_again(side):
    side.kind.busy.append(unavailable())
    await side.commit({KEPT: 10, GONE: 20})
    side.member.generation = 2
    await side.on_thread(side.source._pending.send, side.member)
    assert side.ends() == [({KEPT: 10, GONE: 20}, CommitStatus.AGAIN)]
    await side.commit({KEPT: 10, GONE: 20})
    assert side.kind.committed == [{KEPT: 10, GONE: 20}]
