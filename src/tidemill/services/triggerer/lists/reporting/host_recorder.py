"""Feeds a trigger host's recording: changes of triggers, incidents of streams, counts per second and lane.

Invariants: calls from the loop neither wait nor raise. Above `_PER_SECOND` incidents a second only a sample is stored,
and all of them are counted by their error class. Of lanes, only numbers reach the writer's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

from tidemill.core.recorder.failure_sample import FailureSample
from tidemill.recorder.format.counts import Counts, LaneCounts, name_stream_lane
from tidemill.recorder.format.events import ORDINARY, EventKind, RecordedEvent
from tidemill.recorder.format.recordable_text import classify_error, clean_error, clean_name
from tidemill.recorder.format.schema import MAX_ERROR_CHARS
from tidemill.recorder.writing.writer import RecordWriter
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.hosting.trigger_book import TriggerChange
from tidemill.triggers.shared_stream import SharedStreamManager
from tidemill.triggers.streams.stream_counts import OTHERS, Incident, LaneTally, name_lane

_PER_SECOND = 1_000
#: Per second, at most this many lanes are counted separately, over all streams; the others share one entry.
MAX_LANES = 1_000
#: Events within this time are written together.
_FLUSH_SECONDS = 0.2


class SeenTotals(NamedTuple):
    """The totals at one moment.

    Attributes:
        lanes: Broadcast, resolved and advanced events, by stream and lane.
        state: The state that is stored at intervals.
    """

    lanes: dict[str, tuple[int, int, int]]
    state: dict[str, object]


class HostRecorder:
    """Records a trigger host.

    Args:
        book: The statistics of the host.
        clock: Returns seconds since the epoch.

    Attributes:
        writer: Writes the recording; set it before the first event.
    """

    writer: RecordWriter

    def __init__(self, book: HostBook, clock: Callable[[], float] = time.time) -> None:
        self._book = book
        self._clock = clock
        self._sample = FailureSample(_PER_SECOND)
        self._waiting: list[RecordedEvent] = []
        self._flushing: asyncio.TimerHandle | None = None
        self._seen: SeenTotals | None = None
        # The greatest totals so far.
        self._before: dict[str, tuple[int, int, int]] = {}

    def follow(self) -> None:
        """Start recording the changes that the book reports."""
        self._book.triggers.tell = self._tell_trigger
        self._book.counts.tell = self._tell_incident
        self._book.look = self._look

    # -- on the host's loop --------------------------------------------------------------------------------------------

    def _tell_trigger(self, name: str, change: TriggerChange, text: str, data: dict[str, str | int | float]) -> None:
        error = _last_line(text)
        # Pages show the beginning of a text, but the end of a traceback has the error. The text is already masked.
        told = text if "\n" not in text else f"{error}\n\n{text}"
        kind = EventKind(change.value)
        if (error_class := self._admit(kind, error)) is not None:
            masked = told[:MAX_ERROR_CHARS]
            name = clean_name(name)
            self._put(RecordedEvent(self._now_us(), kind, None, None, None, name, None, masked, error_class, data))

    def _tell_incident(self, incident: Incident) -> None:
        topic, partition = _find_partition(incident.lane)
        data: dict[str, str | int | float] = {}
        if incident.position is not None:
            data["position"] = incident.position
        if topic is None and (lane := name_lane(incident.lane)):
            data["lane"] = clean_name(lane)
        kind = EventKind(incident.kind.value)
        if (error_class := self._admit(kind, incident.text)) is None:
            return
        event = RecordedEvent(
            self._now_us(),
            kind,
            topic,
            partition,
            task_id=None if incident.trigger is None else clean_name(incident.trigger),
            sink=self._book.names.find(incident.key),
            text=clean_error(incident.text),
            error_class=error_class,
            data=data,
        )
        self._put(event)

    def _admit(self, kind: EventKind, error: str) -> str | None:
        """Return the error class of an incident that is recorded separately; None: it is only counted."""
        if kind in ORDINARY:
            return ""
        error_class = classify_error(error) if error else ""
        return error_class if self._sample.admits(time.monotonic(), kind.value, error_class) else None

    def _put(self, event: RecordedEvent) -> None:
        # Events are collected, because waking the writer's thread for each would delay the loop.
        self._waiting.append(event)
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_later(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None
        if self._waiting:
            events, self._waiting = self._waiting, []
            self.writer.add_events(events)

    def _look(self, manager: SharedStreamManager) -> None:
        """Store the totals of this moment."""
        outstanding = manager.count_lanes()
        lanes: dict[str, tuple[int, int, int]] = {}
        for key, tally in self._book.counts.tallies.items():
            stream = self._book.names.find(key)
            # The tally counts events that are done; outstanding ones are known only to the streams.
            totals: dict[str, list[int]] = {name: _sum_tally(lane) for name, lane in tally.lanes.items()}
            for count in outstanding.get(key, ()):
                total = totals.setdefault(tally.find_name(count.lane), [0, 0, 0])
                total[0] += count.outstanding
                total[1] += count.resolved
            for name, (broadcast, resolved, advanced) in totals.items():
                lane_key = name_stream_lane(stream, clean_name(name))
                if lane_key not in lanes and len(lanes) >= MAX_LANES:
                    lane_key = OTHERS
                known = lanes.get(lane_key, (0, 0, 0))
                lanes[lane_key] = (known[0] + broadcast, known[1] + resolved, known[2] + advanced)
        phases = {phase.value: count for phase, count in self._book.triggers.count_phases().items()}
        state: dict[str, object] = {
            "triggers": phases,
            "acknowledged_streams": len(outstanding),
            "outstanding": sum(lane.outstanding for stream in outstanding.values() for lane in stream),
            "advanced": self._book.counts.advanced,
        }
        self._seen = SeenTotals(lanes, state)
        self._add_counts(self._sample.take_counts(time.monotonic()))
        self._flush()

    def finish(self) -> None:
        """Record waiting events, and the counts of those that were not recorded individually."""
        self._add_counts(self._sample.take_last_counts())
        self._flush()

    def _add_counts(self, counts: Mapping[tuple[str, str], int]) -> None:
        for (kind, error_class), count in counts.items():
            self._waiting.append(
                RecordedEvent(
                    self._now_us(),
                    EventKind(kind),
                    text="more of these were counted, but not recorded individually",
                    error_class=error_class,
                    data={"count": count},
                )
            )

    def _now_us(self) -> int:
        return int(self._clock() * 1_000_000)

    # -- on the writer's thread ----------------------------------------------------------------------------------------

    def sample(self, at: int) -> tuple[Counts, object] | None:
        """Return the counts since the last call, and the state."""
        seen = self._seen
        if seen is None:
            return None
        counts = Counts(at)
        for lane_key, (broadcast, resolved, advanced) in seen.lanes.items():
            before = self._before.get(lane_key, (0, 0, 0))
            # While a stream closes, its outstanding events are briefly in no total.
            now = (max(broadcast, before[0]), max(resolved, before[1]), max(advanced, before[2]))
            if now != before:
                counts.lanes[lane_key] = LaneCounts(*(after - past for after, past in zip(now, before, strict=True)))
                self._before[lane_key] = now
        return counts, seen.state


def _sum_tally(lane: LaneTally) -> list[int]:
    return [lane.advanced + lane.given_up, lane.advanced + lane.given_up_resolved, lane.advanced]


def _find_partition(lane: Hashable) -> tuple[str | None, int | None]:
    match lane:
        case (str(topic), int(partition)):
            return clean_name(topic), partition
        case _:
            return None, None


def _last_line(text: str) -> str:
    """Return the last line of a traceback, which has the error."""
    lines = text.rstrip().splitlines()
    return lines[-1] if lines else ""
