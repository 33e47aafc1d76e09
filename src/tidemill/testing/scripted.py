"""Test doubles: a source, a sink and dead letters that follow the script of a test and record what happened."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tidemill.deadletters.letter import Letter
from tidemill.deadletters.writer import LetterStatistics
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Encoded, Refusal, Sink, encode_checked, to_json
from tidemill.sinks.fields import check_choices
from tidemill.sources.base import CommitStatus, Fatal, Outgoing, Records, SourceEvents, SourceStatistics, TopicPartition


class ScriptedSource:
    """A source with given messages; commits are confirmed at once unless the test says otherwise.

    Args:
        messages: The messages that can be read, in order per partition.
        on_committed: Called after each confirmed commit.
    """

    def __init__(
        self,
        messages: Iterable[SourceMessage] = (),
        on_committed: Callable[[Mapping[TopicPartition, int]], None] | None = None,
    ) -> None:
        self._buffers: dict[TopicPartition, deque[SourceMessage]] = {}
        self._on_committed = on_committed
        self._fetching = True
        #: All requested commits, in order.
        self.commits: list[dict[TopicPartition, int]] = []
        #: The records to send with each commit, in order.
        self.records: list[dict[TopicPartition, Sequence[Outgoing]]] = []
        #: The last confirmed offset per partition.
        self.committed: dict[TopicPartition, int] = {}
        #: The status for each of the next commits; DONE when it is empty.
        self.answers: deque[CommitStatus] = deque()
        #: While True, commits get no response until `answer()` is called.
        self.hold_commits = False
        self._held: list[dict[TopicPartition, int]] = []
        self.left: bool | None = None
        #: The last text stored with a partition's offsets; `noted` returns it at the next assignment.
        self.notes: dict[TopicPartition, str] = {}
        for message in messages:
            self._buffers.setdefault((message.topic, message.partition), deque()).append(message)

    @property
    def partitions(self) -> list[TopicPartition]:
        """The partitions that have messages."""
        return list(self._buffers)

    def start(self, events: SourceEvents) -> None:
        """Assign every partition."""
        self.events = events
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(events.on_assigned, self.partitions)

    def feed(self, *messages: SourceMessage) -> None:
        """Add messages to assigned partitions."""
        for message in messages:
            self._buffers.setdefault((message.topic, message.partition), deque()).append(message)
        self.events.on_messages({(message.topic, message.partition) for message in messages})

    def pull(self, partition: TopicPartition, limit: int) -> list[SourceMessage]:
        """Remove messages from the partition's buffer and return them."""
        buffer = self._buffers.get(partition, deque())
        return [buffer.popleft() for _ in range(min(limit, len(buffer)))] if self._fetching else []

    def buffered(self, partition: TopicPartition) -> int:
        """Return the number of buffered messages."""
        return len(self._buffers.get(partition, ())) if self._fetching else 0

    def peek(self, partition: TopicPartition) -> SourceMessage | None:
        """Return the next message without removing it; None if there is none."""
        return self._buffers[partition][0] if self.buffered(partition) else None

    def commit(self, offsets: Mapping[TopicPartition, int], records: Records | None = None) -> None:
        """Record the commit and its records, and respond as scripted."""
        self.records.append(dict(records or {}))
        self.commits.append(dict(offsets))
        self._held.append(dict(offsets))
        if not self.hold_commits:
            self.answer()

    def note(self, partition: TopicPartition, text: str) -> None:
        """Store a text with the partition's offsets."""
        self.notes[partition] = text

    def noted(self, partition: TopicPartition) -> str:
        """Return the text stored with the partition's offsets."""
        return self.notes.get(partition, "")

    def answer(self) -> None:
        """Respond to all held commits."""
        held, self._held = self._held, []
        for offsets in held:
            status = self.answers.popleft() if self.answers else CommitStatus.DONE
            if status is CommitStatus.DONE:
                self.committed.update(offsets)
            self._loop.call_soon(self._deliver_answer, offsets, status)

    def _deliver_answer(self, offsets: dict[TopicPartition, int], status: CommitStatus) -> None:
        self.events.on_committed(offsets, status)
        if status is CommitStatus.DONE and self._on_committed is not None:
            self._on_committed(offsets)

    async def revoke(self, *partitions: TopicPartition) -> Mapping[TopicPartition, int]:
        """Revoke partitions; return the offsets that the engine wanted committed."""
        for partition in partitions:
            self._buffers.pop(partition, None)
        offsets = await self.events.on_revoked(list(partitions))
        self.committed.update(offsets)
        return offsets

    def lose(self, *partitions: TopicPartition) -> None:
        """Remove partitions without notice, as after a session timeout."""
        for partition in partitions:
            self._buffers.pop(partition, None)
        self.events.on_lost(list(partitions))

    def fence(self) -> None:
        """Fence this member, as if another process used its id."""
        self.events.on_fatal(Fatal.FENCED, "another process uses this member's id")

    def stop_fetching(self) -> None:
        """Stop returning messages."""
        self._fetching = False

    def statistics(self) -> SourceStatistics:
        """Return statistics with the number of buffered messages per partition as the lag."""
        return SourceStatistics(0, {partition: len(buffer) for partition, buffer in self._buffers.items()})

    def describe_wait(self) -> str | None:
        """Return None: a scripted source never waits."""
        return None

    def describe_refusal(self) -> str | None:
        """Return None: no broker refuses a scripted source."""
        return None

    async def close(self, *, leave: bool, seconds: float = 0.0) -> None:
        """Record whether the group was left."""
        self.left = leave


