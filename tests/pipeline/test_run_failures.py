"""Runs of messages of which one fails, or whose sink does: the rest is delivered once, in order, and counted off."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from tests.pipeline.conftest import P0, message

from tidemill.core.errors import RemoteError
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction
from tidemill.sinks.base import Encoded, Refusal
from tidemill.sinks.payloads import FilePayload, HttpPayload
from tidemill.testing.run import build_scripted_sinks
from tidemill.testing.scripted import ScriptedSink

HUNDRED = range(100)
SOON: dict[str, Any] = {
    "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.02},
    "breaker": {"failures": 2, "open_seconds": 0.05},
}


class Lines(Handler[Any, Any]):
    """Two lines for each message, into one file."""

    async def transform(self, messages):
        return [
            [FilePayload(path="out", data=m.offset), FilePayload(path="out", data=m.offset + 0.5)] for m in messages
        ]


def data_of(payloads: Sequence[Any]) -> list[float]:
    return [payload.data for payload in payloads]


def lines_of(offsets: Any) -> list[float]:
    return [n + half for n in offsets for half in (0, 0.5)]


def load_is_zero(run: Any) -> bool:
    owned = run.engine.intake.partitions[P0]
    return owned.undelivered == owned.undelivered_bytes == owned.unresolved == 0


async def start(rig: Any, handler: Handler[Any, Any], **config: Any) -> Any:
    """Start an engine whose first window waits at its sink for the test to prepare."""
    run = rig(handler, [message(offset) for offset in HUNDRED], delivery=SOON, **config)
    run.files.open.clear()
    return run


async def test_a_sink_that_raises_over_one_payload_of_a_run_costs_its_message_alone(rig):
    run = await start(rig, Lines())

    def refuse(payload: Any) -> Refusal | None:
        if payload.data == 37.5:
            raise ValueError("what is this?")
        return None

    run.files.refuse = refuse
    run.files.open.set()
    await run.committed(100)
    (letter,) = run.letters.letters
    assert (letter.kind, [source.offset for source in letter.sources]) == ("delivery", [37])
    assert len(letter.original_payloads) == 1, "its other payload was delivered"
    assert data_of(run.files.payloads) == [n for n in lines_of(HUNDRED) if n != 37.5]
    await run.until(lambda: load_is_zero(run))


async def test_one_that_is_too_large_is_a_letter_of_its_kind(rig):
    run = await start(rig, Lines())
    run.files.refuse = lambda payload: (
        Refusal("too large", retryable=False, oversize=True) if payload.data in (37, 37.5) else None
    )
    run.files.open.set()
    await run.committed(100)
    (letter,) = run.letters.letters
    assert (letter.kind, len(letter.original_payloads)) == ("oversize", 2)
    await run.until(lambda: load_is_zero(run))


async def test_a_sink_that_is_down_opens_its_breaker_and_gets_everything_in_order_when_it_is_back(rig):
    run = await start(rig, Lines())
    is_down = True

    def refuse(payload: Any) -> Refusal | None:
        if is_down:
            raise RemoteError("connection refused")
        return None

    run.files.refuse = refuse
    run.files.open.set()
    await run.until(lambda: any(sender.stats.breaker_opened for sender in run.engine.outbox._all))
    assert run.source.committed.get(P0) is None
    is_down = False
    await run.committed(100)
    assert run.letters.letters == []
    assert data_of(run.files.payloads) == lines_of(HUNDRED)
    await run.until(lambda: load_is_zero(run))


@pytest.mark.parametrize("action", list(DeliveryAction))
async def test_what_on_delivery_error_decides_about_one_payload_frees_the_run(rig, action):
    class Deciding(Lines):
        asked = 0

        async def on_delivery_error(self, error):
            self.asked += 1
            assert data_of(error.payloads) == [37.5]
            refused.clear()
            return action

    refused = [37.5]
    handler = Deciding()
    run = await start(rig, handler)
    run.files.refuse = lambda payload: Refusal("no", retryable=False) if payload.data in refused else None
    run.files.open.set()
    await run.committed(100)
    assert handler.asked == 1
    assert len(run.letters.letters) == (action is DeliveryAction.DLQ)
    assert (37.5 in data_of(run.files.payloads)) is (action is DeliveryAction.RETRY)
    await run.until(lambda: load_is_zero(run))


class Half:
    """Confirms the first batch, and then waits."""

    def __init__(self, sink: Any) -> None:
        self.sink = sink
        self.sent: list[list[float]] = []
        self.gate = asyncio.Event()
        sink.max_batch_count = 40
        self._send = sink.send
        sink.send = self.send

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        self.sent.append([item.body.data for item in batch])
        if len(self.sent) > 1:
            await self.gate.wait()
        return await self._send(batch)  # type: ignore[no-any-return]


async def revoke_half_delivered(rig: Any, monkeypatch: pytest.MonkeyPatch, **config: Any) -> tuple[Any, Half]:
    halves: list[Half] = []

    def build_halved(settings: Any) -> Any:
        sinks = build_scripted_sinks(settings)
        halves.append(Half(sinks["filesystem"]["files"]))
        return sinks

    monkeypatch.setitem(rig.__globals__, "build_scripted_sinks", build_halved)
    run = rig(Lines(), [message(offset) for offset in HUNDRED], **config)
    await run.until(lambda: len(halves[0].sent) == 2)
    return run, halves[0]


async def test_a_revoke_in_the_middle_of_a_run_commits_what_was_delivered_of_it(rig, monkeypatch):
    run, half = await revoke_half_delivered(rig, monkeypatch, kafka={"revoke_timeout_seconds": 0.2})
    done = run.files.payloads[-1].data
    await asyncio.wait_for(run.source.revoke(P0), 30)
    assert run.source.committed[P0] == int(done + 0.5), "the messages whose payloads are both delivered"
    half.gate.set()
    await run.settled()
    assert run.letters.letters == []
    assert run.engine.progress().in_flight == 0
    assert run.source.committed[P0] == int(done + 0.5), "what is confirmed after the revoke counts no more"


async def test_a_drain_in_the_middle_of_a_run_waits_for_the_rest(rig, monkeypatch):
    run, half = await revoke_half_delivered(rig, monkeypatch)
    run.engine.drain()
    half.gate.set()
    summary = await run.end()
    assert summary.progress.messages_done == 100
    assert run.source.committed[P0] == 100
    assert data_of(run.files.payloads) == lines_of(HUNDRED)


async def test_a_drain_that_takes_too_long_leaves_the_rest_of_a_run_to_be_redelivered(rig, monkeypatch):
    run, half = await revoke_half_delivered(rig, monkeypatch, executor={"drain_timeout_seconds": 0.2})
    await run.end()
    assert run.source.committed[P0] == 20
    assert run.letters.letters == []
    assert len(half.sent) == 2, "something was sent after the end"


async def test_each_message_of_a_run_has_an_idempotency_key_of_its_own_that_a_repeat_has_too(rig, monkeypatch):
    monkeypatch.setattr(ScriptedSink, "takes_idempotency_key", True)

    class Posting(Handler[Any, Any]):
        async def transform(self, messages):
            shared = HttpPayload(data="x")
            return [[shared, shared] for _ in messages]

    keys = []
    for size in (100, 7):
        config = {"sinks": {"http": {"web": {"url": "http://127.0.0.1:1"}}}, "executor": {"window_size": size}}
        run = rig(Posting(), [message(offset) for offset in HUNDRED], **config)
        await run.committed(100)
        keys.append([payload.idempotency_key for payload in run.sinks["http"]["web"].payloads])
    assert len(set(keys[0])) == 200
    assert keys[0] == keys[1], "another window, the same messages"
    await run.until(lambda: load_is_zero(run))
