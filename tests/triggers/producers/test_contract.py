"""The streams that ship, each held to the contract of all."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.triggers.producers.producer_contract import AckPlace, Place, ProducerContract, Pulled, StreamContract
from tests.triggers.producers.sqs_server import SqsServer, moto_url, sqs_server

from tidemill.config.settings import Settings
from tidemill.core.retry import Backoff
from tidemill.core.streams.redelivery_items import RedeliveryLimits
from tidemill.deadletters.letter import decode_letter
from tidemill.testing.kafka import committed_offsets, consume, produce, unique_name
from tidemill.triggers.builtin.directory import DirectoryTrigger
from tidemill.triggers.producers.kafka import KafkaStreamProducer
from tidemill.triggers.producers.sqs import SqsStreamProducer, sqs_stream
from tidemill.triggers.shared_stream import SharedStreamProducer

__all__ = ["moto_url", "sqs_server"]

LANES = {"a": 0, "b": 1}


class KafkaPlace(AckPlace):
    """A topic of two partitions."""

    def __init__(self, broker: Any) -> None:
        self.broker = broker
        self.topic = unique_name("contract")
        self.sent = 0
        broker.create_topic(self.topic, partitions=2)

    async def put(self, lane: str, *values: str) -> None:
        produce(self.broker.bootstrap, self.topic, values, partition=LANES[lane])
        self.sent += len(values)

    def make(self) -> SharedStreamProducer:
        kafka = {"brokers": self.broker.bootstrap, "source_topic": self.topic, "consumer_group": self.topic}
        limits = RedeliveryLimits(backoff=Backoff(0.001, 0.002))
        return KafkaStreamProducer(Settings.model_validate({"kafka": kafka}), limits)

    def value(self, item: Any) -> str:
        return str(item[0].value.decode())

    async def unfinished(self) -> int:
        found = await asyncio.to_thread(committed_offsets, self.broker.bootstrap, self.topic, self.topic)
        return self.sent - sum(max(offset, 0) for offset in found.values())

    async def refused(self) -> list[str]:
        found = await asyncio.to_thread(consume, self.broker.bootstrap, f"{self.topic}_dlq", 1)
        return [str(decode_letter(message.value()).sources[0].value) for message in found]


class TestKafka(ProducerContract):
    @pytest.fixture
    async def place(self, embedded_kafka: Any) -> KafkaPlace:
        return KafkaPlace(embedded_kafka)


class SqsPlace(AckPlace):
    """A FIFO queue, whose lanes are message groups, and a queue for what is rejected."""

    def __init__(self, server: SqsServer, queue: str, reject_queue: str) -> None:
        self.server = server
        self.queue = queue
        self.reject_queue = reject_queue

    async def put(self, lane: str, *values: str) -> None:
        for value in values:
            await self.server.send(self.queue, value, group=lane)

    def make(self) -> SqsStreamProducer:
        return sqs_stream(
            self.queue,
            reject_queue=self.reject_queue,
            region="eu-central-1",
            endpoint_url=self.server.url,
            visibility_seconds=2,
            wait_seconds=1,
        )

    def value(self, item: Any) -> str:
        return str(item[0].body)

    async def unfinished(self) -> int:
        return await self.server.count(self.queue)

    async def refused(self) -> list[str]:
        return [message["Body"] for message in await self.server.read(self.reject_queue)]


class TestSqs(ProducerContract):
    @pytest.fixture
    async def place(self, sqs_server: SqsServer) -> SqsPlace:
        return SqsPlace(sqs_server, await sqs_server.make_queue(fifo=True), await sqs_server.make_queue(fifo=True))


class DirectoryPlace(Place):
    """A folder, as a trigger sees it: what is there, then what is new."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.count = 0

    async def put(self, lane: str, *values: str) -> None:
        for value in values:
            # Names are in no order; the age of the files is.
            path = self.folder / f"{lane}-{os.urandom(4).hex()}"
            path.write_text(value)
            self.count += 1
            os.utime(path, ns=(self.count, self.count))

    def open(self) -> Pulled:
        trigger = DirectoryTrigger(self.folder, settle_seconds=0.2)
        source = trigger.run()

        async def close() -> None:
            await source.aclose()  # type: ignore[attr-defined]

        return Pulled(source, close)

    def value(self, item: Any) -> str:
        return Path(item.payload["path"]).read_text()


class TestDirectory(StreamContract):
    @pytest.fixture
    async def place(self, tmp_path: Path) -> DirectoryPlace:
        return DirectoryPlace(tmp_path)
