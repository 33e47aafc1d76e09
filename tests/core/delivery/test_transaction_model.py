"""Transactions of the members of a group against a model of the coordinators, over random schedules.

The model does what Kafka promises, and no more. A partition goes to another member in two generations: its owner is
asked for it and lets go, then it is assigned. A member that was expelled hears of it at any time later. Offsets are
taken of members of the current generation only; who is assigned a partition reads from the committed offset, once no
transaction with offsets of it is open. Requests arrive at any time, answers get lost.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import NamedTuple

import pytest
from tests.core.examples import examples

from tidemill.core.delivery.transaction import ProducerCall, Transaction, TransactionAnswer, TransactionEnd

PARTITIONS = ("a", "b", "c")
LENGTH = 12


class Place(NamedTuple):
    """What a member hands over with offsets."""

    member: str
    generation: int


class Request:
    """Offsets on their way to the coordinator, or the answer on its way back."""

    def __init__(self, place: Place, offsets: dict[str, int]) -> None:
        self.place, self.offsets = place, offsets
        self.answer: TransactionAnswer | None = None


class Coordinators:
    """Group and transactions, as the brokers keep them."""

    def __init__(self) -> None:
        self.generation = 1
        self.members: set[str] = set()
        self.owners: dict[str, str] = {}
        self.committed = dict.fromkeys(PARTITIONS, 0)
        self.pending: dict[str, dict[str, int]] = {}
        self.written: dict[str, list[tuple[str, int]]] = {}
        self.visible: Counter[tuple[str, int]] = Counter()

    def stable(self, partition: str) -> bool:
        return not any(partition in offsets for offsets in self.pending.values())

    def take_offsets(self, producer: str, request: Request) -> None:
        if request.place.member in self.members and request.place.generation == self.generation:
            self.pending.setdefault(producer, {}).update(request.offsets)
            request.answer = TransactionAnswer.DONE
        else:
            request.answer = TransactionAnswer.ABORT

    def end(self, producer: str, *, commit: bool) -> None:
        offsets, records = self.pending.pop(producer, {}), self.written.pop(producer, [])
        if commit:
            self.visible.update(records)
            for partition, offset in offsets.items():
                assert offset >= self.committed[partition], "an offset moved back"
                self.committed[partition] = offset


class Member:
    """What a source and its transactor do, with `Transaction` for every decision."""

    def __init__(self, name: str, brokers: Coordinators, chance: random.Random) -> None:
        self.name, self.brokers, self.chance = name, brokers, chance
        self.generation = brokers.generation
        self.expelled = False
        #: The next offset to commit of each partition it believes to own; a list, to tell periods of ownership apart.
        self.owned: dict[str, list[int]] = {}
        self.transaction: Transaction[str] | None = None
        self.request: Request | None = None
        self.lent: dict[str, list[int]] = {}

    @property
    def place(self) -> Place:
        return Place(self.name, self.generation)

    def act(self) -> None:
        if self.transaction is None:
            self.begin()
        else:
            self.step()

    def begin(self) -> None:
        offsets, records = {}, []
        for partition, (start,) in self.owned.items():
            end = min(LENGTH, start + self.chance.randrange(4))
            if end > start:
                offsets[partition] = end
                records += [(partition, n) for n in range(start, end)]
        if offsets:
            self.transaction, self.records, self.taken = Transaction(offsets), records, self.place
            self.lent = {partition: self.owned[partition] for partition in offsets}

    def step(self) -> None:
        assert self.transaction is not None
        end = self.transaction.note_answer(self.asked(self.transaction.call))
        if end is not None:
            self.ended(end)

    def asked(self, call: ProducerCall) -> TransactionAnswer:
        brokers, chance = self.brokers, self.chance
        if call is ProducerCall.SEND:
            brokers.written[self.name] = list(self.records)
            return chance.choices(
                (TransactionAnswer.DONE, TransactionAnswer.AGAIN, TransactionAnswer.ABORT), (6, 3, 1)
            )[0]
        if call is ProducerCall.OFFSETS:
            return self.handed_over()
        if call in (ProducerCall.COMMIT, ProducerCall.ABORT):
            if (
                call is ProducerCall.ABORT
                and self.request is not None
                and self.handed_over() is TransactionAnswer.AGAIN
            ):
                return TransactionAnswer.AGAIN
            if chance.random() < 0.6:
                brokers.end(self.name, commit=call is ProducerCall.COMMIT)
                # The answer may get lost; the same call again finds it done.
                return chance.choice((TransactionAnswer.DONE, TransactionAnswer.AGAIN))
            return TransactionAnswer.AGAIN
        return TransactionAnswer.DONE

    def handed_over(self) -> TransactionAnswer:
        assert self.transaction is not None
        if self.request is None:
            self.request = Request(self.taken, dict(self.transaction.offsets))
            return TransactionAnswer.AGAIN
        request = self.request
        if self.chance.random() < 0.1:
            self.request = None  # its answer is lost, or it never arrived
            return TransactionAnswer.AGAIN
        if request.answer is None:
            return TransactionAnswer.AGAIN
        self.request = None
        return request.answer

    def ended(self, end: TransactionEnd) -> None:
        assert self.transaction is not None
        for partition, offset in self.transaction.offsets.items():
            assert self.owned.get(partition) is self.lent[partition], "notified about work of another member"
            if end is TransactionEnd.COMMITTED:
                self.owned[partition][0] = offset
        self.transaction = self.request = None

    def give_up(self, partitions: list[str]) -> None:
        """Give partitions up: they are lost, or will be another member's as soon as this returns."""
        transaction = self.transaction
        if transaction is not None and transaction.holds(partitions):
            end = transaction.give_up(partitions)
            if end is not None:
                self.ended(end)
            for _ in range(self.chance.randrange(6)):
                if self.transaction is not None:
                    self.step()
            transaction.forget(partitions)
        for partition in partitions:
            del self.owned[partition]

    def crash(self) -> None:
        """Crash, and restart under the same id: open transactions are aborted before anything is read."""
        self.brokers.end(self.name, commit=False)
        self.transaction = self.request = None
        for partition in self.owned:
            self.owned[partition] = [self.brokers.committed[partition]]


