"""The progress of a task through the events of a stream, and whether it can go on.

Events are numbered from 0. A task that waits for the next event goes on if its stream is `ready`; an attempt that
leaves its worker while it is `ready` is resumed at once (`StreamIdle.ready`).
"""

from __future__ import annotations

from typing import NamedTuple


class StreamProgress(NamedTuple):
    """The events of a stream.

    Attributes:
        next_index: The number of events that its trigger has fired.
        handled: The number of events that attempts have handled, or that were discarded.
        ended: Whether no event follows.
        ends_at: The index of the event that ends the task, which is not delivered; None: there is none.
        carried: The number of events of earlier streams of the task that are delivered first.
    """

    next_index: int = 0
    handled: int = 0
    ended: bool = False
    ends_at: int | None = None
    carried: int = 0

    @property
    def last(self) -> int:
        """The number of events to deliver."""
        return self.next_index if self.ends_at is None else self.ends_at

    @property
    def undelivered(self) -> int:
        """The number of events of this stream that were not handled."""
        return max(self.last - self.handled, 0)

    @property
    def has_events(self) -> bool:
        """Whether an attempt gets an event."""
        return self.undelivered > 0 or self.carried > 0

    @property
    def ready(self) -> bool:
        """Whether an attempt gets an event or the end of the stream."""
        return self.has_events or self.ended
