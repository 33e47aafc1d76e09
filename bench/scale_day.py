"""A day of a hundred engines by a virtual clock, JSON lines out: `python -m bench.scale_day [engines] [partitions]`.

`Slot` and `SlotGroup`, the machines that decide in the driver, run against scripted engines and a scripted consumer
group: some engines crash, hosts with ten engines vanish without a word, some of them for so long that the group gives
their partitions to others, and users restart engines. A partition is idle from the moment its engine stops until
one that has it has joined. Everything here is calculated: how long steps take is a parameter, and so is what each of
them asks the brokers.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable, Sequence

from bench.harness import report

from tidemill.core.supervision import slot_events, slot_group
from tidemill.core.supervision.slot import Slot
from tidemill.core.supervision.slot_events import EngineEnding
from tidemill.core.supervision.slot_group import SlotGroup
from tidemill.core.supervision.slot_limits import SlotLimits

DAY_SECONDS = 86_400.0
#: How soon a crash is noticed, how long the next engine takes from its submission to its first fetch, and how soon the
#: driver's system gives up a connection to a host that vanished (5 s, and three probes 3 s apart).
NOTICE_SECONDS, START_SECONDS, VANISHED_SECONDS = 0.35, 1.2, 14.0
#: The parts of a start behind the hello: `on_ready`, and joining the group.
READY_SECONDS, JOIN_SECONDS = 0.1, 0.2
ENGINES_PER_HOST = 10
BEAT_SECONDS = 5.0
#: A host is not replaced at once: for how long its engines find no cores; each fourth lost host is such a one.
WITHOUT_CORES_SECONDS = 600.0
#: `kafka.session_timeout_ms`, and how long a rebalance takes: all members learn of it with their next heartbeat.
SESSION_SECONDS, REBALANCE_SECONDS = 45.0, 1.2
#: Requests to the coordinator, of a start (find it, join, sync, fetch offsets), and of each member in a rebalance (join
#: and sync, twice, since it is cooperative).
PER_START, PER_REBALANCE = 4, 4
#: What each engine asks the coordinator per second anyway: commits at most every 0.1 s, a heartbeat.
PER_SECOND = 11


class Day:
    """Slots, their engines, and a clock."""

    def __init__(self, engines: int, partitions: int, seed: int) -> None:
        """Start all slots at once."""
        self.now = 0.0
        self.random = random.Random(seed)
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self.slots = [Slot(number, SlotLimits()) for number in range(engines)]
        self.tokens = [0] * engines
        self.runs = [0] * engines
        self.alive = [False] * engines
        self.down_since: dict[int, tuple[float, str]] = {}
        self.idle: dict[str, list[float]] = {"crash": [], "restart": [], "lost_host": [], "long_loss": [], "return": []}
        self.joins: Counter[int] = Counter()
        self.asked: Counter[int] = Counter()
        self.group = SlotGroup(engines, partitions)
        self._tick_at: float | None = None
        self.consuming_at: float | None = None
        self.finished: list[slot_group.RunFinished] = []
        #: Slots whose partitions the others have, and until when slots find no cores.
        self.expelled: set[int] = set()
        self.rebalances = 0
        self._rebalanced_at: float | None = None
        self._no_cores: dict[int, float] = {}
        for number in range(engines):
            self.feed(number, slot_events.StartSlot())

    def at(self, seconds: float, function: Callable[[], None]) -> None:
        """Call something that many seconds from now."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), function))

    def run(self, until: float) -> None:
        """Let time pass."""
        while self._events and self._events[0][0] <= until:
            self.now, _, function = heapq.heappop(self._events)
            function()

    def feed(self, number: int, event: slot_events.Input) -> None:
        """Feed a slot, and do what it decides."""
        for effect in self.slots[number].feed(event, self.now):
            match effect:
                case slot_events.SubmitJob(token):
                    self.tokens[number] = token
                    wait = max(0.0, self._no_cores.pop(number, 0.0) - self.now)
                    until_hello = wait + START_SECONDS - READY_SECONDS - JOIN_SECONDS
                    self.at(until_hello, lambda token=token: self._connect(number, token))  # type: ignore[misc]
                case slot_events.CancelJob(token):
                    self.at(0.1, lambda token=token: self._end(number, token, EngineEnding.CRASHED))  # type: ignore[misc]
                case slot_events.DrainEngine(_, keep_membership):
                    self.stop(number, "restart" if keep_membership else "", EngineEnding.DRAINED, 0.0)
                case slot_events.SlotFinished(ending, error):
                    self._carry_out(self.group.note_finished(number, ending, error))

    def _carry_out(self, effects: Sequence[slot_group.Effect]) -> None:
        for effect in effects:
            match effect:
                case slot_group.PrepareSlot(number):
                    self._later(READY_SECONDS, number, self._note_ready)
                case slot_group.SubscribeSlot(number):
                    self._later(JOIN_SECONDS, number, self._note_joined)
                case slot_group.Consume():
                    assert self.consuming_at is None, "engines are held once"
                    self.consuming_at = self.now
                case slot_group.DrainSlot(number):
                    self.feed(number, slot_events.DrainRequested())
                case slot_group.RunFinished():
                    self.finished.append(effect)
        if self.group.due is not None and self._tick_at != self.group.due:
            self._tick_at = self.group.due
            self.at(self._tick_at - self.now, lambda: self._carry_out(self.group.tick(self.now)))

    def _later(self, seconds: float, number: int, function: Callable[[int], None]) -> None:
        """Call something unless the engine has been replaced or has ended by then."""
        run = self.runs[number]
        self.at(seconds, lambda: function(number) if self.alive[number] and self.runs[number] == run else None)

    def drain(self) -> None:
        """Stop the pipeline."""
        self._carry_out(self.group.drain())

    def _connect(self, number: int, token: int) -> None:
        if token != self.tokens[number]:
            return
        self.runs[number] += 1
        self.alive[number] = True
        self.feed(number, slot_events.EngineConnected(token, self.runs[number]))
        self._carry_out(self.group.note_connected(number))
        self._beat(number, self.runs[number])

    def _note_ready(self, number: int) -> None:
        self.feed(number, slot_events.EngineReady(self.runs[number]))
        self._carry_out(self.group.note_ready(number, self.now))

    def _note_joined(self, number: int) -> None:
        self.joins[int(self.now)] += 1
        self.asked[int(self.now)] += PER_START
        since, why = self.down_since.pop(number, (None, ""))
        if number in self.expelled:
            # Its place was given away: it gets partitions by a rebalance, and those are idle while it lasts.
            self.expelled.discard(number)
            self._rebalance("return")
        elif since is not None:
            self.idle[why].append(self.now - since)
        self._carry_out(self.group.note_partitions(number))

    def _rebalance(self, why: str, idle: float = 0.0) -> None:
        """Move partitions; members that come or go while that lasts are part of it."""
        self.idle[why].append(idle + REBALANCE_SECONDS)
        if self._rebalanced_at is None or self.now - self._rebalanced_at > REBALANCE_SECONDS:
            self._rebalanced_at = self.now
            self.rebalances += 1
            self.asked[int(self.now)] += PER_REBALANCE * sum(self.alive)

    def _expire(self, number: int, since: float) -> None:
        """End the session of a member that has been silent for too long."""
        if number in self.down_since and self.down_since[number][0] == since:
            self.expelled.add(number)
            self._rebalance("long_loss", SESSION_SECONDS)

    def _beat(self, number: int, run: int) -> None:
        if self.alive[number] and self.runs[number] == run:
            self.feed(number, slot_events.Heartbeat(run))
            self.at(BEAT_SECONDS, lambda: self._beat(number, run))

    def keep_from_cores(self, number: int) -> None:
        """Have the next engine of a slot wait for a core."""
        self._no_cores[number] = self.now + WITHOUT_CORES_SECONDS

    def stop(self, number: int, why: str, ending: EngineEnding, notice: float) -> None:
        """End an engine; the driver sees it that many seconds later."""
        if not self.alive[number]:
            return
        self.alive[number] = False
        if why:
            self.down_since[number] = since, _ = self.now, why
            self.at(SESSION_SECONDS, lambda: self._expire(number, since))
        run, token = self.runs[number], self.tokens[number]
        self.at(notice, lambda: self.feed(number, slot_events.LinkClosed(run)))
        self.at(notice, lambda: self._end(number, token, ending))

    def _end(self, number: int, token: int, ending: EngineEnding) -> None:
        self.alive[number] = False
        self.feed(number, slot_events.JobEnded(token, ending, None))
        self.tick(number)

    def tick(self, number: int) -> None:
        """Feed the time as long as something is due while the slot has no engine."""
        due = self.slots[number].due
        if due is not None and not self.alive[number]:
            self.at(max(0.001, due - self.now), lambda: self._tick(number))

    def _tick(self, number: int) -> None:
        if not self.alive[number] and number in self.down_since:
            self.feed(number, slot_events.Tick())
            self.tick(number)


def simulate(engines: int, partitions: int, *, day_seconds: float = DAY_SECONDS, seed: int = 1) -> dict[str, float]:
    """Return what a day was like."""
    day = Day(engines, partitions, seed)
    hosts = max(1, engines // ENGINES_PER_HOST)

    def lose_host(*, for_long: bool) -> None:
        host = day.random.randrange(hosts)
        for number in range(host * ENGINES_PER_HOST, min(engines, (host + 1) * ENGINES_PER_HOST)):
            if for_long and day.alive[number]:
                day.keep_from_cores(number)
            day.stop(number, "lost_host", EngineEnding.CRASHED, VANISHED_SECONDS)

    def crash() -> None:
        day.stop(day.random.randrange(engines), "crash", EngineEnding.CRASHED, NOTICE_SECONDS)

    def restart() -> None:
        day.feed(day.random.randrange(engines), slot_events.RestartRequested())

    for _ in range(engines):  # as many of both in a day as there are engines
        day.at(day.random.uniform(60, day_seconds), crash)
        day.at(day.random.uniform(60, day_seconds), restart)
    for hour in range(24):
        day.at(day.random.uniform(60, day_seconds), functools.partial(lose_host, for_long=hour % 4 == 0))
    day.run(day_seconds + WITHOUT_CORES_SECONDS + 120.0)
    down = len(day.down_since)
    day.drain()
    day.run(day.now + 60.0)
    asked = max((count for second, count in day.asked.items() if second > 30), default=0)
    later = Counter({second: count for second, count in day.joins.items() if second > 30})
    return {
        "engines": engines,
        "partitions": partitions,
        "not_running_at_the_end": down,
        "runs_finished": len(day.finished),
        "consuming_after_seconds": day.consuming_at or -1.0,
        "rebalances": day.rebalances,
        "requests_per_second": PER_SECOND * engines,
        "most_requests_in_a_second": PER_SECOND * engines + asked,
        "joins": sum(day.joins.values()),
        "most_joins_in_a_second": max(later.values(), default=0),
        "most_joins_in_a_second_at_the_start": max(day.joins.values()),
        "most_partitions_asked_for_in_a_second": max(later.values(), default=0) * partitions / engines,
        **{f"engines_with_{why}": len(found) for why, found in day.idle.items()},
        **{f"longest_idle_after_{why}_seconds": max(found, default=0.0) for why, found in day.idle.items()},
    }


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    engines = numbers[0] if numbers else 100
    report(bench="day", **simulate(engines, numbers[1] if len(numbers) > 1 else 10 * engines))
