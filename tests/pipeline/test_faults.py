"""Sinks that are down, slow, silent, resetting or refusing, behind a proxy: nothing is lost, others are undisturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tests.faults import FaultyProxy, LineServer, LineSink
from tests.pipeline.conftest import P0, Rig, message
from tests.until import LIMIT_SECONDS, until

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.core.errors import RemoteError
from tidemill.deadletters.letter import LetterKind
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.pipeline.handler.base import Handler
from tidemill.pipeline.handler.models import DeliveryAction, DeliveryError, ExecutorTask, PrecomputedResult
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Encoded, Refusal
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSink

QUICK: dict[str, Any] = {
    "retry_backoff": {"initial_seconds": 0.01, "max_seconds": 0.05},
    "breaker": {"open_seconds": 0.1},
}


class Place:
    """An outbox with one sink behind a proxy, and one that always works."""

    def __init__(self, hook: Any = None, **delivery: Any) -> None:
        self.server = LineServer()
        self.proxy = FaultyProxy(self.server.port)
        self.sink = LineSink("faulty", self.proxy.port, "kafka")
        self.good = ScriptedSink("good", "filesystem")
        self.letters = ScriptedDeadLetters()
        self.outbox = Outbox(
            {"kafka": {"faulty": self.sink}, "filesystem": {"good": self.good}},
            self.letters,
            hook,
            DeliverySettings.model_validate({**QUICK, **delivery}),
        )
        self.released: list[int] = []

    def submit(self, *numbers: int) -> None:
        """Submit one payload for each sink, per number; keys are k0, k1, k2."""
        for number in numbers:
            collect = CollectResult(
                kafka=[KafkaPayload(key=f"k{number % 3}", data=number)], files=[FilePayload(path="p", data=number)]
            )
            origin = Origin([SourceMessage("in", 0, number)])
            self.outbox.submit(self.outbox.route(collect), origin, lambda n=number: self.released.append(n))

    async def until(self, condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
        await until(condition, seconds)

    def describe_wait(self) -> str:
        return self.outbox.describe_wait().get("sinks.kafka.faulty", "")

    def assert_all_there(self, count: int) -> None:
        """Each payload at least once and in the order of its key; the other sink has each exactly once."""
        for key in range(3):
            first_seen = list(dict.fromkeys(int(body) for body in self.server.bodies(f"k{key}")))
            assert first_seen == list(range(key, count, 3))
        assert [payload.data for payload in self.good.payloads] == list(range(count)), "the other sink was disturbed"
        assert sorted(self.released) == list(range(count))

    async def close(self) -> None:
        await self.outbox.close()
        self.proxy.close()
        self.server.close()


@pytest.fixture
async def place() -> AsyncIterator[Callable[..., Place]]:
    places: list[Place] = []

    def make(hook: Any = None, **delivery: Any) -> Place:
        places.append(Place(hook, **delivery))
        return places[-1]

    yield make
    for each in places:
        await each.close()


async def test_a_sink_that_is_down_leaves_no_dead_letter_with_defaults(place, long_run: bool) -> None:
    site = place(**({"retry_backoff": {}, "breaker": {}} if long_run else {}))
    await site.outbox.connect()
    site.submit(*range(60))
    await site.outbox.flush(10.0)
    site.proxy.down()
    for start in range(60, 300, 20):
        site.submit(*range(start, start + 20))
        await asyncio.sleep(0.01)
    await site.until(lambda: "circuit breaker open" in site.describe_wait())
    assert [payload.data for payload in site.good.payloads] == list(range(300)), "the other sink waited"
    await asyncio.sleep(10.0 if long_run else 1.0)  # the outage itself is what is tested
    assert site.letters.letters == []
    site.proxy.up()
    await site.outbox.flush(30.0)
    site.assert_all_there(300)
    assert site.letters.letters == []
    assert site.outbox.statistics().sinks["sinks.kafka.faulty"].breaker_opened == 1
    assert site.outbox.describe_wait() == {}


async def test_a_sink_that_resets_connections_gets_everything_in_the_end(place) -> None:
    site = place()
    await site.outbox.connect()
    for round_ in range(5):
        site.submit(*range(round_ * 60, round_ * 60 + 60))
        site.proxy.reset()
        await asyncio.sleep(0.05)
        site.proxy.up()
        await asyncio.sleep(0.05)
    await site.outbox.flush(20.0)
    site.assert_all_there(300)
    assert site.letters.letters == []
    assert site.outbox.statistics().sinks["sinks.kafka.faulty"].error_count > 0


async def test_a_slow_sink_delays_only_what_waits_for_it(place) -> None:
    site = place()
    await site.outbox.connect()
    site.proxy.slow(2.0)
    site.submit(*range(120))
    await site.until(lambda: len(site.good.payloads) == 120, 1.8)
    assert site.released == []
    await site.outbox.flush(60.0)
    site.assert_all_there(120)
    assert site.server.counts().most_common(1)[0][1] == 1, "a slow answer is an answer"
    assert site.letters.letters == []


async def test_a_sink_that_hangs_times_out_and_is_retried(place) -> None:
    site = place(timeout_seconds=0.2)
    await site.outbox.connect()
    site.proxy.hang()
    site.submit(*range(30))
    await site.until(lambda: "no answer within 0.2 s" in site.describe_wait())
    assert len(site.good.payloads) == 30
    site.proxy.up()
    await site.outbox.flush(20.0)
    site.assert_all_there(30)


async def test_a_sink_says_itself_how_long_it_may_take() -> None:
    class Patient(ScriptedSink):
        send_timeout_seconds = 30.0

    sinks = {"kafka": {"patient": Patient("patient", "kafka"), "other": ScriptedSink("other", "kafka")}}
    for sink in sinks["kafka"].values():
        sink.open.clear()
    outbox = Outbox(sinks, ScriptedDeadLetters(), None, DeliverySettings(timeout_seconds=0.05))
    await outbox.connect()
    payloads = [KafkaPayload("patient", None, 1), KafkaPayload("other", None, 1)]
    outbox.submit(outbox.route(CollectResult(kafka=payloads)), Origin([]), lambda: None)
    await until(lambda: "sinks.kafka.other" in outbox.describe_wait())
    assert "sinks.kafka.patient" not in outbox.describe_wait()
    await outbox.close()


async def test_a_sink_that_cannot_even_be_cancelled_keeps_its_payloads_no_longer(monkeypatch) -> None:
    monkeypatch.setattr("tidemill.sinks.sending.batch_sender.CANCEL_SECONDS", 0.05)
    wake = asyncio.Event()

    class Stubborn(ScriptedSink):
        calls = 0

        async def send(self, batch):
            self.calls += 1
            while self.calls == 1 and not wake.is_set():
                try:
                    await wake.wait()
                except asyncio.CancelledError:
                    pass
            return await super().send(batch)

    sink = Stubborn("out", "kafka")
    settings = DeliverySettings.model_validate({**QUICK, "timeout_seconds": 0.05})
    outbox = Outbox({"kafka": {"out": sink}}, ScriptedDeadLetters(), None, settings)
    await outbox.connect()
    released = asyncio.Event()
    outbox.submit(outbox.route(CollectResult(kafka=[KafkaPayload(data=1)])), Origin([]), released.set)
    async with asyncio.timeout(30):
        await released.wait()
    wake.set()
    await outbox.close()


async def test_one_refused_payload_of_a_batch_is_dead_lettered_and_the_others_are_sent_once(place) -> None:
    site = place()
    site.server.judge = lambda key, body: "never" if body == "17" else "ok"
    await site.outbox.connect()
    site.submit(*range(40))
    await site.outbox.flush(10.0)
    assert sorted(map(int, site.server.bodies())) == [n for n in range(40) if n != 17]
    (letter,) = site.letters.letters
    assert (letter.kind, letter.error, letter.sources[0].offset) == (LetterKind.DELIVERY, "never", 17)
    assert sorted(site.released) == list(range(40))


async def test_a_retry_sends_only_what_failed(place) -> None:
    asked: list[list[Any]] = []

    async def hook(error: DeliveryError) -> DeliveryAction:
        asked.append([payload.data for payload in error.payloads])
        return DeliveryAction.RETRY

    site = place(hook, max_retries=3)
    site.server.judge = lambda key, body: "never" if body in ("4", "17") else "ok"
    await site.outbox.connect()
    site.submit(*range(40))
    await site.outbox.flush(10.0)
    assert all(set(each) <= {4, 17} for each in asked)
    assert max(site.server.counts().values()) == 1
    assert len(site.letters.letters) == 2
    assert {letter.attempt_count for letter in site.letters.letters} == {4}, "one try, and three retries"
    assert sorted(site.released) == list(range(40))


async def test_a_sink_that_refuses_everything_for_good_leaves_every_payload_in_a_letter(place) -> None:
    site = place()
    site.server.judge = lambda key, body: "never"
    await site.outbox.connect()
    site.submit(*range(200))
    await site.outbox.flush(10.0)
    assert sorted(letter.sources[0].offset for letter in site.letters.letters) == list(range(200))
    assert sorted(site.released) == list(range(200))
    assert [payload.data for payload in site.good.payloads] == list(range(200))
    assert site.outbox.statistics().sinks["sinks.kafka.faulty"].breaker_opened == 0, "a sink that answers is not down"


async def test_what_is_down_for_too_long_is_a_question(place) -> None:
    asked: list[str] = []

    async def hook(error: DeliveryError) -> DeliveryAction:
        asked.append(error.error)
        return DeliveryAction.DLQ

    site = place(hook, max_seconds=0.5)
    await site.outbox.connect()
    site.proxy.down()
    started = asyncio.get_running_loop().time()
    site.submit(*range(20))
    await site.outbox.flush(10.0)
    assert asyncio.get_running_loop().time() - started >= 0.5
    assert asked
    assert sorted(letter.sources[0].offset for letter in site.letters.letters) == list(range(20))


async def test_an_open_breaker_can_send_to_the_dead_letters_and_closes_again(place) -> None:
    site = place(breaker={"open_seconds": 0.2, "failures": 2, "when_open": "dlq"})
    await site.outbox.connect()
    site.proxy.down()
    site.submit(*range(10))
    await site.until(lambda: len(site.letters.letters) == 10)
    site.submit(10)
    await site.until(lambda: len(site.letters.letters) == 11)
    await site.until(lambda: len(site.released) == 11)
    site.proxy.up()
    number = 11
    async with asyncio.timeout(30):
        while not site.server.lines:
            site.submit(number)
            number += 1
            await asyncio.sleep(0.02)
    await site.outbox.flush(5.0)
    site.submit(number)
    await site.until(lambda: str(number) in site.server.bodies())
    assert len(site.letters.letters) + len(site.server.lines) == number + 1


async def test_connections_are_made_side_by_side_and_a_failed_one_names_its_sink() -> None:
    servers = [LineServer() for _ in range(3)]
    proxies = [FaultyProxy(server.port) for server in servers]
    try:
        proxies[1].down()
        sinks = {f"s{n}": LineSink(f"s{n}", proxy.port, "kafka") for n, proxy in enumerate(proxies)}
        outbox = Outbox({"kafka": sinks}, ScriptedDeadLetters())
        with pytest.raises(RemoteError, match=r"sinks\.kafka\.s1: ConnectionRefusedError"):
            await outbox.connect()
        assert all(sink._streams is None for sink in sinks.values()), "the others stayed open"
    finally:
        for each in (*proxies, *servers):
            each.close()


# -- an engine behind a dead sink ------------------------------------------------------------------------------


class Large(Handler[Any, Any]):
    """A small message makes a large result."""

    async def arrange(self, messages, pending):
        return [
            ExecutorTask(f"t{m.offset}", source_offsets=(m.offset,), precomputed=PrecomputedResult(""))
            for m in messages
        ]

    async def on_task_complete(self, result):
        return CollectResult(files=[FilePayload(path="out", data="x" * 100_000)])


async def test_what_waits_for_a_dead_sink_is_bounded_in_bytes_and_continues_when_it_is_back(rig) -> None:
    limit = 2_000_000
    run = rig(
        Large(),
        [message(offset) for offset in range(400)],
        executor={"max_queued_bytes": limit, "window_max_bytes": 100_000, "window_size": 4},
    )
    run.files.open.clear()
    lane = await owned(run)
    await run.until(lambda: lane.undelivered_bytes >= limit)
    await run.settled()
    high = run.settings.executor.max_executors * run.settings.executor.backpressure_high_multiplier
    assert lane.undelivered_bytes <= limit + high * 100_100, "what was in flight may come on top, and nothing more"
    assert run.source.buffered(P0) > 150, "it went on reading"
    assert run.engine.progress().paused == ["t/0"]
    run.files.open.set()
    await run.committed(400)
    assert lane.undelivered_bytes == 0


async def test_tasks_do_not_start_while_too_much_waits_for_a_sink(rig) -> None:
    class Big(Large):
        async def arrange(self, messages, pending):
            return [
                ExecutorTask(f"t{m.offset}", ("x",), source_offsets=(m.offset,), binary_path="/bin/true")
                for m in messages
            ]

    limit = 1_000_000
    run = rig(
        Big(),
        [message(offset) for offset in range(60)],
        executor={"max_queued_bytes": limit, "window_max_bytes": 100_000, "max_executors": 2},
    )
    run.files.open.clear()
    lane = await owned(run)
    await run.until(lambda: lane.parked and not run.engine.context.pool.statistics().running)
    # What runs, and what ended and had no hook yet, may come on top: a hook begins up to three turns of the loop later.
    assert lane.undelivered_bytes <= limit + 4 * 2 * 100_100
    assert run.engine.progress().tasks_queued == len(lane.parked) + run.engine.context.pool.statistics().queued > 30
    run.files.open.set()
    await run.committed(60)


async def owned(run: Rig) -> Any:
    await run.until(lambda: P0 in run.engine.intake.partitions)
    return run.engine.intake.partitions[P0]


async def test_a_dead_sink_holds_the_offsets_of_its_messages_and_of_no_others(rig) -> None:
    class Both(Handler[Any, Any]):
        async def arrange(self, messages, pending):
            return [
                ExecutorTask(
                    f"{m.partition}-{m.offset}",
                    source_offsets=(m.offset,),
                    precomputed=PrecomputedResult(""),
                    metadata={"partition": m.partition},
                )
                for m in messages
            ]

        async def on_task_complete(self, result):
            if result.task.metadata["partition"] == 0:
                return CollectResult(files=[FilePayload(path="out", data=1)])
            return CollectResult(kafka=[KafkaPayload(key="k", data=1)])

    run = rig(
        Both(),
        [message(n, partition=p) for p in (0, 1) for n in range(20)],
        delivery=QUICK,
    )
    down = True

    async def send(batch: list[Encoded]) -> list[Refusal | None]:
        if down:
            raise RemoteError("down")
        return [None] * len(batch)

    run.files.send = send
    await run.committed(20, ("t", 1))
    await run.until(lambda: "circuit breaker open" in run.engine.progress().waits.get("sinks.filesystem.files", ""))
    assert P0 not in run.source.committed
    down = False
    await run.committed(20)
    assert run.letters.letters == []
