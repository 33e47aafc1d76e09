"""Random schedules over a real host, and what has to be so when all of it has settled.

`play` makes a host over a database and a broker, and lets a great deal happen to it, drawn from one seed; `Verdict`
compares what is stored and dead-lettered with what the actors wrote down. A schedule is repeated by its seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection, text
from structlog.testing import capture_logs
from tests.services.triggerer.proof_actors import WORLDS, World
from tests.services.triggerer.proof_broker import MAX_REDELIVERIES, Broker

from tidemill.config.sections.triggerer_settings import TriggererSettings
from tidemill.core.errors import RemoteError
from tidemill.core.retry import Backoff
from tidemill.deadletters.letter import LetterKind
from tidemill.services.triggerer.hosting import host as host_module
from tidemill.services.triggerer.lists.host import ListHost
from tidemill.services.triggerer.lists.sessions import Ownership
from tidemill.services.triggerer.lists.turns import HostStopsError
from tidemill.store.database import Database
from tidemill.store.queries.triggers.sessions import begin_session
from tidemill.store.queries.triggers.triggers import claim_triggers, find_triggers
from tidemill.store.records import TriggerSpec, TriggerState

T = TypeVar("T")

PAUSES = Backoff(0.001, 0.02)
#: Nothing may take longer to settle, in seconds of a clock that costs nothing.
SETTLE_SECONDS = 900.0
#: What only a fault of the host writes into its log.
_FAULTS = ("bug in tidemill", "a task of a shared stream failed", "a step of a trigger's end failed",
           "events cannot be stored", "is refused by the store", "the store refuses", "left behind",
           "already subscribed")  # fmt: skip


class FaultyDatabase:
    """A database that now and then does not answer, or answers late, or not what is true.

    Args:
        real: What stores.
        rng: Decides.
    """

    def __init__(self, real: Database, rng: random.Random) -> None:
        self.real, self.rng = real, rng
        self.down = False
        self.calm = False
        #: How likely each fault is.
        self.share = rng.choice([0.0, 0.02, 0.1])

    @property
    def label(self) -> str:
        return "faulty"

    @property
    def exclusive(self) -> bool:
        return self.real.exclusive

    async def write(self, work: Callable[[Connection], T]) -> T:
        rng = self.rng
        if not self.calm:
            await asyncio.sleep(rng.choice([0.0, 0.001, 0.005]))
        if self.down:
            raise RemoteError("the store is down")
        if not self.calm and rng.random() < self.share:
            kind = rng.choice(["refused", "lost", "slow"])
            if kind == "refused":
                raise RemoteError("the store refuses the connection")
            found = await self._write(work)
            await asyncio.sleep(rng.choice([0.01, 0.3, 2.0]))
            if kind == "lost":
                raise RemoteError("the answer was lost")
            return found
        return await self._write(work)

    async def _write(self, work: Callable[[Connection], T]) -> T:
        loop: Any = asyncio.get_running_loop()
        loop.busy += 1
        try:
            return await self.real.write(work)
        finally:
            loop.busy -= 1

    async def read(self, work: Callable[[Connection], T]) -> T:
        loop: Any = asyncio.get_running_loop()
        loop.busy += 1
        try:
            return await self.real.read(work)
        finally:
            loop.busy -= 1

    async def close(self) -> None:
        return


class _Time:
    """Stands in for the module `time` in the host."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.monotonic = loop.time

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@dataclass
class Stored:
    """A row of the store."""

    name: str
    identity: str | None
    n: int
    part: int


