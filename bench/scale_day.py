"""A day of a hundred engines by a virtual clock, JSON lines out: `python -m bench.scale_day [engines] [partitions]`.

`Slot`, the machine that decides in the driver, runs for each engine against scripted ones: some crash, hosts with ten
engines vanish without a word, users restart engines. A partition is idle from the moment its engine stops until the
next one has joined in its place; the brokers see a join and an offset request for each start. Everything here is
calculated: how long an engine takes to start is a parameter, and so is how soon a lost host is noticed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
from collections import Counter
from collections.abc import Callable

from bench.harness import report

from tidemill.core.supervision import slot_events
from tidemill.core.supervision.slot import Slot
from tidemill.core.supervision.slot_events import Ending
from tidemill.core.supervision.slot_limits import SlotLimits

DAY_SECONDS = 86_400.0
#: How soon a crash is noticed, how long the next engine takes from its submission to its first fetch, and how soon the
#: driver's system gives up a connection to a host that vanished (5 s, and three probes 3 s apart).
NOTICE_SECONDS, START_SECONDS, VANISHED_SECONDS = 0.35, 1.2, 14.0
ENGINES_PER_HOST = 10
BEAT_SECONDS = 5.0


class Day:
    """Slots, their engines, and a clock."""

    def __init__(self, engines: int, seed: int) -> None:
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
        self.idle: dict[str, list[float]] = {"crash": [], "restart": [], "lost_host": []}
        self.joins: Counter[int] = Counter()
        for number in range(engines):
            self.feed(number, slot_events.Start())

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
                    self.at(START_SECONDS, lambda token=token: self._connect(number, token))  # type: ignore[misc]
                case slot_events.CancelJob(token):
                    self.at(0.1, lambda token=token: self._end(number, token, Ending.CRASHED))  # type: ignore[misc]
                case slot_events.Drain():
                    self.stop(number, "restart", Ending.DRAINED, 0.0)

    def _connect(self, number: int, token: int) -> None:
        if token != self.tokens[number]:
            return
        self.runs[number] += 1
        self.alive[number] = True
        self.feed(number, slot_events.Hello(token, self.runs[number]))
        self.feed(number, slot_events.Ready(self.runs[number]))
        self.joins[int(self.now)] += 1
        if number in self.down_since:
            since, why = self.down_since.pop(number)
            self.idle[why].append(self.now - since)
        self._beat(number, self.runs[number])

    def _beat(self, number: int, run: int) -> None:
        if self.alive[number] and self.runs[number] == run:
            self.feed(number, slot_events.Heartbeat(run))
            self.at(BEAT_SECONDS, lambda: self._beat(number, run))

    def stop(self, number: int, why: str, ending: Ending, notice: float) -> None:
        """End an engine; the driver sees it that many seconds later."""
        if not self.alive[number]:
            return
        self.alive[number] = False
        self.down_since[number] = self.now, why
        run, token = self.runs[number], self.tokens[number]
        self.at(notice, lambda: self.feed(number, slot_events.LinkClosed(run)))
        self.at(notice, lambda: self._end(number, token, ending))

    def _end(self, number: int, token: int, ending: Ending) -> None:
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
    day = Day(engines, seed)
    hosts = max(1, engines // ENGINES_PER_HOST)

    def lose_host() -> None:
        host = day.random.randrange(hosts)
        for number in range(host * ENGINES_PER_HOST, min(engines, (host + 1) * ENGINES_PER_HOST)):
            day.stop(number, "lost_host", Ending.CRASHED, VANISHED_SECONDS)

    def crash() -> None:
        day.stop(day.random.randrange(engines), "crash", Ending.CRASHED, NOTICE_SECONDS)

    def restart() -> None:
        day.feed(day.random.randrange(engines), slot_events.RestartRequested())

    for _ in range(engines):  # as many of both in a day as there are engines
        day.at(day.random.uniform(60, day_seconds), crash)
        day.at(day.random.uniform(60, day_seconds), restart)
    for _ in range(24):
        day.at(day.random.uniform(60, day_seconds), lose_host)
    day.run(day_seconds + 120.0)
    later = Counter({second: count for second, count in day.joins.items() if second > 30})
    return {
        "engines": engines,
        "partitions": partitions,
        "not_running_at_the_end": len(day.down_since),
        "joins": sum(day.joins.values()),
        "most_joins_in_a_second": max(later.values(), default=0),
        "most_joins_in_a_second_at_the_start": max(day.joins.values()),
        "most_partitions_asked_for_in_a_second": max(later.values(), default=0) * partitions / engines,
        **{f"engines_that_ended_by_{why}": len(found) for why, found in day.idle.items()},
        **{f"longest_idle_after_{why}_seconds": max(found, default=0.0) for why, found in day.idle.items()},
    }


if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]]
    engines = numbers[0] if numbers else 100
    report(bench="day", **simulate(engines, numbers[1] if len(numbers) > 1 else 10 * engines))
