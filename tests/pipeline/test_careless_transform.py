"""What careless handlers do in `transform`: each gets an error that says what to do, and nothing else suffers."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tests.pipeline.conftest import P0, message

from tidemill.core.errors import HandlerError
from tidemill.pipeline.handler.base import Handler
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload
from tidemill.spark.preflight import make_handler


def line(offset: int) -> FilePayload:
    return FilePayload(path="out", data=offset)


async def nothing() -> None:
    return None


def of(returned: Any) -> Handler[Any, Any]:
    """Return a handler whose `transform` returns this, or what it returns for the messages."""

    class Careless(Handler[Any, Any]):
        async def transform(self, messages):
            return returned(messages) if callable(returned) else returned

    return Careless()


@pytest.mark.parametrize(
    ("returned", "error"),
    [
        (lambda messages: (line(m.offset) for m in messages), "; make it a list"),
        (lambda messages: {m.offset: line(m.offset) for m in messages}, "not dict"),
        (lambda messages: {1, 2}, "not set"),
        (lambda messages: line(0), "not FilePayload"),
        (lambda messages: nothing(), "is an `await` missing?"),
        (lambda messages: [nothing()], "is an `await` missing?"),
        (lambda messages: [(line(0) for _ in "ab")], "item 0 must be a payload, a list of payloads, or None, not gen"),
        (lambda messages: [{"path": "out"}], "item 0 must be a payload, a list of payloads, or None, not dict"),
        (lambda messages: [[line(0), None]], "a payload must be one of"),
        (lambda messages: [[line(0), [line(0)]]], "a payload must be one of"),
        (lambda messages: [FilePayload], "item 0 must be a payload, a list of payloads, or None, not StructMeta"),
        (lambda messages: [FilePayload(path="out", data=object(), sink="no")], "sinks.filesystem.no is not configured"),
        (lambda messages: CollectResult(files=line(0)), "files"),
        (lambda messages: next(iter(())), "StopIteration"),
        (lambda messages: [][0], "IndexError"),
    ],
)
@pytest.mark.filterwarnings("ignore:coroutine 'nothing' was never awaited:RuntimeWarning")
async def test_a_wrong_result_is_a_letter_that_names_it(rig, returned, error):
    run = rig(of(returned), [message(0)])
    await run.committed(1)
    (letter,) = run.letters.letters
    assert letter.kind == "transform"
    assert error in letter.error
    assert run.files.payloads == []


async def test_a_tuple_does(rig):
    run = rig(of(lambda messages: tuple((line(m.offset),) for m in messages)), [message(n) for n in range(10)])
    await run.committed(10)
    assert [payload.data for payload in run.files.payloads] == list(range(10))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), StopIteration(1)])
@pytest.mark.parametrize("is_async", [True, False])
async def test_whatever_is_raised_concerns_one_message(rig, error, is_async):
    def convert(messages):
        if any(m.offset == 5 for m in messages):
            raise error
        return [line(m.offset) for m in messages]

    async def later(messages):
        return convert(messages)

    def at_once(messages):
        convert(messages)
        return later(messages)

    handler = of(None)
    # What a decorator puts in its place may be a plain function.
    handler.transform = later if is_async else at_once
    run = rig(handler, [message(n) for n in range(10)])
    await run.committed(10)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == ("transform", 5)
    assert [payload.data for payload in run.files.payloads] == [n for n in range(10) if n != 5]


@pytest.mark.parametrize("hook", ["on_message_complete", "on_window_complete", "on_delivery_error"])
async def test_a_plain_function_in_place_of_another_hook_that_exits_does_not_end_the_engine(rig, hook):
    def leave(*arguments: Any) -> None:
        raise SystemExit(3)

    handler = of(lambda messages: [line(m.offset) for m in messages])
    setattr(handler, hook, leave)
    run = rig(handler, [message(n) for n in range(3)])
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if hook == "on_delivery_error" else None
    await run.committed(3)
    await run.until(lambda: run.letters.letters)
    assert not run._task.done()


class Model:
    """Data whose own dump does what it likes."""

    def __init__(self, n: int) -> None:
        self.n = n

    def model_dump_json(self) -> str:
        if self.n == 5:
            raise SystemExit("in the dump")
        return f"{self.n}"


async def test_a_payload_whose_dump_exits_concerns_one_message(rig):
    run = rig(
        of(lambda messages: [FilePayload(path="out", data=Model(m.offset)) for m in messages]),
        [message(n) for n in range(10)],
    )
    await run.committed(10)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == ("delivery", 5)
    assert [payload.data.n for payload in run.files.payloads] == [n for n in range(10) if n != 5]


async def test_a_message_that_it_would_change_is_dead_lettered_and_the_others_pass(rig):
    class Changing(Handler[Any, Any]):
        async def transform(self, messages):
            for m in messages:
                if m.offset == 3:
                    m.key = 5
            return [line(m.offset) for m in messages]

    run = rig(Changing(), [message(n) for n in range(10)])
    await run.committed(10)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == ("transform", 3)
    assert "key of a message cannot be changed, only its payload" in letter.error
    assert [payload.data for payload in run.files.payloads] == [n for n in range(10) if n != 3]


async def test_messages_that_it_changes_are_committed_as_they_came(rig):
    class Changing(Handler[Any, Any]):
        async def transform(self, messages):
            places = [line(m.offset) for m in messages]
            for m in messages:
                m.payload = None
            messages.reverse()
            del messages[1:]
            return places

    run = rig(Changing(), [message(n) for n in range(10)])
    await run.committed(10)
    assert [payload.data for payload in run.files.payloads] == list(range(10))
    assert run.letters.letters == []


async def test_the_same_payload_for_all_is_delivered_for_each(rig):
    payload = line(7)
    run = rig(of(lambda messages: [payload] * len(messages)), [message(n) for n in range(10)])
    await run.committed(10)
    assert [payload.data for payload in run.files.payloads] == [7] * 10


class Stuck(Handler[Any, Any]):
    def __init__(self) -> None:
        self.entered = asyncio.Event()

    async def transform(self, messages):
        self.entered.set()
        await asyncio.Event().wait()


async def test_one_that_never_returns_does_not_stop_a_drain(rig):
    handler = Stuck()
    run = rig(handler, [message(0)], executor={"drain_timeout_seconds": 0.3})
    await handler.entered.wait()
    summary = await asyncio.wait_for(run.end(), 30)
    assert summary.progress.messages_done == 0
    assert run.source.committed.get(P0) is None
    assert run.letters.letters == []


async def test_one_that_swallows_its_cancellation_does_not_stop_a_drain(rig):
    class Deaf(Stuck):
        async def transform(self, messages):
            self.entered.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return [line(0)]

    handler = Deaf()
    run = rig(handler, [message(0)], executor={"drain_timeout_seconds": 0.3})
    await handler.entered.wait()
    await asyncio.wait_for(run.end(), 30)
    assert run.source.committed.get(P0) is None
    assert run.files.payloads == []


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("def transform(self, messages): return []", "must be an async def; write `async def transform"),
        ("async def transform(self, messages): yield 1", "has a `yield`, which makes it a generator"),
        ("def transform(self, messages): yield 1", "has a `yield`, which makes it a generator"),
        ("async def transform(self): return []", r"must accept \(self, messages\)"),
        ("async def transform(self, messages, pending): return []", r"must accept \(self, messages\)"),
        ("@staticmethod\n    async def transform(messages): return []", None),
    ],
)
def test_a_transform_that_cannot_be_called_is_refused_before_anything_starts(method, error):
    room: dict[str, Any] = {"Handler": Handler}
    exec(f"class Mine(Handler):\n    {method}", room)
    if error is None:
        make_handler(room["Mine"])
        return
    with pytest.raises(HandlerError, match=error):
        make_handler(room["Mine"])
