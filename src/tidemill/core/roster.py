"""The slots of a pipeline together: which may begin, and what the end of one means for the others.

At the first start slot 0 finishes `on_ready` before the others begin theirs, so that migrations do not race; and
those that are there by then subscribe together, because a member that joins a group later waits for a rebalance,
of which the others hear only with their next heartbeat. Later starts are not held up. The pipeline runs until a
drain is asked for or until one slot finishes for a reason of its own: then the others are drained, and the
pipeline ends for that reason.

Invariants: no slot but 0 begins before an engine of slot 0 was ready; none begins or goes on after a drain
was asked for; `RunFinished` comes once, after the last slot finished.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.slot_events import Ending


@dataclass(frozen=True, slots=True)
class Begin:
    """Let the engine of this slot connect its sinks and run `on_ready`."""

    slot: int


@dataclass(frozen=True, slots=True)
class Go:
    """Let the engine of this slot subscribe."""

    slot: int


@dataclass(frozen=True, slots=True)
class DrainSlot:
    """Ask this slot to drain, whether it has begun or not."""

    slot: int


@dataclass(frozen=True, slots=True)
class RunFinished:
    """All slots are finished.

    Attributes:
        ending: `DRAINED` if all went well, else that of the slot that failed first.
        slot: Which slot that was.
        error: What it said.
    """

    ending: Ending
    slot: int | None = None
    error: str | None = None


Effect = Begin | Go | DrainSlot | RunFinished

#: A slot that ended so did so because it was asked to.
_CLEAN = (Ending.DRAINED, Ending.ABSENT)


class Roster:
    """The slots of one pipeline.

    Args:
        slots: How many there are, at least 1.
    """

    def __init__(self, slots: int) -> None:
        """Start with no slot begun."""
        self._unfinished = set(range(slots))
        #: Slots with an engine that waits for slot 0; None once that was ready.
        self._waiting: set[int] | None = set()
        #: Slots that are to subscribe together: those not ready yet, and those that wait for them.
        self._getting_ready: set[int] = set()
        self._held: list[int] = []
        self._draining = False
        self._failure: RunFinished | None = None

    @property
    def draining(self) -> bool:
        """Whether the pipeline is stopping."""
        return self._draining

    def connected(self, slot: int) -> list[Effect]:
        """Note that an engine of a slot was admitted, for the first time or again."""
        if self._draining:
            return []
        if slot == 0 or self._waiting is None:
            return [Begin(slot)]
        self._waiting.add(slot)
        return []

    def ready(self, slot: int) -> list[Effect]:
        """Note that an engine of a slot finished `on_ready`; slot 0 lets the others begin by that."""
        if self._draining:
            return []
        if slot == 0 and self._waiting:
            self._getting_ready, self._waiting = self._waiting, None
            self._held.append(slot)
            return [Begin(other) for other in sorted(self._getting_ready)]
        if slot == 0:
            self._waiting = None
        if slot not in self._getting_ready:
            return [Go(slot)]
        self._getting_ready.remove(slot)
        self._held.append(slot)
        if self._getting_ready:
            return []
        together, self._held = self._held, []
        return [Go(other) for other in together]

    def finished(self, slot: int, ending: Ending, error: str | None = None) -> list[Effect]:
        """Note that a slot is finished; a repetition changes nothing."""
        if slot not in self._unfinished:
            return []
        self._unfinished.remove(slot)
        if ending not in _CLEAN and self._failure is None:
            self._failure = RunFinished(ending, slot, error)
        effects = self.drain()
        if not self._unfinished:
            effects.append(self._failure or RunFinished(Ending.DRAINED))
        return effects

    def drain(self) -> list[Effect]:
        """Stop the pipeline; a repetition changes nothing."""
        if self._draining:
            return []
        self._draining = True
        return [DrainSlot(slot) for slot in sorted(self._unfinished)]
