"""Statistics of the list that a process runs, over all of its sessions, for metrics, pages and recordings.

A `ListHost` belongs to one session; the book outlives it, so that no counter goes back when a list changes hands.
Everything belongs to one event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tidemill.runtime.loop.durations import Durations
from tidemill.services.triggerer.hosting.stream_keys import StreamNames
from tidemill.services.triggerer.hosting.trigger_book import TriggerBook
from tidemill.triggers.shared_stream import SharedStreamManager, StreamCounts


def _look_at_nothing(manager: SharedStreamManager) -> None:
    pass


@dataclass(slots=True)
class HostBook:
    """Statistics about streams, triggers and the event loop.

    Attributes:
        counts: Counters of stream events.
        lags: How late the event loop was.
        names: The display names of streams.
        triggers: The state and history of each trigger.
        look: Called about once a second with the streams, on the loop.
        is_started: Whether all triggers of the list have been started in this session.
    """

    counts: StreamCounts = field(default_factory=StreamCounts)
    lags: Durations = field(default_factory=Durations)
    names: StreamNames = field(default_factory=StreamNames)
    triggers: TriggerBook = field(default_factory=TriggerBook)
    look: Callable[[SharedStreamManager], None] = _look_at_nothing
    is_started: bool = False
