"""All slots of a pipeline: when each may begin, and how the end of one affects the others.

At the first start, slot 0 finishes `on_ready` before the others begin theirs, so that migrations do not race. Then all
subscribe together, and none takes a message before all have partitions: the first member of the group gets all
partitions, and would have to finish the messages it took before it could hand over a share. Slow slots are waited for
until `HOLD_SECONDS` after slot 0 was ready. Later starts are not delayed. The pipeline runs until a drain is requested,
or until a slot finishes by itself: then the others are drained, and the pipeline ends for the same reason.

Invariants: no slot other than 0 begins before an engine of slot 0 was ready; none begins or continues after a drain was
requested; `Consume` occurs at most once, and engines are held until then and never again; `RunFinished` occurs once,
after the last slot has finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.supervision.slot_events import EngineEnding


@dataclass(frozen=True, slots=True)
class PrepareSlot:
    """Let the engine of this slot connect its sinks and run `on_ready`."""

    slot: int


@dataclass(frozen=True, slots=True)
class SubscribeSlot:
    """Let the engine of this slot subscribe."""

    slot: int


@dataclass(frozen=True, slots=True)
class Consume:
    """Let the engines of all slots take messages; see `SlotGroup.holding`."""


@dataclass(frozen=True, slots=True)
class DrainSlot:
    """Ask this slot to drain, whether it has begun or not."""

    slot: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    """All slots are finished.

    Attributes:
        ending: `DRAINED` if no slot failed, else the ending of the slot that failed first.
        slot: The slot that failed first.
        error: Its error.
    """

    ending: EngineEnding
    slot: int | None = None
    error: str | None = None


Effect = PrepareSlot | SubscribeSlot | Consume | DrainSlot | RunFinished

#: How long after slot 0 is ready the engines of the first start wait for each other.
HOLD_SECONDS = 5.0

#: The endings of a slot that stopped as requested.
_CLEAN = (EngineEnding.DRAINED, EngineEnding.ABSENT)


class SlotGroup:
    """The slots of one pipeline.

    Args:
        slots: The number of slots, at least 1.
        partitions: The number of partitions of the topic, which bounds the number of slots that can own one; None: as
            many as slots.
    """

    def __init__(self, slots: int, partitions: int | None = None) -> None:
        self._unfinished = set(range(slots))
        self._count = slots
        self._expected_owners = min(slots, slots if partitions is None else partitions)
        #: Slots whose engine waits for slot 0; None once slot 0 was ready.
        self._waiting: set[int] | None = set()
        #: Slots that wait to subscribe together with the others; None once they were allowed to.
        self._held: set[int] | None = set()
        self._owners: set[int] = set()
        self._holding = slots > 1
        #: The latest time at which engines are released; None until slot 0 is ready.
        self._release_at: float | None = None
        self._draining = False
        self._failure: RunFinished | None = None

    @property
    def holding(self) -> bool:
        """Whether engines do not take messages yet; meaningless for engines that drain."""
        return self._holding

    @property
    def due(self) -> float | None:
        """The time of the next call to `tick`; None: never."""
        return self._release_at if self._holding and not self._draining else None

    @property
    def draining(self) -> bool:
        """Whether the pipeline is stopping."""
        return self._draining

    def note_connected(self, slot: int) -> list[Effect]:
        """Record that an engine of a slot was admitted, for the first time or again."""
        if self._draining:
            return []
        if slot == 0 or self._waiting is None:
            return [PrepareSlot(slot)]
        self._waiting.add(slot)
        return []

    def note_ready(self, slot: int, now: float) -> list[Effect]:
        """Record that an engine finished `on_ready`; after the one of slot 0, the other slots may begin.

        Args:
            slot: The slot of the engine.
            now: Seconds of a monotonic clock.
        """
        if self._draining:
            return []
        effects: list[Effect] = []
        if slot == 0 and self._waiting is not None:
            effects += [PrepareSlot(other) for other in sorted(self._waiting)]
            self._waiting = None
            self._release_at = now + HOLD_SECONDS
        if self._held is None:
            return [*effects, SubscribeSlot(slot)]
        self._held.add(slot)
        return effects + (self._let_subscribe() if len(self._held) == self._count else [])

    def note_partitions(self, slot: int) -> list[Effect]:
        """Record that an engine of a slot has partitions."""
        if self._draining or not self._holding:
            return []
        self._owners.add(slot)
        return self._let_consume() if len(self._owners) >= self._expected_owners else []

    def tick(self, now: float) -> list[Effect]:
        """Stop waiting for slow slots once their time is over."""
        if self.due is None or now < self.due:
            return []
        return self._let_subscribe() + self._let_consume()

    def _let_subscribe(self) -> list[Effect]:
        together, self._held = self._held or (), None
        return [SubscribeSlot(slot) for slot in sorted(together)]

    def _let_consume(self) -> list[Effect]:
        self._holding = False
        return [Consume()]

    def note_finished(self, slot: int, ending: EngineEnding, error: str | None = None) -> list[Effect]:
        """Record that a slot is finished; repetitions change nothing."""
        if slot not in self._unfinished:
            return []
        self._unfinished.remove(slot)
        if ending not in _CLEAN and self._failure is None:
            self._failure = RunFinished(ending, slot, error)
        effects = self.drain()
        if not self._unfinished:
            effects.append(self._failure or RunFinished(EngineEnding.DRAINED))
        return effects

    def drain(self) -> list[Effect]:
        """Stop the pipeline; repetitions change nothing."""
        if self._draining:
            return []
        self._draining = True
        return [DrainSlot(slot) for slot in sorted(self._unfinished)]
