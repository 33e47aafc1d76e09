"""Answers the web UI's queries about a trigger host: on the host's loop, with copies that other threads may keep.

Invariant: the cost of an answer is bounded by its page and by the subscribers of the streams on it.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.streams.members import LaneReport
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.services.triggerer.hosting.trigger_book import TriggerEntry, TriggerPhase
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.reporting.monitoring import HostMonitor, find_reasons
from tidemill.triggers.streams.ack import AckStream
from tidemill.triggers.streams.life import SharedStream
from tidemill.triggers.streams.stream_counts import StreamTally, name_lane

#: At most this many holders of an event are named; the others are counted.
MAX_HOLDERS = 5


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The host.

    Attributes:
        state: "starting", "standing by" or "running".
        problems: Why the host is not ready.
        store: "open", "full", "down"; '': not known.
        triggers: The number of triggers in each phase.
        streams: The number of shared streams.
        subscribers: The number of their subscribers.
        outstanding: Events that are not acknowledged upstream.
        advanced: Events that were acknowledged to producers.
        redelivered: Events that were delivered again.
        dead_lettered: Events with a dead letter.
        holder: The other process that runs the list; '': there is none.
        at: The time of this answer, in seconds since the epoch.
    """

    state: str
    problems: list[str]
    store: str
    triggers: dict[str, int]
    streams: int
    subscribers: int
    outstanding: int
    advanced: int
    redelivered: int
    dead_lettered: int
    holder: str
    at: float


@dataclass(frozen=True, slots=True)
class TriggerFacts:
    """A trigger; see `TriggerEntry`."""

    name: str
    classpath: str
    restart: str
    state: str
    since: float
    runs: int
    events: int
    error: str
    failed_at: float | None
    next_at: float | None


@dataclass(frozen=True, slots=True)
class LaneFacts:
    """A lane.

    Attributes:
        lane: Its name; '' if it has none.
        outstanding: The number of its events that are not acknowledged upstream.
        head: The number of the oldest of them.
        age_seconds: The time since that event was fanned out, without the time in which the store was down.
        since: When that event was fanned out, in seconds since the epoch.
        holders: The first triggers that hold that event; empty: it waits to be advanced.
        more_holders: The number of other holders.
    """

    lane: str
    outstanding: int
    head: int
    age_seconds: float
    since: float
    holders: list[str]
    more_holders: int


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A shared stream.

    Attributes:
        id: Its id in URLs.
        name: Its key, secrets masked.
        acknowledged: Whether its events are acknowledged to its producer.
        subscribers: The number of its subscribers.
        failing: The subscribers that have failed and have not left yet.
        outstanding: Events that are not acknowledged upstream.
        full_seconds: How long its producer has not been pulled because too much is outstanding; None: it is pulled.
        lanes: The number of lanes with outstanding events.
        oldest: The lane with the oldest event; None: there is none.
        advanced: Events that were acknowledged to the producer.
        failed: The advanced events that a subscriber failed.
        rejected: The advanced events that a subscriber rejected.
        forced: How often a subscriber was forced to fail because it was late or slow.
        ended: How often the stream failed.
    """

    id: str
    name: str
    acknowledged: bool
    subscribers: int
    failing: int
    outstanding: int
    full_seconds: float | None
    lanes: int
    oldest: LaneFacts | None
    advanced: int
    failed: int
    rejected: int
    forced: int
    ended: int


class HostView:
    """Answers queries about a host; call everything on the host's loop.

    Args:
        monitor: The monitor of the process.
        clock: Returns seconds since the epoch.
    """

    def __init__(self, monitor: HostMonitor, clock: Callable[[], float] = time.time) -> None:
        self._monitor = monitor
        self._book = monitor.book
        self._clock = clock

    @property
    def _host(self) -> ListHost | None:
        replica = self._monitor.replica
        return None if replica is None else replica.host

    def describe_host(self) -> HostFacts:
        host, replica, counts = self._host, self._monitor.replica, self._book.counts
        waits_for = None if replica is None else replica.report()["waits_for"]
        standing = host.events.standing if host is not None else None
        streams = list(host.manager.streams.values()) if host is not None else []
        reasons = find_reasons(self._monitor.read_state(reports=False))
        state = "standing by" if waits_for else "running" if host is not None and self._book.is_started else "starting"
        return HostFacts(
            state,
            reasons,
            standing.value if isinstance(standing, ProducerStanding) else "",
            {phase.value: count for phase, count in self._book.triggers.count_phases().items()},
            len(streams),
            sum(len(stream.subscriptions) for stream in streams),
            sum(stream.group.outstanding for stream in streams if isinstance(stream, AckStream)),
            counts.advanced,
            counts.upstream.redelivered,
            sum(counts.upstream.dead_lettered.values()),
            f"process {waits_for['process']} on {waits_for['host']}" if waits_for else "",
            self._clock(),
        )

    def list_triggers(
        self, after: str | None, limit: int, states: Collection[str] = (), text: str = ""
    ) -> tuple[list[TriggerFacts], bool]:
        """Return the next triggers by name, and whether there are more."""
        phases = [TriggerPhase(state) for state in states]
        found, more = self._book.triggers.list_after(after, limit, phases, text)
        return [_describe_trigger(entry) for entry in found], more

    def list_streams(self, after: tuple[str, str] | None, limit: int) -> tuple[list[StreamFacts], bool]:
        """Return the next streams by name and id, and whether there are more."""
        host = self._host
        if host is None:
            return [], False
        keyed = ((self._book.names.find(key), self._book.names.find_id(key), key) for key in host.manager.streams)
        later = (one for one in keyed if after is None or one[:2] > after)
        found = heapq.nsmallest(limit + 1, later, key=lambda one: one[:2])
        rows = [self._describe_stream(host, name, number, key) for name, number, key in found[:limit]]
        return rows, len(found) > limit

    def find_stream(
        self, wanted: str, after: int, limit: int
    ) -> tuple[StreamFacts, list[LaneFacts], list[str], bool] | None:
        """Return a stream, its next lanes by oldest event, its first subscribers, and whether lanes remain.

        Args:
            wanted: The id of the stream.
            after: The head of the last lane on the previous page; -1: begin with the first.
            limit: The maximum number of lanes, and of subscribers.
        """
        host = self._host
        find_id = self._book.names.find_id
        streams: Mapping[Hashable, SharedStream] = {} if host is None else host.manager.streams
        key = next((key for key in streams if find_id(key) == wanted), None)
        if host is None or key is None:
            return None
        stream = host.manager.streams[key]
        facts = self._describe_stream(host, self._book.names.find(key), wanted, key)
        names = [str(name) for name in heapq.nsmallest(limit, stream.subscriptions, key=str)]
        if not isinstance(stream, AckStream):
            return facts, [], names, False
        heads = ((queue.entries[0].position, lane) for lane, queue in stream.group.ledger.queues.items())
        found = heapq.nsmallest(limit + 1, (head for head in heads if head[0] > after), key=lambda head: head[0])
        lanes = self._describe_lanes(host, stream.report([lane for _, lane in found[:limit]]))
        return facts, lanes, names, len(found) > limit

    def _describe_stream(self, host: ListHost, name: str, number: str, key: Hashable) -> StreamFacts:
        stream: SharedStream = host.manager.streams[key]
        tally = self._book.counts.tallies.get(key, StreamTally())
        failing = sum(one.end.failed_at is not None for one in stream.subscriptions.values())
        about = (number, name, isinstance(stream, AckStream), len(stream.subscriptions), failing)
        counted = (tally.advanced, tally.failed, tally.rejected, tally.forced, tally.ended)
        if not isinstance(stream, AckStream):
            return StreamFacts(*about, 0, None, 0, None, *counted)
        group = stream.group
        queues = group.ledger.queues
        first = min(queues, key=lambda lane: queues[lane].entries[0].position, default=None)
        oldest = self._describe_lanes(host, stream.report([first])) if queues else []
        full = None if group.full_since is None else host.now() - group.full_since
        return StreamFacts(*about, group.outstanding, full, len(queues), oldest[0] if oldest else None, *counted)

    def _describe_lanes(self, host: ListHost, reports: Sequence[LaneReport[Hashable]]) -> list[LaneFacts]:
        now, at = host.now(), self._clock()
        return [
            LaneFacts(
                name_lane(report.lane),
                report.outstanding,
                report.head,
                max(0.0, now - report.since),
                at - max(0.0, now - report.since),
                [str(name) for name in report.holders[:MAX_HOLDERS]],
                max(0, len(report.holders) - MAX_HOLDERS),
            )
            for report in reports
        ]


def _describe_trigger(entry: TriggerEntry) -> TriggerFacts:
    spec = entry.spec
    return TriggerFacts(
        spec.name,
        spec.classpath,
        spec.restart,
        entry.phase.value,
        entry.since,
        entry.runs,
        entry.events,
        entry.error,
        entry.failed_at,
        entry.next_at,
    )