class Schedule:
    """What happens, drawn from a seed."""

    def __init__(self, seed: int, database: Database, stored: Callable[[], int]) -> None:
        self.seed = seed
        self.rng = rng = random.Random(seed)
        # What the product draws.
        random.seed(seed)
        self.list = f"list{seed}"
        self.database = FaultyDatabase(database, random.Random(f"{seed}/store"))
        names = [f"s{seed}t{i}" for i in range(rng.randint(2, 6))]
        restarts = {name: rng.choice(["always", "always", "always", "on-failure", "never"]) for name in names}
        self.home = names[0]
        restarts[self.home] = "always"
        self.settings = TriggererSettings(
            shared_stream_ack_timeout=rng.choice([0.5, 2.0, 20.0]),
            shared_stream_max_outstanding=rng.choice([4, 30, 1000]),
            shared_stream_subscriber_queue_size=rng.choice([8, 1024]),
            shared_stream_cohort_grace_period=rng.choice([0.0, 0.0, 0.1]),
            block_threshold_seconds=1000.0,
            seat_seconds=rng.choice([60.0, 60.0, 60.0, 1.0]),
        )
        self.stored = stored
        #: How many rows were stored when a number was first covered by a commit.
        self.stored_at: dict[int, int] = {}
        self.world = World(
            Broker(random.Random(f"{seed}/broker"), rng.randint(1, 3), self._tick, self._note_covered),
            seed,
            rng.choice([0.05, 0.15, 0.4]),
            self.settings.shared_stream_ack_timeout,
            restarts,
        )
        self.names = names
        self.versions = dict.fromkeys(names, 0)
        self.listed: set[str] = set()
        #: When names were away: gone from the list, handed over, without their seats; each (first, last) tick.
        self.away: dict[str, list[list[float]]] = defaultdict(list)
        self.host: ListHost | None = None
        self.steps = rng.randint(12, 32)
        self.reloads: set[asyncio.Task[None]] = set()
        self.log: list[Any] = []

    def _tick(self) -> int:
        return self.world.tick()

    def _note_covered(self, numbers: list[int]) -> None:
        rows = self.stored()
        for n in numbers:
            self.world.tell(f"a commit covers {n}")
            self.stored_at[n] = rows

    def spec(self, name: str) -> TriggerSpec:
        kwargs = json.dumps({"version": self.versions[name], "world": self.list}, sort_keys=True)
        return TriggerSpec(name, "tests.services.triggerer.proof_actors.Actor", kwargs, self.world.restarts[name])

    # -- hosts ------------------------------------------------------------------------------------------------

    async def make_host(self) -> ListHost:
        loop = asyncio.get_running_loop()
        self.world.host += 1
        self.ownership = ownership = Ownership(self.database, self.list, clock=loop.time)
        await ownership.acquire()
        host = ListHost(self.database, self.settings, ownership, backoff=PAUSES, clock=loop.time)
        ownership.compare_tokens(lambda: host.tokens, host.hand_over)
        return host

    async def start(self) -> None:
        wanted = set(self.listed)
        self._apply()
        self.host = await self.make_host()
        await self.host.start([self.spec(name) for name in self.names if name in wanted])
        tick = self.world.tell(f"a host has started: {sorted(wanted)}")
        for name in wanted:
            self._back(name, tick)

    def _apply(self) -> dict[str, str]:
        """Note that restarts are about to be those that are wanted."""
        for name, restart in self.world.restarts.items():
            self.world.applied[name].add(restart)
        return dict(self.world.restarts)

    async def stop(self) -> None:
        host, self.host = self.host, None
        if host is not None:
            self.world.tell("the host is stopped")
            await host.stop()
            await self.ownership.release()
            self.world.tell("the host has stopped")
            await asyncio.gather(*self.reloads)
            left = [task for task in asyncio.all_tasks() if task not in self.known_tasks | self.world.helpers]
            assert not left, f"tasks are left behind by a host that has stopped: {left}"

    async def abandon(self) -> None:
        """End what still runs after a failure."""
        self.database.down = False
        self.database.calm = self.world.calm = self.world.broker.calm = True
        if self.host is not None:
            await self.host.stop()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    def _away(self, name: str, tick: int) -> None:
        if not self.away[name] or self.away[name][-1][1] != float("inf"):
            self.away[name].append([tick, float("inf")])

    def _back(self, name: str, tick: int) -> None:
        if self.away[name] and self.away[name][-1][1] == float("inf"):
            self.away[name][-1][1] = tick

    # -- what happens -----------------------------------------------------------------------------------------

    async def play(self) -> None:
        self.known_tasks = set(asyncio.all_tasks())
        rng = self.rng
        for name in self.names:
            self._away(name, 0)
        self._list({name for name in self.names if rng.random() < 0.8} | {self.home})
        for _ in range(rng.randint(0, 10)):
            self.feed()
        await self.start()
        steps = {self.feed_some: 8, self.wait: 8, self.reload: 4, self.restart: 1, self.hand_over: 0.5,
                 self.outage: 1.5, self.fail_poll: 1, self.rebalance: 1}  # fmt: skip
        chosen = {step: weight * rng.choice([0, 1, 1, 2]) for step, weight in steps.items()}
        chosen[self.feed_some] = chosen[self.wait] = 8
        for _ in range(self.steps):
            step: Any = rng.choices(list(chosen), list(chosen.values()))[0]
            await step()
        await self.settle()

    def feed(self) -> None:
        n = self.world.broker.feed(self.rng.randrange(len(self.world.broker.lanes)))
        self.world.tell(f"{n} is fed")

    async def feed_some(self) -> None:
        for _ in range(self.rng.choice([1, 1, 2, 5, 12])):
            self.feed()

    async def wait(self) -> None:
        await asyncio.sleep(self.rng.choice([0.0, 0.001, 0.01, 0.01, 0.1, 0.1, 1.0, 3.0, 10.0, 45.0]))

    def _list(self, names: set[str]) -> None:
        """Note what is to be listed from now on."""
        for name in self.listed - names:
            self._away(name, self.world.tell(f"{name} is to be removed"))
        for name in names - self.listed:
            self.world.listing[name] += 1
        self.listed = names

    async def reload(self) -> None:
        rng, names = self.rng, set(self.listed)
        for name in self.names:
            draw = rng.random()
            if draw < 0.15 and name != self.home:
                names ^= {name}
            elif draw < 0.3 and name in names:
                self.versions[name] += 1
                self.world.listing[name] += 1
            elif draw < 0.35 and name != self.home:
                self.world.restarts[name] = rng.choice(["always", "on-failure", "never"])
                self.world.listing[name] += 1
        self._list(names)
        task = asyncio.get_running_loop().create_task(self._reload(), name="reload of the proof")
        self.reloads.add(task)
        self.known_tasks.add(task)
        task.add_done_callback(self.reloads.discard)
        if rng.random() < 0.6:
            await asyncio.wait([task])

    async def _reload(self) -> None:
        host, wanted = self.host, set(self.listed)
        if host is None:
            return
        restarts = self._apply()
        specs = [self.spec(name) for name in self.names if name in wanted]
        self.world.tell(f"the host is to reload {[(spec.name, spec.kwargs[:13], spec.restart) for spec in specs]}")
        with contextlib.suppress(HostStopsError):
            await host.reload(specs)
            tick = self.world.tell("the host has reloaded")
            for name in wanted & self.listed:
                self._back(name, tick)
            for name in wanted:
                if self.world.restarts[name] == restarts[name]:
                    self.world.applied[name] = {restarts[name]}

    async def restart(self) -> None:
        await self.stop()
        if self.rng.random() < 0.3:
            await self.feed_some()
        await self.start()

    async def hand_over(self) -> None:
        """Let a session of somebody else claim some or all, and give the list back a moment later."""
        await asyncio.gather(*self.reloads)
        names = [name for name in sorted(self.listed) if self.rng.random() < 0.5]
        loop = asyncio.get_running_loop()

        def take(connection: Connection) -> list[int]:
            number = begin_session(
                connection, kind="triggerer", name="other", host="other", boot_id="", pid=1, list=self.list,
                lock="", digest="", now_us=1,
            )  # fmt: skip
            records = find_triggers(connection, names)
            ids = [record.id for record in records if record.state is TriggerState.RUNNING]
            return list(claim_triggers(connection, ids, number, 1))

        for name in names:
            self._away(name, self.world.tell(f"{name} is claimed by somebody else"))
            # One that has just ended for good may not have been reported: then it runs again.
            self.world.listing[name] += 1
        await self.database._write(take)
        await asyncio.sleep(self.rng.choice([0.01, 0.5, 5.0]) if loop.time() else 0)
        await self.restart()

    async def outage(self) -> None:
        self.world.tell("the store is down")
        self.database.down = True
        loop = asyncio.get_running_loop()
        loop.call_later(self.rng.choice([0.05, 0.3, 3.0, 20.0]), self._up)

    def _up(self) -> None:
        self.world.tell("the store is up")
        self.database.down = False

    async def fail_poll(self) -> None:
        self.world.tell("the poll fails")
        broker = self.world.broker
        broker.refusals = self.rng.choice([0, 0, 1, 3])
        if broker.source is not None:
            broker.source.fail()

    async def rebalance(self) -> None:
        source = self.world.broker.source
        if source is not None:
            lanes = [lane for lane in self.world.broker.lanes if self.rng.random() < 0.5]
            self.world.tell(f"{lanes} are taken away")
            await source.rebalance(lanes, lost=self.rng.random() < 0.5)

    async def settle(self) -> None:
        """Let nothing more go wrong, and wait until all is done."""
        world = self.world
        await asyncio.gather(*self.reloads)
        world.tell("all is to settle")
        self.database.down = False
        self.database.calm = world.calm = world.broker.calm = True
        world.broker.refusals = 0
        if self.rng.random() < 0.3:
            await self.restart()
        else:
            await self._reload()
        loop = asyncio.get_running_loop()
        until = loop.time() + SETTLE_SECONDS
        while world.broker.lag:
            assert loop.time() < until, (
                f"{world.broker.lag} offsets are never done; committed: {world.broker.committed}, ends: "
                f"{world.broker.ends}; {self.host.report() if self.host else None}"
            )
            await asyncio.sleep(0.5)
        # What was cancelled may be about to end still.
        await asyncio.sleep(1.0)
        await self.stop()
        for helper in list(world.helpers):
            helper.cancel()
        if world.helpers:
            await asyncio.wait(set(world.helpers))


