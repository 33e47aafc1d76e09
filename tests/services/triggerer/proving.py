"""Triggers that a host runs in the proofs: they note what they are given, are slow, and fail where they are told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill.config.settings import Settings
from tidemill.core.retry import Backoff
from tidemill.core.streams.redelivery_items import RedeliveryLimits
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.producers.kafka import KafkaStreamProducer, kafka_stream
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamProducer


def _note(path: str, what: str, who: str, number: int) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, f"{what} {who} {number}\n".encode())
    os.close(fd)


def _note_clean(producer: SharedStreamProducer, path: str) -> None:
    """Let a producer note which messages it was told to be clean."""
    advance = producer.advance

    async def noting(batch: Sequence[AdvanceItem]) -> None:
        for delivery, outcome in batch:
            if outcome.is_clean:
                _note(path, "clean", "producer", int(delivery.held.value))
        await advance(batch)

    producer.advance = noting  # type: ignore[method-assign]


class Noting(BaseEventTrigger):
    """Fires for messages whose number a modulus divides.

    Args:
        brokers: Where from.
        topic: And what; its name is the group's, too.
        modulo: Which.
        identity: Whether its events have one.
        pause: How many seconds it takes for each.
        notes: The file in which it notes what it is given, and what it is done with.
        late_every: Of which messages it is late the first time, by number; 0: of none.
        late_seconds: By how much.
    """

    def __init__(
        self,
        brokers: str,
        topic: str,
        modulo: int,
        identity: bool = True,
        pause: float = 0.0,
        notes: str = "",
        late_every: int = 0,
        late_seconds: float = 0.0,
    ) -> None:
        super().__init__()
        self.kwargs = {
            "brokers": brokers, "topic": topic, "modulo": modulo, "identity": identity, "pause": pause, "notes": notes,
            "late_every": late_every, "late_seconds": late_seconds,
        }  # fmt: skip
        self.modulo, self.identity, self.pause, self.notes = modulo, identity, pause, notes
        self.late_every, self.late_seconds = late_every, late_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.proving.Noting", self.kwargs

    def shared_stream_key(self) -> Any:
        return (self.kwargs["brokers"], self.kwargs["topic"])

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        producer = kafka_stream(kwargs["brokers"], kwargs["topic"], kwargs["topic"])
        if kwargs["notes"]:
            _note_clean(producer, kwargs["notes"])
        return producer

    def note(self, what: str, number: int) -> None:
        if self.notes:
            _note(self.notes, what, self.trigger_id, number)

    def late(self, number: int) -> bool:
        if not self.late_every or number % self.late_every:
            return False
        with open(self.notes) as notes:
            return f"late {self.trigger_id} {number}\n" not in notes.read()

    async def filter_shared_stream(self, shared_stream: AsyncIterator[SourceMessage]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            number = int(message.value or b"")
            self.note("given", number)
            if self.pause:
                await asyncio.sleep(self.pause)
            if self.late(number):
                self.note("late", number)
                await asyncio.sleep(self.late_seconds)
                continue
            if number % self.modulo == 0:
                place = f"{message.partition}/{message.offset}"
                yield TriggerEvent(
                    {"number": number, "partition": message.partition, "offset": message.offset},
                    identity=place if self.identity else None,
                )
            self.note("done", number)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield


class Trying(BaseEventTrigger):
    """Fires for messages whose number a modulus divides; slow, ends too soon, or raises, as it is told.

    Args:
        brokers: Where from.
        topic: And what; its name is the group's, too.
        notes: The file in which it notes what it raises on, before it does.
        modulo: For which messages it fires.
        pause: How many seconds it takes for each.
        ends: Whether it ends after each event that it has fired.
        raise_every: On which messages it raises, by number; 0: on none.
        raise_always_every: On which of these it raises whenever it is given them; on the others only the first time.
        version: Changes nothing but that it is another trigger than that of another version.
    """

    #: How often a message is redelivered before it is dead-lettered.
    MAX_REDELIVERIES = 2

    def __init__(
        self,
        brokers: str,
        topic: str,
        notes: str,
        modulo: int = 1,
        pause: float = 0.0,
        ends: bool = False,
        raise_every: int = 0,
        raise_always_every: int = 0,
        version: int = 0,
    ) -> None:
        super().__init__()
        self.kwargs = {
            "brokers": brokers, "topic": topic, "notes": notes, "modulo": modulo, "pause": pause, "ends": ends,
            "raise_every": raise_every, "raise_always_every": raise_always_every, "version": version,
        }  # fmt: skip
        self.notes, self.modulo, self.pause, self.ends = notes, modulo, pause, ends
        self.raise_every, self.raise_always_every = raise_every, raise_always_every

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.proving.Trying", self.kwargs

    def shared_stream_key(self) -> Any:
        return (self.kwargs["brokers"], self.kwargs["topic"])

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        kafka = {"brokers": kwargs["brokers"], "source_topic": kwargs["topic"], "consumer_group": kwargs["topic"]}
        limits = RedeliveryLimits(max_redeliveries=cls.MAX_REDELIVERIES, backoff=Backoff(0.01, 0.1))
        return KafkaStreamProducer(Settings.model_validate({"kafka": kafka}), limits)

    def fail(self, number: int) -> None:
        if not self.raise_every or number % self.raise_every:
            return
        if number % self.raise_always_every:
            with open(self.notes) as notes:
                if f"raised {self.trigger_id} {number}\n" in notes.read():
                    return
        _note(self.notes, "raised", self.trigger_id, number)
        raise ValueError(f"{number} is not to my taste")

    async def filter_shared_stream(self, shared_stream: AsyncIterator[SourceMessage]) -> AsyncIterator[TriggerEvent]:
        async for message in shared_stream:
            number = int(message.value or b"")
            if self.pause:
                await asyncio.sleep(self.pause)
            self.fail(number)
            if number % self.modulo == 0:
                place = {"number": number, "partition": message.partition, "offset": message.offset, "pid": os.getpid()}
                yield TriggerEvent(place, identity=f"{message.partition}/{message.offset}")
                if self.ends:
                    return

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield
