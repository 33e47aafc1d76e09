"""Triggers that a host runs in tests; what they do is told in `DID`, what they read comes from `UPSTREAMS`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

from tidemill.core.errors import TidemillError
from tidemill.triggers.base import BaseEventTrigger, BaseTrigger, TaskSkippedEvent, TriggerEvent
from tidemill.triggers.shared_stream import AdvanceItem, SharedStreamProducer

#: What happened, by the name of the trigger.
DID: dict[str, list[str]] = defaultdict(list)


class Told(BaseTrigger):
    """Tells what becomes of it."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"tests.services.triggerer.hosted.{type(self).__name__}", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("done")

    async def cleanup(self) -> None:
        DID[self.trigger_id].append("cleanup")

    async def on_kill(self) -> None:
        DID[self.trigger_id].append("on_kill")


class Idle(BaseTrigger):
    """Waits for ever."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Idle", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.get_running_loop().create_future()
        yield TriggerEvent(None)


class Counting(Told):
    """Fires so many events, then waits or ends."""

    def __init__(self, count: int = 1, then: str = "end", identity: bool = False) -> None:
        super().__init__()
        self.count, self.then, self.identity = count, then, identity

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"count": self.count, "then": self.then, "identity": self.identity}
        return "tests.services.triggerer.hosted.Counting", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        DID[self.trigger_id].append("run")
        for n in range(self.count):
            yield TriggerEvent({"n": n}, identity=str(n) if self.identity else None)
        DID[self.trigger_id].append("yielded")
        if self.then == "wait":
            await asyncio.Event().wait()
        if self.then == "raise":
            raise RuntimeError("as it was told")


class EndingStream(Told):
    """Fires two events, then one that ends the task; it is not asked for more."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(0)
        yield TriggerEvent(1)
        yield TaskSkippedEvent(xcoms={"return_value": 7})
        DID[self.trigger_id].append("asked")


class Interrupting(Told):
    """Raises what would end the loop of all triggers, when it is created."""

    def __init__(self) -> None:
        raise KeyboardInterrupt


class InterruptingEnd(Counting):
    """Raises what would end the loop of all triggers, when it is killed."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.InterruptingEnd", super().serialize()[1]

    async def on_kill(self) -> None:
        await super().on_kill()
        raise KeyboardInterrupt


#: What the end of a `SlowEnd` waits for.
RELEASED = threading.Event()


class SlowEnd(Counting):
    """Takes its time to end the work outside."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.SlowEnd", super().serialize()[1]

    async def on_kill(self) -> None:
        await super().on_kill()
        while not RELEASED.is_set():
            await asyncio.sleep(0.02)


class Refusing(Told):
    def __init__(self) -> None:
        raise ValueError("not today, token=hunter2secret")


