"""The outbox over scripted sinks, real files and a real broker: order, retries, hooks, letters, release."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.until import LIMIT_SECONDS, until

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.sections.sink_settings import FilesystemSinkSettings, KafkaSinkSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import AmbiguousSinkError, ConfigError, RemoteError, SinkNotConfiguredError
from tidemill.deadletters.letter import LetterKind, decode_letter
from tidemill.deadletters.writer import KafkaDeadLetters
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.pipeline.handler.models import DeliveryAction, DeliveryError, ExecutorTask
from tidemill.runtime.embedded.broker import EmbeddedBroker
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import WAITS, Encoded, Refusal
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.kafka import KafkaSink
from tidemill.sinks.payloads import CollectResult, FilePayload, KafkaPayload, RedisPayload
from tidemill.testing.kafka import consume, unique_name
from tidemill.testing.scripted import ScriptedDeadLetters, ScriptedSink

AGAIN = Refusal("not now", retryable=True)
NEVER = Refusal("never", retryable=False)
QUICK = {"initial_seconds": 0.001, "max_seconds": 0.01}


def delivery(**more: Any) -> DeliverySettings:
    return DeliverySettings.model_validate({"retry_backoff": QUICK, **more})


class Fixture:
    """An outbox over one scripted Kafka sink."""

    def __init__(self, hook: Callable[[DeliveryError], Awaitable[Any]] | None = None, **options: Any) -> None:
        self.script: dict[Any, list[Refusal | Exception]] = {}
        self.batches: list[list[Any]] = []
        self.sink = RecordingSink("out", "kafka", self)
        self.letters = ScriptedDeadLetters()
        self.outbox = Outbox({"kafka": {"out": self.sink}}, self.letters, hook, delivery(**options))
        self.released: list[Any] = []

    def submit(self, *payloads: KafkaPayload, partition: int = 0, name: Any = None) -> None:
        label = name if name is not None else payloads[0].data
        origin = Origin(
            [SourceMessage("in", partition, 5, b"k", b"v")], ExecutorTask("t-1", ["-x", "--password=hunter2"])
        )
        before = len(self.released)
        self.outbox.submit(
            self.outbox.route(CollectResult(kafka=payloads)), origin, lambda: self.released.append(label)
        )
        assert len(self.released) == before, "released inside submit"

    async def until(self, condition: Callable[[], object], seconds: float = LIMIT_SECONDS) -> None:
        await until(condition, seconds)

    @property
    def delivered(self) -> list[Any]:
        return [payload.data for payload in self.sink.payloads]


class RecordingSink(ScriptedSink):
    """Refuses by the script: one answer per try of a payload's data; '*' is for the whole batch."""

    def __init__(self, name: str, kind: str, fixture: Fixture) -> None:
        super().__init__(name, kind, self._answer)
        self.fixture = fixture

    def _answer(self, payload: Any) -> Refusal | None:
        answers = self.fixture.script.get(payload.data)
        answer = answers.pop(0) if answers else None
        assert not isinstance(answer, Exception)
        return answer

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        self.fixture.batches.append([item.body.data for item in batch])
        if self.fixture.script.get("*"):
            failure = self.fixture.script["*"].pop(0)
            assert isinstance(failure, Exception)
            raise failure
        return await super().send(batch)


async def test_a_submission_is_released_once_when_all_its_payloads_are_confirmed() -> None:
    fixture = Fixture()
    await fixture.outbox.connect()
    fixture.submit(*(KafkaPayload(data=n) for n in range(5)), name="five")
    fixture.submit(KafkaPayload(data=5), name="one")
    await fixture.outbox.flush(5.0)
    assert fixture.released == ["five", "one"]
    assert fixture.delivered == list(range(6))
    assert fixture.batches == [list(range(6))], "what is submitted in one turn goes in one batch"
    stats = fixture.outbox.statistics().sinks["sinks.kafka.out"]
    assert (stats.delivered_count, stats.delivered_payloads, fixture.outbox.statistics().delivered) == (1, 6, 6)
    assert stats.last_delivered_at is not None
    await fixture.outbox.close()


async def test_an_empty_submission_is_released_in_a_later_turn() -> None:
    fixture = Fixture()
    await fixture.outbox.connect()
    fixture.outbox.submit([], Origin([]), lambda: fixture.released.append("empty"))
    assert fixture.released == []
    await fixture.until(lambda: fixture.released == ["empty"])
    await fixture.outbox.close()


async def test_while_a_batch_is_in_flight_the_next_one_collects() -> None:
    fixture = Fixture()
    await fixture.outbox.connect()
    fixture.sink.open.clear()
    fixture.submit(KafkaPayload(data=0))
    await fixture.until(lambda: fixture.batches == [[0]])
    for number in range(1, 50):
        fixture.submit(KafkaPayload(data=number))
        await asyncio.sleep(0)
    assert len(fixture.batches) == 1
    fixture.sink.open.set()
    await fixture.outbox.flush(5.0)
    assert fixture.batches == [[0], list(range(1, 50))]
    await fixture.outbox.close()


async def test_names_are_resolved_before_anything_is_delivered() -> None:
    letters = ScriptedDeadLetters()
    one, two, only = ScriptedSink("one", "kafka"), ScriptedSink("two", "kafka"), ScriptedSink("f", "filesystem")
    outbox = Outbox({"kafka": {"one": one, "two": two}, "filesystem": {"f": only}}, letters)
    routed = outbox.route(CollectResult(kafka=[KafkaPayload("two", None, 1)], files=[FilePayload("", "p", 1)]))
    assert [each.sender.label for each in routed] == ["sinks.kafka.two", "sinks.filesystem.f"]
    with pytest.raises(AmbiguousSinkError, match="one, two"):
        outbox.route(CollectResult(files=[FilePayload("", "p", 1)], kafka=[KafkaPayload(data=1)]))
    with pytest.raises(SinkNotConfiguredError, match=r"sinks\.kafka\.three is not configured; configured: one, two"):
        outbox.route(CollectResult(kafka=[KafkaPayload("three", None, 1)]))
    with pytest.raises(SinkNotConfiguredError, match=r"sinks\.redis"):
        outbox.route(CollectResult(redis=[RedisPayload()]))
    with pytest.raises(TypeError, match=r"CollectResult\.kafka must be a list of KafkaPayload; it contains"):
        outbox.route(CollectResult(kafka=[FilePayload("", "p", 1)]))  # type: ignore[list-item]
    assert outbox.route(CollectResult()) == []


async def test_a_refused_payload_is_retried_and_later_ones_of_its_key_wait() -> None:
    fixture = Fixture()
    fixture.script = {"a1": [AGAIN, AGAIN], "b1": [AGAIN]}
    await fixture.outbox.connect()
    for name in ("a1", "b1", "c1", "a2", "b2", "c2"):
        fixture.submit(KafkaPayload(key=name[0], data=name))
        await asyncio.sleep(0)
    await fixture.outbox.flush(5.0)
    assert sorted(fixture.delivered) == ["a1", "a2", "b1", "b2", "c1", "c2"]
    for key in "abc":
        assert [data for data in fixture.delivered if data[0] == key] == [f"{key}1", f"{key}2"]
    assert sorted(fixture.released) == sorted(fixture.delivered)
    stats = fixture.outbox.statistics().sinks["sinks.kafka.out"]
    assert (stats.refused, stats.retried, stats.last_error, fixture.letters.letters) == (3, 3, "not now", [])
    await fixture.outbox.close()


async def test_a_payload_that_only_waited_for_another_is_not_counted_as_refused() -> None:
    fixture = Fixture()
    fixture.script = {"a1": [NEVER], "a2": [WAITS], "a3": [WAITS, NEVER]}
    await fixture.outbox.connect()
    fixture.submit(*(KafkaPayload(key="a", data=f"a{n}") for n in (1, 2, 3)), name="three")
    await fixture.outbox.flush(5.0)
    assert fixture.batches == [["a1", "a2", "a3"], ["a2", "a3"]]
    assert fixture.delivered == ["a2"]
    stats = fixture.outbox.statistics().sinks["sinks.kafka.out"]
    assert (stats.refused, stats.error_count, stats.last_error) == (2, 2, "never")
    assert [(letter.sink_type, letter.attempt_count) for letter in fixture.letters.letters] == [("kafka", 1)] * 2
    await fixture.outbox.close()


