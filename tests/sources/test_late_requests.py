"""Requests of a transaction that the client repeated without a word, and whose first copy arrives after all."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import confluent_kafka as ck
import pytest
from tests.sources import kafka_proxy
from tests.sources.kafka_proxy import END_TXN, TXN_OFFSET_COMMIT, KafkaProxy, proxied_broker
from tests.until import wait_until

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.delivery.transaction import ProducerCall, TransactionEnd
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.sources.base import Outgoing
from tidemill.sources.transactional_producer import TransactionalProducer
from tidemill.testing.kafka import new_broker, unique_name


class Holding(KafkaProxy):
    """Loses the client's connection while a request of it is still on its way to the broker."""

    lose: int | None = None
    held = b""
    late: Any = None

    async def _requests(self, reader: Any, there: Any, faults: Any) -> None:
        while True:
            frame = await kafka_proxy._frame(reader)
            api, _, _ = kafka_proxy._HEADER.unpack_from(frame, 4)
            if self.lose == api:
                self.lose, self.held = None, frame
                _, self.late = await asyncio.open_connection(kafka_proxy.HOST, self.target_port)
                raise ConnectionResetError
            faults.put_nowait((api, None))
            there.write(frame)
            await there.drain()

    def deliver(self) -> None:
        """Let the first copy arrive."""

        async def write() -> None:
            self.late.write(self.held)
            await self.late.drain()
            await asyncio.sleep(0.5)  # nothing tells that the broker has dealt with it: its answer goes nowhere

        self._do(write())


class Site:
    """A member of a group, and a transactional producer whose brokers are behind such a proxy."""

    def __init__(self, broker: EmbeddedBroker, proxy: Holding) -> None:
        self.broker, self.proxy = broker, proxy
        self.topic, self.out = unique_name(), unique_name()
        self.tp = (self.topic, 0)
        for topic in (self.topic, self.out):
            self.broker.create_topic(topic, partitions=1)
        self.consumer = ck.Consumer(
            {
                "bootstrap.servers": self.broker.bootstrap,
                "group.id": self.topic,
                "enable.auto.commit": False,
                "isolation.level": "read_uncommitted",
            }
        )
        assigned: list[bool] = []
        self.consumer.subscribe([self.topic], on_assign=lambda *_: assigned.append(True))
        self.until(lambda: assigned)
        kafka = KafkaSettings(brokers=self.proxy.address, exactly_once=True)
        self.transactions = TransactionalProducer(kafka, self.topic, {"reconnect.backoff.max.ms": 500}, [])
        self.transactions.open(lambda: False)

    def until(self, condition: Callable[[], Any]) -> Any:
        def polled() -> Any:
            found = condition()
            if not found:
                self.consumer.poll(0.05)
            return found

        return wait_until(polled, pause_seconds=0.0)

    def begin(self, offset: int, result: bytes) -> None:
        self.transactions.begin({self.tp: offset}, [Outgoing(self.out, None, result)])

    def step(self) -> Any:
        """Make one call of the transaction; return how it ended, if it did."""
        transaction = self.transactions._transaction
        assert transaction is not None
        call = transaction.call
        end = transaction.note_answer(self.transactions._ask(lambda: self.transactions._carry_out(call, self.consumer)))
        if transaction.call is not call or end is not None:
            self.transactions._call_ended(call)
        return self.transactions._end(end) if end is not None else None

    def finish(self) -> Any:
        return self.until(self.step)

    def up_to(self, call: ProducerCall) -> None:
        """Make all calls before this one."""
        while self.transactions._transaction.call is not call:
            self.step()

    def committed(self) -> int:
        (found,) = self.consumer.committed([ck.TopicPartition(*self.tp)], 10)
        return found.offset

    def results(self, count: int) -> list[bytes]:
        reader = ck.Consumer(
            {"bootstrap.servers": self.broker.bootstrap, "group.id": "r", "isolation.level": "read_committed"}
        )
        reader.assign([ck.TopicPartition(self.out, 0, 0)])
        found: list[bytes] = []
        deadline = time.monotonic() + 60
        while len(found) < count and time.monotonic() < deadline:
            message = reader.poll(0.2)
            if message is not None and message.error() is None:
                found.append(message.value())
        reader.close()
        return found


@pytest.fixture(scope="module")
def broker_and_proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedBroker, Holding]]:
    def start(**options: Any) -> EmbeddedBroker:
        return stack.enter_context(new_broker(tmp_path_factory.mktemp("kafka"), **options))

    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setattr(kafka_proxy, "KafkaProxy", Holding)
        broker, (proxy,) = proxied_broker(start, 1)
        assert isinstance(proxy, Holding)
        yield broker, proxy
        proxy.close()


@pytest.fixture
def site(broker_and_proxy: tuple[EmbeddedBroker, Holding]) -> Iterator[Site]:
    made = Site(*broker_and_proxy)
    yield made
    made.consumer.close()


@pytest.mark.long
def test_offsets_that_arrive_a_second_time_do_not_count_for_the_next_transaction(site: Site) -> None:
    site.begin(10, b"first")
    assert site.finish() == (TransactionEnd.COMMITTED, {site.tp: 10})
    site.proxy.lose = TXN_OFFSET_COMMIT
    site.begin(2600, b"second")
    assert site.finish() == (TransactionEnd.COMMITTED, {site.tp: 2600})
    site.begin(3195, b"third")
    site.up_to(ProducerCall.COMMIT)
    site.proxy.deliver()
    assert site.finish() == (TransactionEnd.COMMITTED, {site.tp: 3195})
    site.until(lambda: site.committed() != 10)  # markers are written after the answer
    site.until(lambda: site.committed() == 3195)
    assert site.results(3) == [b"first", b"second", b"third"]


@pytest.mark.long
def test_an_abort_that_arrives_a_second_time_takes_no_result_of_the_next_transaction(site: Site) -> None:
    site.begin(10, b"first")
    assert site.finish() == (TransactionEnd.COMMITTED, {site.tp: 10})
    site.begin(20, b"aborted")
    site.up_to(ProducerCall.OFFSETS)
    site.transactions._producer.flush(5)
    site.transactions._transaction.give_up({site.tp})
    site.proxy.lose = END_TXN
    assert site.finish()[0] is TransactionEnd.ABORTED
    site.begin(20, b"second")
    site.up_to(ProducerCall.OFFSETS)
    site.transactions._producer.flush(5)
    site.proxy.deliver()
    assert site.finish() == (TransactionEnd.COMMITTED, {site.tp: 20})
    site.until(lambda: site.committed() == 20)
    assert site.results(2) == [b"first", b"second"]
