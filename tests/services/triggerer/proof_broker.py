"""A broker in memory for the proof of the host: a topic, its commits and its dead letters, which outlive every reader.

The producer over it is the Kafka one; only what it reads from and writes to stands here. Each offset is noted when it
is given and when it is first covered by a commit, by its floor or by its note, in ticks that order all that happens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from tidemill.config.settings import Settings
from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.core.streams.offset_metadata import decode_metadata
from tidemill.core.streams.redelivery_items import RedeliveryLimits
from tidemill.deadletters.letter import Letter
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sources.base import CommitStatus, Fatal, Records, SourceEvents, SourceStatistics, TopicPartition
from tidemill.triggers.producers.kafka import KafkaStreamProducer

TOPIC = "proof"
MAX_REDELIVERIES = 2
_SETTINGS = Settings.model_validate({"kafka": {"brokers": "nowhere:1", "source_topic": TOPIC, "consumer_group": "g"}})
_LIMITS = RedeliveryLimits(max_redeliveries=MAX_REDELIVERIES, backoff=Backoff(0.001, 0.05))


class Broker:
    """A topic of numbers.

    Args:
        rng: Decides how it answers.
        lanes: How many partitions it has.
        tick: Numbers what happens.
        on_covered: Called with the numbers that a commit covers for the first time.
    """

    def __init__(
        self, rng: random.Random, lanes: int, tick: Callable[[], int], on_covered: Callable[[list[int]], None]
    ) -> None:
        self.rng = rng
        self.tick = tick
        self.on_covered = on_covered
        self.lanes: dict[TopicPartition, list[SourceMessage]] = {(TOPIC, lane): [] for lane in range(lanes)}
        self.ends = dict.fromkeys(self.lanes, 0)
        self.committed: dict[TopicPartition, tuple[int, str]] = dict.fromkeys(self.lanes, (0, ""))
        self.count = 0
        self.place: dict[int, tuple[TopicPartition, int]] = {}
        #: When each number was given, by ticks and in seconds; and when a commit covered it first.
        self.given: dict[int, list[tuple[int, float]]] = {}
        self.covered: dict[int, int] = {}
        #: Letters, and whether they are confirmed; by number.
        self.letters: dict[int, list[Letter]] = {}
        self.confirmed: dict[int, int] = {}
        self.source: Source | None = None
        self.calm = False
        #: How often a poll is to raise before it has begun.
        self.refusals = 0
        self.opened = 0

    def feed(self, lane: int) -> int:
        """Write the next number; now and then an offset before it does not exist."""
        where = (TOPIC, lane)
        n = self.count
        self.count += 1
        offset = self.ends[where] + (self.rng.random() < 0.1)
        self.ends[where] = offset + 1
        message = SourceMessage(TOPIC, lane, offset, value=str(n).encode())
        self.lanes[where].append(message)
        self.place[n] = where, offset
        if self.source is not None:
            self.source.arrive(message)
        return n

    @property
    def lag(self) -> int:
        """How many offsets are above the floors."""
        return sum(self.ends[lane] - floor for lane, (floor, _) in self.committed.items() if self.lanes[lane])

    def take(self, lane: TopicPartition, floor: int, note: str) -> None:
        """Take a commit."""
        before, _ = self.committed[lane]
        assert before <= floor <= self.ends[lane], f"the floor of {lane} moves from {before} to {floor}"
        self.committed[lane] = (floor, note)
        past = decode_metadata(lane, note)
        assert not note or past is not None, f"a note cannot be read: {note!r}"
        clean = past.clean if past is not None else ()
        tick, new = self.tick(), []
        for message in self.lanes[lane]:
            n = int(message.value or b"")
            if n in self.covered:
                continue
            if message.offset < floor or any(start <= message.offset < end for start, end in clean):
                self.covered[n] = tick
                new.append(n)
        if new:
            self.on_covered(new)

    def producer(self) -> KafkaStreamProducer:
        """Make what a stream reads with."""
        loop = asyncio.get_running_loop()
        return _Producer(self, _SETTINGS, _LIMITS, source=Source(self), letters=Letters(self), clock=loop.time)


class _Producer(KafkaStreamProducer):
    def __init__(self, broker: Broker, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.broker = broker

    async def open_stream(self) -> AsyncIterator[Any]:
        broker = self.broker
        broker.opened += 1
        if broker.refusals:
            broker.refusals -= 1
            raise RemoteError("the broker cannot be reached")
        loop = asyncio.get_running_loop()
        async for message, delivery in super().open_stream():
            broker.given.setdefault(int(message.value or b""), []).append((broker.tick(), loop.time()))
            yield message, delivery


class Source:
    """What one producer reads with; the next one to start fences it."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.fenced = False
        self.closed = False
        self._answered_at = 0.0
        self._generation = 0
        self._next: dict[TopicPartition, int] = {}
        self._notes: dict[TopicPartition, str] = {}
        self._noted: dict[TopicPartition, str] = {}
        self._events: SourceEvents | None = None

    @property
    def live(self) -> bool:
        return self._events is not None and not self.closed and not self.fenced

    def start(self, events: SourceEvents) -> None:
        self._events = events
        broker = self.broker
        if broker.source is not None and broker.source.live:
            broker.source.fence()
        broker.source = self
        asyncio.get_running_loop().call_soon(self.assign, list(broker.lanes))

    def assign(self, lanes: Sequence[TopicPartition]) -> None:
        if not self.live:
            return
        for lane in lanes:
            floor, note = self.broker.committed[lane]
            self._noted[lane] = note
            self._notes.pop(lane, None)
            messages = self.broker.lanes[lane]
            self._next[lane] = next((i for i, one in enumerate(messages) if one.offset >= floor), len(messages))
        assert self._events is not None
        self._events.on_assigned(list(lanes))

    def arrive(self, message: SourceMessage) -> None:
        if self.live and self._events is not None and (message.topic, message.partition) in self._next:
            self._events.on_messages(self.broker.lanes)

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        if partition not in self._next or not self.live:
            return []
        first = self._next[partition]
        found = self.broker.lanes[partition][first : first + limit]
        self._next[partition] = first + len(found)
        return found

    def buffered(self, partition: TopicPartition) -> int:
        return 0

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        return None

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        rng = self.broker.rng
        status = CommitStatus.AGAIN if not self.broker.calm and rng.random() < 0.1 else CommitStatus.DONE
        given = {lane: (floor, self._notes.get(lane, "")) for lane, floor in offsets.items()}
        loop = asyncio.get_running_loop()
        # In their order.
        self._answered_at = max(self._answered_at + 1e-6, loop.time() + rng.choice([0.0, 0.001, 0.02]))
        loop.call_at(self._answered_at, self._answer, given, status, self._generation)

    def _answer(self, given: dict[TopicPartition, tuple[int, str]], status: CommitStatus, generation: int) -> None:
        if self.fenced or self.closed or self._events is None:
            return
        if generation != self._generation:
            status = CommitStatus.AGAIN
        if status is CommitStatus.DONE:
            for lane, (floor, note) in given.items():
                if lane in self._next:
                    self.broker.take(lane, floor, note)
        self._events.on_committed({lane: floor for lane, (floor, _) in given.items()}, status)

    def note(self, partition: TopicPartition, text: str) -> None:
        self._notes[partition] = text

    def noted(self, partition: TopicPartition) -> str:
        return self._noted.get(partition, "")

    async def rebalance(self, lanes: Sequence[TopicPartition], *, lost: bool) -> None:
        """Take lanes away, and give them back a moment later."""
        if not self.live or self._events is None or any(lane not in self._next for lane in lanes):
            return
        self._generation += 1
        for lane in lanes:
            del self._next[lane]
        if lost:
            self._events.on_lost(lanes)
        else:
            for lane, floor in (await self._events.on_revoked(lanes)).items():
                self.broker.take(lane, floor, self._notes.get(lane, ""))
        await asyncio.sleep(0.01)
        self.assign(lanes)

    def fence(self) -> None:
        self.fenced = True
        assert self._events is not None
        self._events.on_fatal(Fatal.FENCED, "another process uses this member's id")

    def fail(self) -> None:
        """Let the poll raise."""
        if self.live and self._events is not None:
            self._events.on_fatal(Fatal.FAILED, "the broker does not answer")

    def stop_fetching(self) -> None:
        self._next.clear()

    def statistics(self) -> SourceStatistics:
        return SourceStatistics(0, {})

    def describe_wait(self) -> str | None:
        return None

    def describe_refusal(self) -> str | None:
        return None

    async def close(self, *, leave: bool) -> None:
        await asyncio.sleep(0)
        self.closed = True
        if self.broker.source is self:
            self.broker.source = None


class Letters:
    """The dead-letter topic, which takes its time."""

    written = dropped = 0

    def __init__(self, broker: Broker) -> None:
        self.broker = broker

    async def open(self) -> None:
        return

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        broker = self.broker
        [source] = letter.sources
        n = int(str(source.value))
        seconds = broker.rng.choice([0.0, 0.001, 0.05, 0.0 if broker.calm else 2.0])

        def confirm() -> None:
            broker.letters.setdefault(n, []).append(letter)
            broker.confirmed.setdefault(n, broker.tick())
            done()

        asyncio.get_running_loop().call_later(seconds, confirm)

    def describe_wait(self) -> str | None:
        return None

    async def close(self) -> None:
        return