@pytest.mark.parametrize("failure", [RemoteError("sink down"), OSError("sink down"), TimeoutError("sink down")])
async def test_a_sink_that_fails_is_retried_with_everything_in_order(failure: Exception) -> None:
    fixture = Fixture(retry_backoff={"initial_seconds": 0.05, "max_seconds": 0.05}, breaker={"failures": 100})
    fixture.script = {"*": [failure] * 8}
    await fixture.outbox.connect()
    for number in range(10):
        fixture.submit(KafkaPayload(key="k", data=number))
    await fixture.until(lambda: fixture.outbox.describe_wait())
    assert "10 payloads wait" in fixture.outbox.describe_wait()["sinks.kafka.out"]
    assert "sink down" in fixture.outbox.describe_wait()["sinks.kafka.out"]
    await fixture.outbox.flush(5.0)
    assert fixture.delivered == list(range(10))
    assert fixture.outbox.describe_wait() == {}
    await fixture.outbox.close()


async def test_wrong_answers_of_a_sink_are_a_failure_of_the_batch() -> None:
    class Forgetful(ScriptedSink):
        calls = 0

        async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
            self.calls += 1
            return [] if self.calls == 1 else await super().send(batch)

    sink = Forgetful("out", "kafka")
    outbox = Outbox({"kafka": {"out": sink}}, ScriptedDeadLetters(), None, delivery())
    await outbox.connect()
    outbox.submit(outbox.route(CollectResult(kafka=[KafkaPayload(data=1)])), Origin([]), lambda: None)
    await outbox.flush(5.0)
    assert (sink.calls, outbox.statistics().delivered) == (2, 1)
    assert "InvariantError" in (outbox.statistics().sinks["sinks.kafka.out"].last_error or "")
    await outbox.close()


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [(NEVER, LetterKind.DELIVERY), (Refusal("too large", retryable=False, oversize=True), LetterKind.OVERSIZE)],
)
async def test_without_a_hook_what_is_refused_for_good_becomes_one_letter_per_submission(
    refusal: Refusal, kind: LetterKind
) -> None:
    fixture = Fixture()
    fixture.script = {"a": [refusal], "b": [refusal], "d": [refusal]}
    fixture.letters.hold = True
    await fixture.outbox.connect()
    fixture.submit(KafkaPayload("", "k", "a"), KafkaPayload(data="b"), KafkaPayload(data="c"), name="abc")
    fixture.submit(KafkaPayload(data="d"), partition=3)
    await fixture.until(lambda: len(fixture.letters.letters) == 2)
    assert (fixture.released, fixture.delivered) == ([], ["c"])
    assert "dead letters" in fixture.outbox.describe_wait()
    fixture.letters.confirm()
    await fixture.outbox.flush(5.0)
    assert fixture.released == ["abc", "d"]
    first, second = fixture.letters.letters
    assert (first.kind, first.error, first.sink_name, first.sink_type) == (kind, refusal.error, "out", "kafka")
    assert [json.loads(each)["data"] for each in first.original_payloads] == ["a", "b"]
    assert (first.attempt_count, first.task_id, first.args, first.partition) == (
        1,
        "t-1",
        ["-x", "--password=***"],
        0,
    )
    assert [(s.topic, s.partition, s.offset, s.value) for s in second.sources] == [("in", 3, 5, "v")]
    assert fixture.outbox.statistics().sinks["sinks.kafka.out"].dead_lettered == 3
    await fixture.outbox.close()


async def test_the_hook_decides_and_hears_what_and_why() -> None:
    heard: list[DeliveryError] = []

    async def hook(error: DeliveryError) -> DeliveryAction:
        heard.append(error)
        return {"skip": DeliveryAction.SKIP, "retry": DeliveryAction.RETRY}.get(error.error, DeliveryAction.DLQ)

    fixture = Fixture(hook)
    refusals = {name: Refusal(name, retryable=False) for name in ("skip", "retry", "dlq")}
    fixture.script = {name: [refusal] for name, refusal in refusals.items()}
    fixture.script["retry"] *= 3
    await fixture.outbox.connect()
    for name in refusals:
        fixture.submit(KafkaPayload(key="same", data=name))
    await fixture.outbox.flush(5.0)
    assert sorted(fixture.released) == ["dlq", "retry", "skip"]
    assert fixture.delivered == ["retry"]
    assert [json.loads(each.original_payloads[0])["data"] for each in fixture.letters.letters] == ["dlq"]
    assert fixture.outbox.statistics().skipped == 1
    retries = [error for error in heard if error.error == "retry"]
    assert [error.attempt for error in retries] == [1, 2, 3]
    assert (retries[0].sink_name, retries[0].sink_type) == ("out", "kafka")
    assert retries[0].payloads == [KafkaPayload(key="same", data="retry")]
    await fixture.outbox.close()


