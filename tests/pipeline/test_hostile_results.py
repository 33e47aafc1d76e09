"""Results of hooks whose own classes raise, lie, or are shared: one message is dead-lettered, the engine goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.pipeline.conftest import P0, message

from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import ExecutorTask, PrecomputedResult
from tidemill.sinks.base import Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload, HttpPayload
from tidemill.testing.scripted import ScriptedSink

TEN = range(10)


class Panic(BaseException):
    """What an extension in Rust raises when it fails."""


ERRORS = [ValueError("not this one"), Panic("index out of bounds"), SystemExit(3), asyncio.CancelledError()]


def line(offset: int) -> FilePayload:
    return FilePayload(path="out", data=offset)


class Lazy(Sequence[Any]):
    """Makes each place when it is looked at; that of message 5 cannot be made."""

    def __init__(self, offsets: Sequence[int], error: BaseException, where: str) -> None:
        self.offsets, self.error, self.where = offsets, error, where

    def __len__(self) -> int:
        if self.where == "len" and 5 in self.offsets:
            raise self.error
        return len(self.offsets)

    def __getitem__(self, index: Any) -> Any:
        if self.where == "place" and self.offsets[index] == 5:
            raise self.error
        return line(self.offsets[index])


class Silent:
    """Cannot be shown."""

    def __repr__(self) -> str:
        raise Panic("in the repr")


async def ended(run: Any, offset: int = 10) -> None:
    """Wait until an offset is committed; fail if the engine ends before that."""
    await run.until(lambda: run._task.done() or run.source.committed.get(P0) == offset)
    assert not run._task.done(), "the engine ended"


def data_of(run: Any) -> list[Any]:
    return [payload.data for payload in run.files.payloads]


@pytest.mark.parametrize("where", ["len", "place"])
@pytest.mark.parametrize("error", ERRORS)
async def test_places_that_cannot_be_made_cost_their_message_alone(rig, error, where):
    class Lazily(Handler[Any, Any]):
        async def transform(self, messages):
            return Lazy([m.offset for m in messages], error, where)

    run = rig(Lazily(), [message(n) for n in TEN])
    await ended(run)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset) == ("transform", 5)
    assert str(error) in letter.error
    assert data_of(run) == [n for n in TEN if n != 5]


class Known(Handler[Any, Any]):
    """A known result per message."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult(str(m.offset)))
            for m in messages
        ]


@pytest.mark.parametrize("hook", ["on_task_complete", "on_message_complete"])
@pytest.mark.parametrize("error", ERRORS)
async def test_payloads_that_cannot_be_made_are_the_letter_of_their_message(rig, error, hook):
    async def collect(of: Any) -> CollectResult:
        offset = int(of.stdout) if hook == "on_task_complete" else of.source_message.offset
        return CollectResult(files=Lazy([offset], error, "place"))  # type: ignore[arg-type]

    handler = Known()
    setattr(handler, hook, collect)
    run = rig(handler, [message(n) for n in TEN])
    await ended(run)
    (letter,) = run.letters.letters
    assert (letter.kind, letter.sources[0].offset, letter.original_payloads) == ("hook", 5, [])
    assert sorted(data_of(run)) == [n for n in TEN if n != 5]


@pytest.mark.parametrize("error", ERRORS)
async def test_what_a_window_returns_may_raise_too(rig, error):
    class Windows(Known):
        async def on_window_complete(self, results, messages):
            return CollectResult(files=Lazy([5], error, "place"))  # type: ignore[arg-type]

    run = rig(Windows(), [message(n) for n in TEN])
    await ended(run)
    await run.until(lambda: run.letters.letters)
    assert run.letters.letters[0].kind == "hook"
    assert not run._task.done()


@pytest.mark.parametrize("returned", [lambda messages: Silent(), lambda messages: [Silent() for _ in messages]])
async def test_a_wrong_result_that_cannot_be_shown_is_a_letter(rig, returned):
    class Wrong(Handler[Any, Any]):
        async def transform(self, messages):
            return returned(messages)

    class Arranging(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return returned(messages)

    for handler in (Wrong(), Arranging()):
        run = rig(handler, [message(n) for n in range(3)])
        await ended(run, 3)
        assert [letter.sources[0].offset for letter in run.letters.letters] == [0, 1, 2]
        assert "in the repr" in run.letters.letters[0].error


async def test_a_list_that_yields_fewer_places_than_it_says_loses_no_message(rig):
    class Short(list[Any]):
        def __iter__(self) -> Any:
            return iter([line(99)])

    class Lying(Handler[Any, Any]):
        async def transform(self, messages):
            return Short([line(m.offset) for m in messages]) if len(messages) > 1 else [line(messages[0].offset)]

    run = rig(Lying(), [message(n) for n in TEN])
    await ended(run)
    assert data_of(run) == list(TEN)


class Model:
    """Data that raises whatever is done with it."""

    def model_dump(self, **options: Any) -> None:
        raise Panic("in the dump")

    def model_dump_json(self) -> str:
        raise Panic("in the dump")

    def __repr__(self) -> str:
        raise Panic("in the repr")


@pytest.mark.parametrize("sink", ["", "nowhere"])
async def test_a_payload_that_can_neither_be_sent_nor_shown_is_a_letter(rig, sink):
    class Opaque(Handler[Any, Any]):
        async def transform(self, messages):
            return [
                FilePayload(path="out", data=Model(), sink=sink) if m.offset == 5 else line(m.offset) for m in messages
            ]

    run = rig(Opaque(), [message(n) for n in TEN])
    await ended(run)
    (letter,) = run.letters.letters
    assert letter.sources[0].offset == 5
    assert "a Model that cannot be shown" in letter.original_payloads[0]


async def test_a_plain_function_may_return_one_future_for_all_messages(rig):
    class Together(Known):
        async def arrange(self, messages, pending):
            self.done = asyncio.get_running_loop().create_future()
            self.calls = 0
            return await super().arrange(messages, pending)

        def on_task_complete(self, result: Any) -> Any:
            self.calls += 1
            if self.calls == 10:
                asyncio.get_running_loop().call_soon(self.done.set_result, None)
            return self.done

    run = rig(Together(), [message(n) for n in TEN])
    await ended(run)
    assert run.letters.letters == []
    assert run.engine.context.hooks.calls.list_open() == []


async def test_a_payload_is_not_initialised_again_for_its_idempotency_key(rig, monkeypatch):
    monkeypatch.setattr(ScriptedSink, "takes_idempotency_key", True)

    class Strict(HttpPayload):
        def __post_init__(self) -> None:
            if self.idempotency_key:
                raise ValueError("only the pipeline may set this")

    class Posting(Handler[Any, Any]):
        async def transform(self, messages):
            shared = Strict(data="x")
            return [shared for _ in messages]

    run = rig(Posting(), [message(n) for n in TEN], sinks={"http": {"web": {"url": "http://127.0.0.1:1"}}})
    await ended(run)
    assert len({payload.idempotency_key for payload in run.sinks["http"]["web"].payloads}) == 10


async def test_an_answer_of_on_delivery_error_may_raise_when_it_is_looked_at(rig):
    class Answer:
        def __hash__(self) -> int:
            raise Panic("in the hash")

    class Answering(Handler[Any, Any]):
        async def transform(self, messages):
            return [line(m.offset) for m in messages]

        async def on_delivery_error(self, error):
            return Answer()

    run = rig(Answering(), [message(n) for n in TEN])
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if payload.data == 5 else None
    await ended(run)
    assert [letter.sources[0].offset for letter in run.letters.letters] == [5]
