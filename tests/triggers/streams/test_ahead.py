"""An `async for` over a stream that many read, which takes events ahead: nobody can tell."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.triggers.streams.scripted_streams import Scene, pull, turns

from tidemill.core.streams.fanout import CHUNK
from tidemill.triggers.shared_stream import StreamEnded, SubscriberOverflow
from tidemill.triggers.streams.async_for import is_async_for


class Reader:
    """A task that reads a stream by `async for`, and stops at an event until it may go on."""

    def __init__(self, stream: AsyncIterator[Any], stop_at: Any = None) -> None:
        self.found: list[Any] = []
        self.stop_at = stop_at
        self.may_go_on = asyncio.Event()
        self.stream = stream
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for event in self.stream:
            self.found.append(event)
            if event == self.stop_at:
                await self.may_go_on.wait()


def scene_of_many(**settings: Any) -> tuple[Scene, list[Any]]:
    scene = Scene(ack=False, **settings)
    return scene, [scene.join(number) for number in range(5)]


async def test_an_async_for_is_told_from_a_call() -> None:
    class Source:
        def __init__(self) -> None:
            self.found: list[bool] = []

        def __aiter__(self) -> Source:
            self.found.append(is_async_for(sys._getframe(1)))
            return self

        async def __anext__(self) -> int:
            raise StopAsyncIteration

    source = Source()
    async for _ in source:
        raise AssertionError
    assert [one async for one in source] == []
    assert source.found == [True, True]
    aiter(source), source.__aiter__()
    assert source.found == [True, True, False, False]


async def test_whoever_calls_aiter_gets_coroutines() -> None:
    scene, streams = scene_of_many()
    scene.put("e1")
    stream = aiter(streams[0])
    assert stream is streams[0]
    request = stream.__anext__()
    assert inspect.iscoroutine(request)
    assert await asyncio.create_task(request) == "e1"
    await scene.manager.stop_all()


@pytest.mark.parametrize("burst", [1, 7, CHUNK])
async def test_each_reads_all_events_in_order_at_its_own_pace(burst: int) -> None:
    scene, streams = scene_of_many()
    readers = [Reader(stream, stop_at=number * 50) for number, stream in enumerate(streams)]
    events = list(range(2 * CHUNK + 10))
    for first in range(0, len(events), burst):
        scene.put(*events[first : first + burst])
        await turns(3)
        if first == CHUNK:
            readers.append(Reader(scene.join(5)))
    for number, reader in enumerate(readers[:5]):
        assert reader.found == events[: number * 50 + 1]
        assert reader.stream.taken == number * 50 + 1
        reader.may_go_on.set()
    await turns()
    assert [reader.found for reader in readers[:5]] == [events] * 5
    assert [reader.found[-1] for reader in readers[5:]] == [events[-1]] * len(readers[5:])
    await scene.manager.stop_all()
    for reader in readers:
        reader.task.cancel()


async def test_what_is_taken_ahead_counts_as_unread_when_it_gets_too_much() -> None:
    scene, streams = scene_of_many(max_subscriber_queue=8)
    stuck, other = Reader(streams[0], stop_at="e1"), Reader(streams[1])
    scene.put("e1")
    await turns()
    scene.put("e2", "e3", "e4", "e5")
    await turns()
    stuck.stop_at = "e3"
    stuck.may_go_on.set()
    stuck.may_go_on.clear()
    await turns()
    assert stuck.found == ["e1", "e2", "e3"]
    for number in range(6, 13):
        # It has left more than eight unread with the twelfth.
        assert 0 not in scene.manager.report()[0].failed
        scene.put(f"e{number}")
        await turns()
    assert 0 in scene.manager.report()[0].failed
    stuck.may_go_on.set()
    with pytest.raises(SubscriberOverflow):
        await stuck.task
    assert stuck.found == ["e1", "e2", "e3"]
    assert other.found == [f"e{number}" for number in range(1, 13)]
    await scene.manager.stop_all()
    other.task.cancel()


async def read_ahead(**settings: Any) -> tuple[Scene, Reader]:
    """Return a reader that is on the first of three events, and has taken the others ahead."""
    scene, streams = scene_of_many(**settings)
    await turns()
    scene.put("e1", "e2", "e3")
    await turns()
    reader = Reader(streams[0], stop_at="e1")
    await turns()
    assert reader.found == ["e1"]
    return scene, reader


async def test_one_that_leaves_reads_nothing_more() -> None:
    scene, reader = await read_ahead()
    await scene.leave(0)
    reader.may_go_on.set()
    await reader.task
    assert (reader.found, reader.stream.taken) == (["e1"], 1)
    await scene.manager.stop_all()


async def test_a_failure_drops_what_was_taken_ahead() -> None:
    scene, reader = await read_ahead()
    scene.put(OSError("broker gone"))
    await turns()
    reader.may_go_on.set()
    for _ in range(2):
        with pytest.raises(OSError, match="broker gone"):
            await reader.task
        reader.task = asyncio.create_task(reader._read())
    with pytest.raises(OSError, match="broker gone"):
        await anext(reader.stream)
    assert reader.found == ["e1"]
    reader.task.cancel()


async def test_single_requests_and_other_loops_continue_where_the_loop_is() -> None:
    scene, streams = scene_of_many()
    await turns()
    stream = streams[0]
    scene.put(*range(8))
    await turns()
    found = []
    async for event in stream:
        found.append(("outer", event))
        found.append(("next", await anext(stream)))
        async for inner in stream:
            found.append(("inner", inner))
            break
        if event:
            break
    assert found == [(what, n) for n, what in enumerate(["outer", "next", "inner", "outer", "next", "inner"])]
    assert await pull(stream) == [6]
    scene.put(8, 9)
    await turns()
    assert await pull(stream, 2) == [7, 8]
    async for event in stream:
        assert event == 9
        break
    assert stream.taken == 10
    await scene.manager.stop_all()


async def test_a_loop_that_is_cancelled_while_it_waits_loses_nothing() -> None:
    scene, streams = scene_of_many()
    for _ in range(2):
        waiting = Reader(streams[0])
        await turns()
        waiting.task.cancel()
        await asyncio.wait({waiting.task})
    scene.put("e1", "e2")
    reader = Reader(streams[0])
    await turns()
    assert reader.found == ["e1", "e2"]
    await scene.manager.stop_all()
    reader.task.cancel()


async def test_two_loops_that_wait_at_once_are_an_error() -> None:
    scene, streams = scene_of_many()
    readers = [Reader(streams[0]) for _ in range(2)]
    await turns()
    with pytest.raises(RuntimeError, match="two tasks"):
        await readers[1].task
    scene.put(StopAsyncIteration)
    with pytest.raises(StreamEnded):
        await readers[0].task