@pytest.mark.parametrize("answer", [RuntimeError("hook is broken"), None, "nonsense", True])
async def test_a_hook_that_raises_or_answers_nonsense_means_dead_letter(answer: Any) -> None:
    async def hook(error: DeliveryError) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    fixture = Fixture(hook)
    fixture.script = {"a": [NEVER]}
    await fixture.outbox.connect()
    fixture.submit(KafkaPayload(data="a"))
    await fixture.outbox.flush(5.0)
    assert (fixture.released, len(fixture.letters.letters)) == (["a"], 1)
    await fixture.outbox.close()


async def test_other_keys_continue_while_a_hook_thinks() -> None:
    decide = asyncio.Event()

    async def hook(error: DeliveryError) -> DeliveryAction:
        await decide.wait()
        return DeliveryAction.SKIP

    fixture = Fixture(hook)
    fixture.script = {"a1": [NEVER]}
    await fixture.outbox.connect()
    for name in ("a1", "a2", "b1"):
        fixture.submit(KafkaPayload(key=name[0], data=name))
        await asyncio.sleep(0.01)
    assert fixture.delivered == ["b1"]
    assert "wait for on_delivery_error" in fixture.outbox.describe_wait()["sinks.kafka.out"]
    decide.set()
    await fixture.outbox.flush(5.0)
    assert fixture.delivered == ["b1", "a2"]
    await fixture.outbox.close()


async def test_after_the_budget_the_hook_is_asked_and_a_retry_has_one_more_budget() -> None:
    asked = 0

    async def hook(error: DeliveryError) -> DeliveryAction:
        nonlocal asked
        asked += 1
        return DeliveryAction.RETRY

    fixture = Fixture(hook, max_seconds=0.3, max_retries=1_000_000, breaker={"failures": 1_000_000})
    fixture.script = {"a": [AGAIN] * 100_000}
    await fixture.outbox.connect()
    started = asyncio.get_running_loop().time()
    fixture.submit(KafkaPayload(data="a"))
    await fixture.outbox.flush(10.0)
    assert 0.6 <= asyncio.get_running_loop().time() - started < 5
    assert asked == 1
    (letter,) = fixture.letters.letters
    assert (letter.kind, letter.error) == (LetterKind.DELIVERY, "not now")
    assert letter.attempt_count > 3  # on a busy machine few fit into the two budgets
    await fixture.outbox.close()


async def test_a_payload_that_cannot_be_encoded_is_dead_lettered_and_the_rest_arrives() -> None:
    asked: list[str] = []

    async def hook(error: DeliveryError) -> DeliveryAction:
        asked.append(error.error)
        return DeliveryAction.RETRY

    fixture = Fixture(hook)
    await fixture.outbox.connect()
    fixture.submit(KafkaPayload(data=object()), KafkaPayload(data="good"), name="both")
    await fixture.outbox.flush(5.0)
    assert (fixture.delivered, fixture.released) == (["good"], ["both"])
    assert "TypeError" in asked[0]
    (letter,) = fixture.letters.letters
    assert "object object" in letter.original_payloads[0]
    await fixture.outbox.close()


