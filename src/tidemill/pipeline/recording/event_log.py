"""Buffers an engine's events until they are sent: cleaned, and limited in number with exact counts of omitted ones.

`add` may be called from any thread; everything else from the engine's loop. Invariant: an added event can be encoded,
whatever users put into it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from tidemill.core.recorder.failure_sample import FailureSample
from tidemill.recorder.format.events import ORDINARY, EventKind, RecordedEvent
from tidemill.recorder.format.recordable_text import classify_error, clean_error, clean_name
from tidemill.recorder.format.schema import MAX_BODY_BYTES

#: This many failures per second are recorded individually.
MAX_PER_SECOND = 1_000
#: While this many events wait, only the first message of a letter gets an event.
MAX_WAITING = 5_000
#: Kinds that may occur in any number; the others are rare by nature, and must not be crowded out.
_SAMPLED = frozenset(
    {
        EventKind.TASK_FAILED,
        EventKind.TASK_RETRY,
        EventKind.TASK_REPLACED,
        EventKind.DEAD_LETTERED,
        EventKind.PERIODIC_RUN,
    }
)

_encode = msgspec.msgpack.Encoder().encode


class EngineEventLog:
    """The events of one engine.

    Args:
        clock: A monotonic clock, in seconds.
        kinds: The kinds to record; others are ignored.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, kinds: frozenset[EventKind] = frozenset(EventKind)
    ) -> None:
        self._kinds = kinds
        self._clock = clock
        self._sample = FailureSample(MAX_PER_SECOND)
        self._events: deque[RecordedEvent] = deque()

    def add(
        self,
        kind: EventKind,
        text: str = "",
        *,
        partition: tuple[str, int] | None = None,
        offset: int | None = None,
        task_id: str | None = None,
        sink: str | None = None,
        data: dict[str, str | int | float] | None = None,
        others: Sequence[tuple[str, int, int]] = (),
    ) -> None:
        """Add an event with the current time.

        Args:
            kind: The kind of event.
            text: The error or the reason.
            partition: Topic and partition.
            offset: The offset of the message.
            task_id: The task.
            sink: The sink's key in the configuration.
            data: Other facts.
            others: More messages of the event, by topic, partition and offset. Each gets an event of its own that does
                not count as a failure; they are omitted while too many events wait.
        """
        if kind not in self._kinds:
            return
        error_class = classify_error(text) if text and kind not in ORDINARY else ""
        if kind in _SAMPLED and not self._sample.admits(self._clock(), kind, error_class):
            return
        event = RecordedEvent(
            time.time_ns() // 1000,
            kind,
            clean_name(partition[0]) if partition is not None else None,
            partition[1] if partition is not None else None,
            offset,
            clean_name(task_id) if task_id is not None else None,
            clean_name(sink) if sink is not None else None,
            clean_error(text),
            error_class,
            {name: clean_error(fact) if isinstance(fact, str) else fact for name, fact in (data or {}).items()},
        )
        self._events.append(event)
        for topic, number, position in others[: max(0, MAX_WAITING - len(self._events))]:
            other = msgspec.structs.replace(
                event, topic=clean_name(topic), partition=number, offset=position, error_class=""
            )
            self._events.append(other)

    def take(self, *, last: bool = False) -> Iterator[tuple[bytes, int]]:
        """Yield the events added since the last call as encoded bodies, each with its number of events.

        Args:
            last: Include the counts of the current second.
        """
        counts = self._sample.take_last_counts() if last else self._sample.take_counts(self._clock())
        now = time.time_ns() // 1000
        for (kind, error_class), count in counts.items():
            event = RecordedEvent(now, EventKind(kind), error_class=error_class, data={"count": count})
            self._events.append(event)
        encoded: list[msgspec.Raw] = []
        size = 0
        for _ in range(len(self._events)):
            event_bytes = _encode(self._events.popleft())
            if size + len(event_bytes) > MAX_BODY_BYTES and encoded:
                yield _encode(encoded), len(encoded)
                encoded, size = [], 0
            encoded.append(msgspec.Raw(event_bytes))
            size += len(event_bytes)
        if encoded:
            yield _encode(encoded), len(encoded)