class ScriptedSink(Sink):
    """A sink that stores payloads in memory and refuses those that a test selects.

    Args:
        name: The name of the sink.
        type_name: The sink type that it replaces.
        refuse: Called with each payload; returns a `Refusal` to refuse it, or None.
        real: The sink that it replaces, which encodes every payload but is never connected.
    """

    type = "scripted"
    #: Stands for the connection pool of a PostgreSQL sink; there is no server.
    pool = None

    def __init__(
        self,
        name: str,
        type_name: str = "scripted",
        refuse: Callable[[Any], Refusal | None] = lambda payload: None,
        real: Sink | None = None,
    ) -> None:
        super().__init__(name)
        self.type = type_name  # type: ignore[misc]
        self.refuse = refuse
        self.real = real
        #: The confirmed payloads, in order.
        self.payloads: list[Any] = []
        #: Clear this event to block `send` until it is set again.
        self.open = asyncio.Event()
        self.open.set()
        self.closed = False

    async def connect(self) -> None:
        """Do nothing."""

    def encode(self, payload: Any) -> Encoded:
        """Check that the payload can be encoded, with the real sink if there is one, and return it unchanged."""
        if self.real is not None:
            ready = encode_checked(self.real, payload)
            return Encoded(ready.key, payload, ready.size_bytes)
        check_choices(payload)
        key = getattr(payload, "key", None) or getattr(payload, "path", None)
        return Encoded(key, payload, len(to_json(payload.data, "null")))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Store the payloads that are not refused."""
        await self.open.wait()
        answers = [self.refuse(item.body) for item in batch]
        self.payloads += [item.body for item, refusal in zip(batch, answers, strict=True) if refusal is None]
        return answers

    async def close(self) -> None:
        """Record that the sink was closed."""
        self.closed = True


class ScriptedDeadLetters:
    """Stores letters in memory; each is confirmed in the next iteration of the event loop, unless `hold` is set."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.written = 0
        self.dropped = 0
        self.hold = False
        self.kinds: Counter[str] = Counter()
        self._held: list[Callable[[], None]] = []

    async def open(self) -> None:
        """Do nothing."""

    def put(self, letter: Letter, done: Callable[[], None]) -> None:
        """Store a letter and confirm it."""
        self.letters.append(letter)
        self._held.append(done)
        if not self.hold:
            self.confirm()

    def confirm(self) -> None:
        """Confirm all held letters."""
        held, self._held = self._held, []
        loop = asyncio.get_running_loop()
        for letter, done in zip(self.letters[-len(held) :], held, strict=True) if held else ():
            self.written += 1
            self.kinds[letter.kind.value] += 1
            loop.call_soon(done)

    def statistics(self) -> LetterStatistics:
        """Return the numbers of confirmed and dropped letters."""
        return LetterStatistics(self.written, self.kinds, self.dropped)

    def describe_wait(self) -> str | None:
        """Return why letters are waiting; None if they are not."""
        return "held by the test" if self._held else None

    async def close(self) -> None:
        """Do nothing."""