async def test_what_belongs_to_an_abandoned_partition_is_never_released() -> None:
    decide = asyncio.Event()

    async def hook(error: DeliveryError) -> DeliveryAction:
        await decide.wait()
        return DeliveryAction.DLQ

    fixture = Fixture(hook)
    fixture.script = {"asked": [NEVER], "again": [AGAIN] * 3}
    await fixture.outbox.connect()
    fixture.submit(KafkaPayload(data="asked"))
    fixture.submit(KafkaPayload(data="again"))
    await fixture.until(lambda: "wait" in fixture.outbox.describe_wait().get("sinks.kafka.out", ""))
    fixture.sink.open.clear()
    fixture.submit(KafkaPayload(data="in flight"))
    fixture.submit(KafkaPayload(data="other"), partition=1)
    await asyncio.sleep(0.02)
    fixture.submit(KafkaPayload(data="queued"))
    fixture.outbox.abandon(("in", 0))
    decide.set()
    fixture.sink.open.set()
    await fixture.outbox.flush(5.0)
    await asyncio.sleep(0.02)
    assert fixture.released == ["other"]
    assert fixture.letters.letters == []
    assert "queued" not in fixture.delivered
    await fixture.outbox.close()


async def test_flush_gives_up_at_its_deadline_and_close_abandons_the_rest() -> None:
    fixture = Fixture()
    await fixture.outbox.connect()
    fixture.sink.open.clear()
    fixture.submit(KafkaPayload(data="stuck"))
    fixture.submit(KafkaPayload(data="behind"))
    async with asyncio.timeout(30):
        await fixture.outbox.flush(0.05)
        await fixture.outbox.close()
    assert fixture.sink.closed
    fixture.submit(KafkaPayload(data="late"))
    fixture.sink.open.set()
    await asyncio.sleep(0.02)
    assert fixture.released == []


async def test_one_sink_that_cannot_connect_closes_the_others_and_is_named() -> None:
    class Broken(ScriptedSink):
        async def connect(self) -> None:
            raise OSError("no route")

    class Slow(ScriptedSink):
        async def connect(self) -> None:
            await asyncio.sleep(60)

    good, slow = ScriptedSink("good", "kafka"), Slow("slow", "kafka")
    outbox = Outbox({"kafka": {"good": good, "slow": slow, "bad": Broken("bad", "kafka")}}, ScriptedDeadLetters())
    with pytest.raises(RemoteError, match=r"sinks\.kafka\.bad: OSError: no route"):
        await outbox.connect()
    assert good.closed
    assert slow.closed
    outbox = Outbox({"kafka": {"slow": Slow("slow", "kafka")}}, ScriptedDeadLetters(), connect_seconds=0.05)
    with pytest.raises(RemoteError, match=r"sinks\.kafka\.slow: no connection within 0\.05 s"):
        await outbox.connect()


