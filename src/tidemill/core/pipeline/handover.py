"""Decides which messages of a revoked lane are dropped at once, and which are finished before the lane is given up.

Only the contiguous resolved prefix of a lane can be committed. The first message with work that has not started (a
window not arranged, a task queued, parked or in backoff) is therefore the *cut*: it and everything after it is
redelivered to the next owner in any case. Only unresolved messages before the cut are waited for; all their work is
running, including hooks and deliveries. If one of their tasks fails and would have to be retried, the cut moves down to
its message.

Invariants: the cut only falls; the set of awaited messages only shrinks; no message at or after the cut is ever waited
for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable


class Handover:
    """One lane that is being handed over to its next owner.

    Args:
        unresolved: The offsets of all messages that have not left the pipeline.
        unstarted: The offsets among them with work that has not started.

    Example:
        >>> handover = Handover(unresolved=[3, 5, 8, 9], unstarted=[8])
        >>> handover.left
        2
        >>> handover.note_resolved(3)
        >>> handover.note_withdrawn([5])
        >>> handover.left
        0
    """

    __slots__ = ("_cut", "_waited")

    def __init__(self, unresolved: Iterable[int], unstarted: Iterable[int]) -> None:
        self._cut: float = min(unstarted, default=math.inf)
        self._waited = {offset for offset in unresolved if offset < self._cut}

    @property
    def left(self) -> int:
        """The number of messages that are still waited for."""
        return len(self._waited)

    def note_resolved(self, offset: int) -> None:
        """Record that a message has left the pipeline."""
        self._waited.discard(offset)

    def note_withdrawn(self, offsets: Iterable[int]) -> None:
        """Record that work for these messages would have to be started or retried here, so they are left to the next
        owner.
        """
        lowest = min(offsets, default=math.inf)
        if lowest < self._cut:
            self._cut = lowest
            self._waited = {offset for offset in self._waited if offset < lowest}