class LeftBehind(Member):
    """A faulty member that continues with what it gave up, and hands it over with its current place."""

    def handed_over(self) -> TransactionAnswer:
        self.taken = self.place
        return super().handed_over()

    def give_up(self, partitions: list[str]) -> None:
        if self.transaction is not None:
            self.transaction.forget(partitions)
        for partition in partitions:
            del self.owned[partition]


class Schedule:
    """Everything that can happen, in an order drawn from a seed."""

    def __init__(self, seed: int, kind: type[Member] = Member) -> None:
        self.chance = random.Random(seed)
        self.brokers = Coordinators()
        self.members = [kind(name, self.brokers, self.chance) for name in ("m1", "m2", "m3")]
        self.brokers.members = {member.name for member in self.members}

    def play(self, steps: int) -> None:
        happenings = [self.act, self.deliver, self.assign, self.revoke, self.expel, self.hear, self.sync, self.crash]
        for happen in self.chance.choices(happenings, (30, 10, 8, 2, 1, 3, 8, 0.5), k=steps):
            happen(self.chance.choice(self.members))
        self.finish()

    def act(self, member: Member) -> None:
        member.act()

    def deliver(self, member: Member) -> None:
        if member.request is not None and member.request.answer is None:
            self.brokers.take_offsets(member.name, member.request)

    def assign(self, member: Member) -> None:
        """Give a free partition to a member that keeps up with the group."""
        brokers = self.brokers
        free = [partition for partition in PARTITIONS if partition not in brokers.owners and brokers.stable(partition)]
        if free and not member.expelled:
            brokers.generation += 1
            self.sync(member)
            partition = self.chance.choice(free)
            brokers.owners[partition] = member.name
            member.owned[partition] = [brokers.committed[partition]]

    def revoke(self, member: Member) -> None:
        """Ask a member for a partition; it may have heard of the new generation before it hears of that."""
        if member.owned and not member.expelled:
            self.brokers.generation += 1
            self.sync(member)
            for _ in range(self.chance.randrange(3)):
                member.act()
            partition = self.chance.choice(list(member.owned))
            member.give_up([partition])
            del self.brokers.owners[partition]

    def expel(self, member: Member) -> None:
        if not member.expelled:
            member.expelled = True
            self.brokers.members.discard(member.name)
            self.brokers.generation += 1
            for partition in member.owned:
                del self.brokers.owners[partition]

    def hear(self, member: Member) -> None:
        """Tell an expelled member, which then joins again."""
        if member.expelled:
            member.give_up(list(member.owned))
            member.expelled = False
            self.brokers.members.add(member.name)
            self.brokers.generation += 1
            self.sync(member)

    def sync(self, member: Member) -> None:
        if not member.expelled:
            member.generation = self.brokers.generation

    def crash(self, member: Member) -> None:
        if not member.expelled:
            member.crash()
            self.sync(member)

    def finish(self) -> None:
        """Let everything settle; nothing may be missing, and nothing may be there twice."""
        for _ in range(2_000):
            for member in self.members:
                for happen in (self.hear, self.sync, self.deliver, self.act, self.assign):
                    happen(member)
            if all(offset == LENGTH for offset in self.brokers.committed.values()):
                break
        assert self.brokers.visible == Counter((p, n) for p in PARTITIONS for n in range(LENGTH))


@pytest.mark.parametrize("part", range(4))
def test_each_result_is_visible_once_whatever_happens_to_the_group(part: int) -> None:
    for seed in range(part * 500, part * 500 + examples(500)):
        try:
            Schedule(seed).play(200)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}") from error


def test_the_model_detects_a_transaction_that_outlives_its_ownership() -> None:
    def holds(seed: int) -> bool:
        try:
            Schedule(seed, LeftBehind).play(200)
        except AssertionError:
            return False
        return True

    assert not all(holds(seed) for seed in range(100))