async def test_a_wrong_configuration_stays_one(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    sink = FilesystemSink("out", FilesystemSinkSettings(base_path=str(tmp_path / "f")))
    with pytest.raises(ConfigError, match=r"sinks\.filesystem\.out"):
        await Outbox({"filesystem": {"out": sink}}, ScriptedDeadLetters()).connect()


async def test_a_release_that_raises_affects_nothing_else() -> None:
    fixture = Fixture()
    await fixture.outbox.connect()
    routed = fixture.outbox.route(CollectResult(kafka=[KafkaPayload(data="a")]))
    fixture.outbox.submit(routed, Origin([]), lambda: 1 / 0)
    fixture.submit(KafkaPayload(data="b"))
    await fixture.outbox.flush(5.0)
    fixture.submit(KafkaPayload(data="c"))
    await fixture.outbox.flush(5.0)
    assert fixture.released == ["b", "c"]
    await fixture.outbox.close()


async def test_a_sink_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.sinks.sending.batch_sender.SLOW_SECONDS", 0.01)
    fixture = Fixture()
    await fixture.outbox.connect()
    fixture.sink.open.clear()
    fixture.submit(KafkaPayload(data="a"))
    await fixture.until(lambda: "no answer" in fixture.outbox.describe_wait().get("sinks.kafka.out", ""))
    fixture.sink.open.set()
    await fixture.outbox.flush(5.0)
    assert fixture.outbox.describe_wait() == {}
    await fixture.outbox.close()


async def test_many_results_arrive_in_the_order_of_their_partition(tmp_path: Path) -> None:
    sink = FilesystemSink("out", FilesystemSinkSettings(base_path=str(tmp_path)))
    outbox = Outbox({"filesystem": {"out": sink}}, ScriptedDeadLetters())
    await outbox.connect()
    released = 0

    def count() -> None:
        nonlocal released
        released += 1

    for number in range(20_000):
        payload = FilePayload(path=f"{number % 3}.jsonl", data=[number % 4, number])
        origin = Origin([SourceMessage("in", number % 4, number)])
        outbox.submit(outbox.route(CollectResult(files=[payload])), origin, count)
        if number % 100 == 0:
            await asyncio.sleep(0)
    await outbox.flush(30.0)
    await outbox.close()
    assert released == 20_000
    for name in range(3):
        lines = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert [number for _, number in lines] == list(range(name, 20_000, 3))


@pytest.mark.kafka
@pytest.mark.nightly  # test_kafka_sink.py has the outage, and a test above that a sink that fails gets all in order
async def test_a_broker_outage_delays_results_but_loses_none_and_keeps_their_order(
    own_kafka: Callable[..., EmbeddedBroker],
) -> None:
    broker = own_kafka()
    topic = broker.create_topic("out")
    client = {"delivery.timeout.ms": 500, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
    sink = KafkaSink(
        "out", KafkaSinkSettings(topic=topic, client_config=client), KafkaSettings(brokers=broker.bootstrap)
    )
    quick = delivery(
        retry_backoff={"initial_seconds": 0.05, "max_seconds": 0.2}, breaker={"open_seconds": 0.5, "failures": 2}
    )
    outbox = Outbox({"kafka": {"out": sink}}, ScriptedDeadLetters(), None, quick)
    await outbox.connect()
    released: list[int] = []

    def submit(number: int) -> None:
        routed = outbox.route(CollectResult(kafka=[KafkaPayload(key=f"k{number % 3}", data=number)]))
        outbox.submit(routed, Origin([SourceMessage("in", 0, number)]), lambda: released.append(number))

    for number in range(100):
        submit(number)
    await outbox.flush(20.0)
    assert len(released) == 100
    broker.kill()
    for number in range(100, 200):
        submit(number)
    await until(lambda: "sinks.kafka.out" in outbox.describe_wait())
    await asyncio.to_thread(broker.start)
    for number in range(200, 300):
        submit(number)
    await outbox.flush(60.0)
    await outbox.close()
    assert sorted(released) == list(range(300))
    values = [int(each.value() or b"") for each in consume(broker.bootstrap, topic, 300)]
    for key in range(3):
        of_key = [value for value in values if value % 3 == key]
        first_seen = list(dict.fromkeys(of_key))
        assert first_seen == list(range(key, 300, 3)), "a key came out of order, or something is missing"


@pytest.mark.kafka
async def test_a_result_that_the_topic_refuses_is_dead_lettered_with_its_size(
    embedded_kafka: EmbeddedBroker,
) -> None:
    topic = embedded_kafka.create_topic(unique_name("small"), config={"max.message.bytes": "5000"})
    dlq = embedded_kafka.create_topic(unique_name("dlq"), config={"max.message.bytes": "5000"})
    settings = Settings.model_validate({"kafka": {"brokers": embedded_kafka.bootstrap}, "dlq": {"topic": dlq}})
    letters = KafkaDeadLetters(settings)
    await letters.open()
    outbox = Outbox({"kafka": {"out": KafkaSink("out", KafkaSinkSettings(topic=topic), settings.kafka)}}, letters)
    await outbox.connect()
    released = asyncio.Event()
    payloads = [KafkaPayload(key="k", data=data) for data in ("first", "x" * 100_000, "last")]
    origin = Origin([SourceMessage("in", 2, 9, None, b"v" * 100_000)])
    outbox.submit(outbox.route(CollectResult(kafka=payloads)), origin, released.set)
    async with asyncio.timeout(30):
        await released.wait()
    await outbox.close()
    await letters.close()
    assert [each.value() for each in consume(embedded_kafka.bootstrap, topic, 2)] == [b'"first"', b'"last"']
    letter = decode_letter(consume(embedded_kafka.bootstrap, dlq, 1)[0].value() or b"")
    assert letter.kind is LetterKind.OVERSIZE
    assert json.loads(letter.original_payloads[0])["data"]["length"] == 100_002
    assert (letter.sources[0].partition, letter.sources[0].offset) == (2, 9)
    assert letter.sources[0].value.length == 100_000  # type: ignore[union-attr]