class Verdict:
    """Says what is wrong after a schedule.

    Args:
        schedule: That has been played.
        rows: What is stored, in order.
    """

    def __init__(self, schedule: Schedule, rows: list[Stored]) -> None:
        self.schedule, self.world, self.rows = schedule, schedule.world, rows
        self.first: dict[tuple[str, int], int] = {}
        for at, row in enumerate(rows):
            if row.part == 0:
                self.first.setdefault((row.name, row.n), at)

    def wrongs(self) -> Iterator[str]:
        """Name everything that is wrong."""
        yield from self._log()
        yield from self._twice()
        yield from self._letters()
        yield from self._cleanups()
        self._note_gone()
        for n in range(self.world.broker.count):
            for name in self.schedule.names:
                if self.world.accepts(name, n):
                    yield from self._event(name, n)

    def _event(self, name: str, n: int) -> Iterator[str]:
        broker = self.world.broker
        covered = broker.covered.get(n)
        if covered is None:
            yield f"{n} is not done"
            return
        at = self.first.get((name, n))
        if at is not None and at < self.schedule.stored_at[n]:
            return
        if n in broker.confirmed and broker.confirmed[n] <= covered:
            return
        given = [tick for tick, _ in broker.given.get(n, ()) if tick < covered]
        if not given:
            yield f"{n} was done before it was given"
        elif not any(first <= covered and last >= given[-1] for first, last in self._windows(name)):
            when = "before it was stored" if at is not None else "and never stored"
            yield f"{n} is done at {covered} {when} for {name}, which was there since it was given at {given[-1]}"

    def _windows(self, name: str) -> list[list[float]]:
        return self.schedule.away[name] + self.world.seatless[name]

    def _note_gone(self) -> None:
        """Note who ended for good, by the rules of restarts: away from then until it is listed again."""
        lasts: dict[tuple[str, int], Any] = {}
        for run in self.world.runs:
            lasts[run.name, run.listing] = run
        for (name, listing), run in lasts.items():
            following = [one.began for one in self.world.runs if one.name == name and one.listing > listing]
            if run.ended is not None and self._ended_for_good(run):
                self.schedule.away[name].append([run.ended, min(following, default=float("inf"))])

    def _ended_for_good(self, run: Any) -> bool:
        if run.ending == "returned":
            return "never" in run.restarts or (run.fired > 0 and "on-failure" in run.restarts)
        cancelled = run.ending.startswith("cancelled") and ("refused" in run.ending or "timeout" in run.ending)
        failed = cancelled or run.ending == "closed" or run.ending.startswith("raised")
        return failed and "never" in run.restarts

    def _twice(self) -> Iterator[str]:
        seen = set()
        for row in self.rows:
            key = (row.name, row.identity)
            if row.identity is not None and key in seen:
                yield f"{row} is stored twice"
            seen.add(key)
            if not self.world.accepts(row.name, row.n) and row.part == 0:
                yield f"{row} was never accepted"

    def _letters(self) -> Iterator[str]:
        for n, letters in self.world.broker.letters.items():
            for letter in letters:
                yield from self._letter(n, letter)

    def _letter(self, n: int, letter: Any) -> Iterator[str]:
        did = {name: self._blamable(name, n) for name in self.schedule.names}
        named = set(re.findall(r"(?:^|[ ;])trigger (s\d+t\d+):", letter.error))
        for name in named:
            if not did[name]:
                yield f"the letter about {n} blames {name}, which did nothing wrong with it: {letter.error}"
        if letter.kind is LetterKind.REJECTED:
            if not any("reject" in what for whats in did.values() for what in whats):
                yield f"the letter about {n} says that it was rejected, and nobody did: {letter.error}"
        else:
            failures = sum(len(whats) for whats in did.values())
            if failures <= MAX_REDELIVERIES:
                yield f"the letter about {n} comes after {failures} failures: {letter.error}; {did}"
            if not named:
                yield f"the letter about {n} names nobody: {letter.error}"

    def _blamable(self, name: str, n: int) -> list[str]:
        """Return what a trigger did to an event that may be blamed on it."""
        world = self.world
        found = [what for _, _, what in world.real.get((name, n), ())]
        # It was given the event, and then held it for too long.
        timeout = world.ack_timeout
        given = world.broker.given.get(n, [])
        for tick, _ in world.read.get((name, n), ()):
            deliveries = [at for when, at in given if when < tick]
            began = min(deliveries[-1:], default=0.0)
            ended = next((run for run in world.runs if run.name == name and run.ended and run.ended > tick), None)
            if ended is None or self._seconds(ended.ended) - began >= timeout * 0.999:
                found.append("held")
            elif any(tick <= at <= self._moved(name, tick) for at in world.overflows[name]):
                found.append("held while others waited")
        return found

    def _moved(self, name: str, tick: int) -> int:
        """Return when a trigger read on after a tick, or ended."""
        world = self.world
        reads = [when for (who, _), times in world.read.items() if who == name for when, _ in times]
        ends = [run.ended for run in world.runs if run.name == name and run.ended is not None]
        return min((when for when in [*reads, *ends] if when > tick), default=world.ticks)

    def _seconds(self, tick: int | None) -> float:
        """Return the time of a tick, from what was told."""
        for line in self.world.trace:
            if int(line[:6]) == tick:
                return float(line[7:16])
        return float("inf")

    def _cleanups(self) -> Iterator[str]:
        for run in self.world.runs:
            if run.cleaned != 1:
                yield f"{run} was cleaned up {run.cleaned} times"
        if self.world.made != self.world.cleaned:
            yield f"made: {self.world.made}, cleaned up: {self.world.cleaned}"

    def _log(self) -> Iterator[str]:
        for entry in self.schedule.log:
            if any(fault in entry["event"] for fault in _FAULTS):
                yield f"in the log: {entry}"


