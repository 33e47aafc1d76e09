"""Triggers for the proof of the host: each does to each event what a script says, and writes down that it did it.

What is written down is what a run did, not what the host made of it: that is what the proof compares the host with.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from tests.services.triggerer.proof_broker import Broker

from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.triggers.base import BaseEventTrigger, TriggerEvent
from tidemill.triggers.shared_stream import SharedStreamProducer, reject_shared_stream_event

WORLDS: dict[str, World] = {}

#: What an actor may do to an event beside firing for it, and how often it is drawn.
TROUBLE = {
    "raise": 6, "raise after": 3, "reject": 2, "reject after": 1, "helper rejects": 1, "stale reject": 2, "late": 6,
    "stall": 2, "stuck": 1, "deaf": 1, "bad": 2, "bad after": 1, "bad identity": 1, "poison": 2, "poison after": 1,
    "double": 4, "exit": 1, "return": 2, "swallow": 1,
}  # fmt: skip
#: Those that are the fault of the actor; after any of them a letter about the event may name it.
_LASTING = ("raise", "raise after", "bad", "bad after", "poison", "poison after", "reject", "reject after", "stall")


@dataclass(slots=True)
class Run:
    """One run of an actor: how it ended, and in which listing it was."""

    name: str
    listing: int
    host: int
    began: int
    ended: int | None = None
    ending: str = ""
    fired: int = 0
    cleaned: int = 0
    restarts: frozenset[str] = frozenset()


@dataclass
class World:
    """A broker, the actors over it, and what they did.

    Attributes:
        broker: What they read.
        seed: What the script is drawn from.
        trouble: How likely an actor does something else with an event than firing for it.
        ack_timeout: That of the host.
        read: The ticks and times at which an actor was given an event.
        real: What an actor really did to an event that may be blamed on it, with tick and time.
        runs: All of them, in order.
        listing: How often an actor was listed again: 0 while it never was.
        calm: Whether to do nothing more that is not always done.
    """

    broker: Broker
    seed: int
    trouble: float
    ack_timeout: float
    restarts: dict[str, str]
    applied: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    seatless: dict[str, list[list[float]]] = field(default_factory=lambda: defaultdict(list))
    overflows: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    ticks: int = 0
    read: dict[tuple[str, int], list[tuple[int, float]]] = field(default_factory=lambda: defaultdict(list))
    real: dict[tuple[str, int], list[tuple[int, float, str]]] = field(default_factory=lambda: defaultdict(list))
    runs: list[Run] = field(default_factory=list)
    listing: Counter[str] = field(default_factory=Counter)
    attempts: Counter[tuple[str, int]] = field(default_factory=Counter)
    made: Counter[str] = field(default_factory=Counter)
    cleaned: Counter[str] = field(default_factory=Counter)
    host: int = 0
    calm: bool = False
    helpers: set[asyncio.Task[None]] = field(default_factory=set)
    trace: list[str] = field(default_factory=list)

    def tick(self) -> int:
        self.ticks += 1
        return self.ticks

    def tell(self, what: str) -> int:
        """Write down what happened."""
        tick = self.tick()
        self.trace.append(f"{tick:6} {asyncio.get_running_loop().time():9.3f} {what}")
        return tick

    def accepts(self, name: str, n: int) -> bool:
        """Tell whether the filter of an actor accepts an event."""
        return bool(random.Random(f"{self.seed}/{name}/{n}/accepts").random() < 0.7)

    def identity(self, name: str, n: int, part: int = 0) -> str | None:
        """Return the identity of what an actor fires for an event; one in four actors has none."""
        return f"{n}/{part}" if random.Random(f"{self.seed}/{name}/identity").random() < 0.75 else None

    def act(self, name: str, n: int) -> str:
        """Return what an actor does to an event this time."""
        attempt = self.attempts[name, n]
        self.attempts[name, n] += 1
        rng = random.Random(f"{self.seed}/{name}/{n}")
        if rng.random() >= self.trouble:
            return "fire"
        kind = rng.choices(list(TROUBLE), list(TROUBLE.values()))[0]
        if self.restarts[name] != "always" and rng.random() < 0.5:
            kind = "fire"
        lasts = rng.random() < 0.3 and kind in _LASTING
        if lasts or (attempt < rng.choice([1, 1, 1, 2, 3]) and not self.calm):
            return kind
        return "fire"

    def did(self, name: str, n: int, what: str) -> None:
        """Write down something that may be blamed on an actor."""
        self.real[name, n].append((self.tell(f"{name} did to {n}: {what}"), asyncio.get_running_loop().time(), what))


class Actor(BaseEventTrigger):
    """Does to each event what the script of its world says.

    Args:
        world: Which.
        version: Makes it another one.
    """

    def __init__(self, world: str, version: int = 0) -> None:
        super().__init__()
        self.world_name, self.version = world, version
        self.world = WORLDS[world]
        self.run_of: Run | None = None

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.proof_actors.Actor", {"world": self.world_name, "version": self.version}

    def shared_stream_key(self) -> str:
        # Called once for each that is made.
        if self.run_of is None:
            self.world.made[self.trigger_id] += 1
            self.run_of = Run(
                self.trigger_id, self.world.listing[self.trigger_id], self.world.host, self.world.tell(f"{self} made")
            )
            self.world.runs.append(self.run_of)
            for window in self.world.seatless[self.trigger_id]:
                window[1] = min(window[1], self.run_of.began)
        return self.world_name

    def __repr__(self) -> str:
        return f"{self.trigger_id}.{self.version}"

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return WORLDS[kwargs["world"]].broker.producer()

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield

    async def cleanup(self) -> None:
        self.world.cleaned[self.trigger_id] += 1
        if self.run_of is not None:
            self.run_of.cleaned += 1
            if self.run_of.ended is None:
                self._end("never ran")

    def _end(self, ending: str) -> None:
        assert self.run_of is not None
        self.run_of.ending = ending
        self.run_of.restarts = frozenset(self.world.applied[self.trigger_id])
        self.run_of.ended = self.world.tell(f"{self} ended: {ending}")

    async def filter_shared_stream(self, shared_stream: AsyncIterator[SourceMessage]) -> AsyncGenerator[TriggerEvent]:
        try:
            async for event in self._acts(shared_stream):
                assert self.run_of is not None
                self.run_of.fired += 1
                yield event
        except GeneratorExit:
            self._end("closed")
            raise
        except asyncio.CancelledError as error:
            self._end(f"cancelled: {error.args[0] if error.args else ''}")
            raise
        except BaseException as error:
            self._end(f"raised: {type(error).__name__}")
            raise
        self._end("returned")

    async def _acts(self, stream: AsyncIterator[SourceMessage]) -> AsyncGenerator[Any]:
        world, name = self.world, self.trigger_id
        swallow = False
        while True:
            try:
                message = await stream.__anext__()
            except StopAsyncIteration:
                return
            except Exception:
                if not swallow:
                    raise
                swallow = False
                world.tell(f"{self} swallows what its stream raised")
                await asyncio.sleep(0.05)
                continue
            n = int(message.value or b"")
            act = world.act(name, n)
            tick = world.tell(f"{self} reads {n}: {act}")
            world.read[name, n].append((tick, asyncio.get_running_loop().time()))
            swallow = swallow or act == "swallow"
            accepts = world.accepts(name, n)
            async for event in self._before(act, n):
                yield event
            if accepts:
                if act == "poison":
                    world.did(name, n, act)
                yield self._event(n, 0, poison=act == "poison")
                if act == "double":
                    yield self._event(n, 1)
            async for event in self._after(act, n):
                yield event
            if act == "return":
                return

    def _event(self, n: int, part: int, *, poison: bool = False) -> TriggerEvent:
        payload = {"n": n, "name": self.trigger_id, "part": part, **({"poison": True} if poison else {})}
        return TriggerEvent(payload, identity=self.world.identity(self.trigger_id, n, part))

    async def _before(self, act: str, n: int) -> AsyncGenerator[Any]:
        world, name = self.world, self.trigger_id
        if act == "raise":
            world.did(name, n, act)
            raise ValueError(f"not {n}")
        if act == "exit":
            world.did(name, n, act)
            raise SystemExit(3)
        if act == "reject":
            world.did(name, n, act)
            reject_shared_stream_event()
        elif act == "helper rejects":
            self._help(n, 0.01)
            await asyncio.sleep(0.02)
        elif act == "stale reject":
            self._help(n, None)
        elif act == "late":
            await asyncio.sleep(random.Random(f"{world.seed}/{name}/{n}/late").choice([0.001, 0.02, 0.1]))
        elif act == "stall":
            await asyncio.sleep(1.5 * world.ack_timeout)
        elif act == "stuck":
            await asyncio.Event().wait()
        elif act == "deaf":
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                world.tell(f"{self} does not hear that it is cancelled")
            await asyncio.sleep(0.5)
        elif act in ("bad", "bad identity"):
            world.did(name, n, act)
            yield TriggerEvent(object()) if act == "bad" else TriggerEvent(n, identity=7)  # type: ignore[arg-type]

    async def _after(self, act: str, n: int) -> AsyncGenerator[Any]:
        world, name = self.world, self.trigger_id
        if act == "raise after":
            world.did(name, n, act)
            raise ValueError(f"not after {n}")
        if act == "reject after":
            world.did(name, n, act)
            reject_shared_stream_event()
        elif act == "bad after":
            world.did(name, n, act)
            yield TriggerEvent(object())
        elif act == "poison after":
            world.did(name, n, act)
            yield self._event(n, 2, poison=True)

    def _help(self, n: int, seconds: float | None) -> None:
        """Start a task that rejects the event, at once or when the filter has moved past it."""
        world, name = self.world, self.trigger_id

        async def reject() -> None:
            if seconds is None:
                await asyncio.sleep(0.03)
                world.tell(f"a helper of {name} rejects {n}, if that is the current event")
                moved = [read for read in world.read.items() if read[0][0] == name]
                if max((when, what) for what, times in moved for when in times)[1] == (name, n):
                    world.did(name, n, "helper rejects in time")
            else:
                await asyncio.sleep(seconds)
                world.did(name, n, "helper rejects")
            reject_shared_stream_event()

        task = asyncio.get_running_loop().create_task(reject(), name=f"helper of {name}")
        world.helpers.add(task)
        task.add_done_callback(world.helpers.discard)