class Raising(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise OSError("the upstream is gone")
        yield


class RaisingAnyText(Told):
    """Raises what no encoder accepts, as a message with the name of a file may be, with a NUL and much of it."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise OSError("no file \udce9\0" + "x" * 3_000_000)
        yield


class MuteError(TidemillError):
    def __str__(self) -> str:
        raise RuntimeError


class RaisingMute(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise MuteError
        yield


class RaisingNothing(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise TidemillError("\n") from ValueError()
        yield


class Leaving(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise SystemExit(3)
        yield


class LeavingLater(Told):
    """Has a task of its own leave, as a library may, and waits."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        DID[self.trigger_id].append("run")
        helper = asyncio.create_task(self.leave())
        await asyncio.Event().wait()
        yield TriggerEvent(helper)

    async def leave(self) -> None:
        raise SystemExit(3)


class CancellingAll(Told):
    """Cancels all tasks of the loop."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        for task in asyncio.all_tasks():
            task.cancel()
        await asyncio.Event().wait()
        yield


class Helped(Counting):
    """Waits for a task of its own."""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Helped", super().serialize()[1]

    async def run(self) -> AsyncIterator[TriggerEvent]:
        DID[self.trigger_id].append("run")
        await asyncio.create_task(asyncio.sleep(0.3))
        yield TriggerEvent("helped")


class Cancelling(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise asyncio.CancelledError
        yield


class Silent(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        return
        yield


class Undescribable(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent(object())


class Large(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("x" * 1_100_000)


class WrongEvent(Told):
    async def run(self) -> AsyncIterator[Any]:
        yield {"not": "an event"}


class WrongIdentity(Told):
    async def run(self) -> AsyncIterator[Any]:
        yield TriggerEvent(1, identity=7)  # type: ignore[arg-type]


class Exiting(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise SystemExit(3)
        yield


class Delayed(Told):
    """Writes itself down as something absolute."""

    def __init__(self, delta: int | None = None, moment: int | None = None) -> None:
        super().__init__()
        self.moment = moment if moment is not None else 1000 + int(delta or 0)
        DID["moments"].append(str(self.moment))

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Delayed", {"moment": self.moment}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.Event().wait()
        yield


class StubbornKill(Counting):
    async def on_kill(self) -> None:
        DID[self.trigger_id].append("on_kill")
        await asyncio.Event().wait()

    async def cleanup(self) -> None:
        DID[self.trigger_id].append("cleanup")
        raise RuntimeError("cleanup fails")


class Upstream(SharedStreamProducer):
    """A broker in memory: keeps what was not advanced cleanly."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.items: asyncio.Queue[Any] = asyncio.Queue()
        self.advanced: list[tuple[Any, tuple[int, int, int]]] = []
        self.pulled: list[Any] = []
        self.subscribed_at_open = 0
        self.closed = 0

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        DID[self.name].append("open")
        while True:
            item = await self.items.get()
            self.pulled.append(item)
            yield item, item

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        self.advanced += [(item, tuple(outcome)) for item, outcome in batch]

    async def aclose(self) -> None:
        self.closed += 1
        DID[self.name].append("close")


UPSTREAMS: dict[str, Upstream] = {}


class Sharing(BaseEventTrigger):
    """Fires what the filter takes of a shared upstream."""

    def __init__(self, upstream: str, modulo: int = 1, stuck_on: int | None = None, deaf: bool = False) -> None:
        super().__init__()
        self.upstream, self.modulo, self.stuck_on, self.deaf = upstream, modulo, stuck_on, deaf

    def serialize(self) -> tuple[str, dict[str, Any]]:
        kwargs = {"upstream": self.upstream, "modulo": self.modulo, "stuck_on": self.stuck_on, "deaf": self.deaf}
        return "tests.services.triggerer.hosted.Sharing", kwargs

    def shared_stream_key(self) -> str:
        return self.upstream

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return UPSTREAMS[kwargs["upstream"]]

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for n in shared_stream:
            if n == self.stuck_on:
                if self.deaf:  # waits for something else than its stream, and never looks at that again
                    await asyncio.Event().wait()
                self.stuck_on = None
                async for _ in _never():
                    pass
            if n % self.modulo == 0:
                yield TriggerEvent(n, identity=str(n))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield


async def _never() -> AsyncIterator[None]:
    await asyncio.Event().wait()
    yield


class Timed(Told):
    """Writes itself down as the moment it was made at; no two are alike."""

    made = 0

    def __init__(self, delta: int = 0, moment: int | None = None, then: str = "wait") -> None:
        super().__init__()
        self.then = then
        if moment is None:
            Timed.made += 1
            moment = Timed.made + delta
        self.moment = moment

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Timed", {"moment": self.moment, "then": self.then}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        DID[self.trigger_id].append(f"moment {self.moment}")
        if self.then == "raise":
            raise RuntimeError("as it was told")
        if self.then == "wait":
            await asyncio.Event().wait()
        yield TriggerEvent(self.moment)


class Deaf(Told):
    """Does not end when it is asked to, until it has been asked so often."""

    def __init__(self, times: int = 2) -> None:
        super().__init__()
        self.times = times

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("there")
        DID[self.trigger_id].append("there")
        for _ in range(self.times):
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                DID[self.trigger_id].append(f"asked: {error.args[0]}")


class Nested(Told):
    """Waits for something that somebody else cancels."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        future = asyncio.get_running_loop().create_future()
        future.cancel()
        await future
        yield


class Badly(BaseEventTrigger):
    """Shares a stream with a filter that is no generator, and raises at once."""

    def __init__(self, upstream: str) -> None:
        super().__init__()
        self.upstream = upstream

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.Badly", {"upstream": self.upstream}

    def shared_stream_key(self) -> str:
        return self.upstream

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        return UPSTREAMS[kwargs["upstream"]]

    def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        raise ValueError("no filter")

    async def run(self) -> AsyncIterator[TriggerEvent]:
        raise AssertionError("it shares a stream")
        yield


class ExitingSomewhere(BaseEventTrigger, SharedStreamProducer):
    """Shares a stream with itself, and calls `sys.exit` in the method that it is told."""

    def __init__(self, where: str, upstream: str = "exits") -> None:
        super().__init__()
        self.where, self.upstream = where, upstream

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "tests.services.triggerer.hosted.ExitingSomewhere", {"where": self.where}

    def _here(self, where: str) -> None:
        if self.where == where:
            DID["exits"].append(where)
            sys.exit(where)

    def shared_stream_key(self) -> str:
        self._here("key")
        return self.upstream

    @classmethod
    def create_shared_stream_producer(cls, kwargs: dict[str, Any]) -> SharedStreamProducer:
        producer = cls(**kwargs)
        producer._here("producer")
        return producer

    async def open_stream(self) -> AsyncIterator[tuple[Any, Any]]:
        self._here("open")
        yield 1, 1
        await asyncio.Event().wait()

    async def advance(self, batch: Sequence[AdvanceItem]) -> None:
        self._here("advance")

    async def aclose(self) -> None:
        self._here("close")

    def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        self._here("filter")
        return self._events(shared_stream)

    async def _events(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        async for n in shared_stream:
            yield TriggerEvent(n)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("by itself")

    async def on_kill(self) -> None:
        self._here("on_kill")

    async def cleanup(self) -> None:
        self._here("cleanup")


class Unhashable(ExitingSomewhere):
    """Has a key that cannot be one."""

    def shared_stream_key(self) -> Any:
        return [self.upstream]


class Text(str):
    """As those of NumPy or lxml: a text whose class no database knows."""


class OddIdentity(Told):
    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("odd", identity=Text("odd"))


class Tidying(Told):
    """Takes its time to clean up after it has finished."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield TriggerEvent("done")
        DID[self.trigger_id].append("finishing")

    async def cleanup(self) -> None:
        DID[self.trigger_id].append("cleaning")
        await asyncio.sleep(0.2)
        DID[self.trigger_id].append("clean")


class Trickling(Told):
    """Fires numbers, one after another, forever."""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        n = 0
        while True:
            await asyncio.sleep(0.02)
            DID[self.trigger_id].append(str(n))
            yield TriggerEvent(n)
            n += 1

    async def cleanup(self) -> None:
        return
