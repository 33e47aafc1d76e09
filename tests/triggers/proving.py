"""Triggers that a host runs in the proofs: they note what they are given, are slow, and fail where they are told to."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill.runtime.messages import SourceMessage
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.producers.kafka import kafka_stream
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
        return "tests.triggers.proving.Noting", self.kwargs

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