async def play(seed: int, database: Database, stored: Callable[[], int], rows: Callable[[str], Any]) -> None:
    """Play a schedule and judge it.

    Args:
        seed: Which.
        database: Where the host stores.
        stored: Returns how many rows of this schedule are stored, at once.
        rows: Reads the rows of triggers whose names begin so.

    Raises:
        AssertionError: Something is wrong; says how to repeat it.
    """
    loop = asyncio.get_running_loop()
    schedule = Schedule(seed, database, stored)
    faults: list[Any] = []
    loop.set_exception_handler(lambda _, context: faults.append(context))
    WORLDS[schedule.list] = schedule.world
    before = host_module.time
    host_module.time = _Time(loop)  # type: ignore[assignment]
    wrongs: list[str] = []
    with captured(schedule):
        try:
            await schedule.play()
        except Exception as error:
            wrongs.append("".join(traceback.format_exception(error)))
            await schedule.abandon()
        finally:
            host_module.time = before  # type: ignore[assignment]
            del WORLDS[schedule.list]
    if not wrongs:
        found = [Stored(name, identity, **_of(payload)) for name, identity, payload in await rows(f"s{seed}t")]
        wrongs += Verdict(schedule, found).wrongs()
    wrongs += [f"the loop was told: {fault}" for fault in faults]
    if wrongs:
        raise ScheduleError(seed, wrongs, schedule)


@contextlib.contextmanager
def captured(schedule: Schedule) -> Iterator[None]:
    """Keep what is logged, between what the actors told."""

    def keep(_: Any, level: str, entry: Any) -> Any:
        schedule.log.append(entry)
        said = {name: value for name, value in entry.items() if name not in ("event", "exc_info")}
        if entry["event"].startswith("a trigger did not return to its shared stream"):
            schedule.world.seatless[entry["trigger_id"]].append([schedule.world.ticks, float("inf")])
        if entry.get("cause") == "overflow":
            schedule.world.overflows[entry["trigger_id"]].append(schedule.world.ticks)
        schedule.world.tell(f"[{level}] {entry['event']} {said}")
        raise structlog.DropEvent

    with capture_logs():
        processors = structlog.get_config()["processors"]
        before = processors.copy()
        processors[:] = [keep]
        try:
            yield
        finally:
            processors[:] = before


def _of(payload: str) -> dict[str, Any]:
    given = json.loads(payload)
    return {"n": given["n"], "part": given["part"]}


class ScheduleError(AssertionError):
    """What is wrong, and how to see it again."""

    def __init__(self, seed: int, wrongs: list[str], schedule: Schedule) -> None:
        self.wrongs, self.schedule = wrongs, schedule
        said = "\n".join(wrongs[:10])
        super().__init__(
            f"{len(wrongs)} things are wrong after the schedule {seed}; to repeat it:\n"
            f"    PROOF_SEED={seed} pytest tests/services/triggerer/test_proof_host.py -k repeated\n{said}"
        )


async def rows_of(database: Database, prefix: str) -> list[tuple[str, str | None, str]]:
    """Return what is stored for the triggers whose names begin so: name, identity and payload, in order."""

    def read(connection: Connection) -> list[Any]:
        statement = text(
            "SELECT t.name, e.identity, e.payload FROM trigger_event e JOIN trigger t ON t.id = e.trigger_id "
            "WHERE t.name >= :low AND t.name < :high ORDER BY e.id"
        )
        return list(connection.execute(statement, {"low": prefix, "high": prefix[:-1] + "u"}))

    loop: Any = asyncio.get_running_loop()
    loop.busy += 1
    try:
        return [(row.name, row.identity, row.payload) for row in await database.read(read)]
    finally:
        loop.busy -= 1
