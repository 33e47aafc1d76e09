"""Sinks that raise over a batch: one payload's fault is its own, in the pipeline and in a redrive."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pydantic
import pytest

from tidemill.config.sections.delivery_settings import DeliverySettings
from tidemill.config.sections.sink_settings import FilesystemSinkSettings, MongoSinkSettings, RedisSinkSettings
from tidemill.config.settings import Settings
from tidemill.core.deadletters.redrive import UnsentReason
from tidemill.core.errors import RemoteError
from tidemill.deadletters.letter import Letter, LetterKind, describe_sources
from tidemill.deadletters.payloads import encode_payload
from tidemill.deadletters.redrive import sinks as redrive_sinks
from tidemill.deadletters.redrive.sinks import SinkTarget, restore_payload
from tidemill.deadletters.redrive.targets import RedriveItem
from tidemill.pipeline.delivery.outbox import Outbox
from tidemill.pipeline.delivery.routing import Origin
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.sinks.base import Encoded, Refusal, Sink, to_json
from tidemill.sinks.files import FilesystemSink
from tidemill.sinks.mongo import MongoSink
from tidemill.sinks.payloads import CollectResult, CustomPayload, FilePayload, MongoPayload, RedisPayload
from tidemill.sinks.redis import RedisSink
from tidemill.testing.scripted import ScriptedDeadLetters

ERRORS = [
    TypeError("no"),
    ValueError("no"),
    KeyError("no"),
    AttributeError("no"),
    OverflowError("no"),
    RuntimeError("no"),
    OSError("no"),
]


class Writer(Sink):
    """Writes one payload after the other, and raises at those that are bad; as many sinks of users do."""

    type = "writer"

    def __init__(self, error: Exception) -> None:
        super().__init__("out")
        self.error = error
        self.down: Exception | None = None
        self.calls = 0
        self.written: list[Any] = []

    async def connect(self) -> None:
        pass

    def encode(self, payload: Any) -> Encoded:
        return Encoded(payload.key, payload.data, len(to_json(payload.data)))

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        self.calls += 1
        if self.down is not None:
            raise self.down
        for item in batch:
            if str(item.body).startswith("bad"):
                raise self.error
            self.written.append(item.body)
        return [None] * len(batch)

    async def close(self) -> None:
        pass


async def delivered(sink: Sink, payloads: Sequence[Any], **settings: Any) -> tuple[list[Any], Outbox]:
    """Send payloads through an outbox; return what was dead-lettered."""
    letters = ScriptedDeadLetters()
    quick = {"initial_seconds": 0.001, "max_seconds": 0.01}
    outbox = Outbox(
        {"writer": {"out": sink}}, letters, None, DeliverySettings.model_validate({"retry_backoff": quick, **settings})
    )
    await outbox.connect()
    released: list[int] = []
    for number, payload in enumerate(payloads):
        origin = Origin([SourceMessage("in", 0, number, b"k", b"v")])
        outbox.submit(outbox.route(CollectResult(custom=[payload])), origin, lambda n=number: released.append(n))
    await outbox.flush(10.0)
    assert sorted(released) == list(range(len(payloads)))
    await outbox.close()
    return [json.loads(text)["data"] for letter in letters.letters for text in letter.original_payloads], outbox


def of(data: Any, key: Any = None) -> CustomPayload:
    return CustomPayload(type="writer", key=key, data=data)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("at", [0, 1, 25, 49])
async def test_the_payload_at_which_a_sink_raises_is_refused_and_the_others_arrive(error: Exception, at: int) -> None:
    sink = Writer(error)
    payloads = [of("bad" if n == at else n) for n in range(50)]
    letters, outbox = await delivered(sink, payloads)
    assert letters == ["bad"]
    counts = Counter(sink.written)
    assert sorted(counts) == [n for n in range(50) if n != at]
    assert max(counts.values()) <= 3
    assert sink.calls <= 20
    stats = outbox.statistics().sinks["sinks.custom.writer.out"]
    assert (stats.delivered_payloads, stats.dead_lettered, stats.breaker_opened) == (49, 1, 0)
    assert "no" in (stats.last_error or "")


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_keys_stay_in_order_while_the_culprit_is_looked_for(error: Exception) -> None:
    sink = Writer(error)
    payloads = [of(f"bad{n}" if n in (3, 30, 31) else n, key=n % 4) for n in range(60)]
    letters, _ = await delivered(sink, payloads)
    assert sorted(letters) == ["bad3", "bad30", "bad31"]
    for key in range(4):
        last = list(dict.fromkeys(reversed([n for n in sink.written if n % 4 == key])))[::-1]
        assert last == sorted(last)
        assert len(last) == len([n for n in range(60) if n % 4 == key and n not in (3, 30, 31)])


async def test_a_sink_that_raises_while_it_is_down_costs_no_letters() -> None:
    sink = Writer(RuntimeError("no"))
    sink.down = ConnectionResetError("peer")
    original = sink.send

    async def send(batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        if sink.calls == 20:
            sink.down = None
        return await original(batch)

    sink.send = send  # type: ignore[method-assign]
    letters, outbox = await delivered(sink, [of(n) for n in range(40)], breaker={"failures": 5, "open_seconds": 0.02})
    assert letters == []
    assert sorted(sink.written) == list(range(40))
    assert outbox.statistics().sinks["sinks.custom.writer.out"].breaker_opened == 1


@pytest.mark.parametrize("key", [["a"], {"a": 1}, ("a", [1])])
async def test_a_key_that_cannot_be_hashed_is_that_payloads_refusal(key: Any) -> None:
    sink = Writer(ValueError("no"))
    letters, outbox = await delivered(sink, [of(1), of(2, key=key), of(3)])
    assert letters == [2]
    assert sink.written == [1, 3]
    assert "is not hashable; use text or a tuple" in (
        outbox.statistics().sinks["sinks.custom.writer.out"].last_error or ""
    )


@pytest.mark.parametrize("made", [None, (1, 2, 3), Encoded("k", b"", "many")])  # type: ignore[arg-type]
async def test_what_encode_makes_is_checked(made: Any) -> None:
    sink = Writer(ValueError("no"))
    original = sink.encode
    sink.encode = lambda payload: made if payload.data == 2 else original(payload)  # type: ignore[method-assign]
    letters, _ = await delivered(sink, [of(1), of(2), of(3)])
    assert (letters, sink.written) == ([2], [1, 3])


@pytest.mark.parametrize("answer", [None, [], "no", [3]])
async def test_a_sink_that_answers_nonsense_has_failed_and_no_payload_is_blamed(answer: Any) -> None:
    sink = Writer(ValueError("no"))
    original = sink.send

    async def send(batch: Sequence[Encoded]) -> Any:
        answers = await original(batch)
        return answer if sink.calls <= 2 else answers

    sink.send = send  # type: ignore[method-assign]
    letters, outbox = await delivered(sink, [of(1)])
    assert letters == []
    assert "InvariantError" in (outbox.statistics().sinks["sinks.custom.writer.out"].last_error or "")


# -- dead letters to their sinks ----------------------------------------------------------------------------------


class Cursor:
    def __init__(self) -> None:
        self.positions: list[Any] = []

    def open(self) -> None:
        pass

    def commit(self, records: Any, positions: Any) -> None:
        self.positions.append(dict(positions))


class Redrive:
    """A target whose only sink is given."""

    def __init__(self, sink: Sink, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(redrive_sinks, "build_sinks", lambda settings: {"writer": {"out": sink}})
        monkeypatch.setattr(redrive_sinks, "_BACKOFF", redrive_sinks.Backoff(0.001, 0.01))
        monkeypatch.setattr(redrive_sinks, "GIVE_UP_SECONDS", 0.5)
        self.cursor = Cursor()
        self.target = SinkTarget(Settings.model_validate({}), self.cursor)  # type: ignore[arg-type]

    def items(self, *payloads: CustomPayload) -> list[RedriveItem]:
        letters = [
            Letter(
                kind=LetterKind.DELIVERY,
                error="refused",
                sink_type="writer",
                sink_name="out",
                original_payloads=[encode_payload(payload)],
                sources=describe_sources([SourceMessage("in", 0, n, b"k", b"v")]),
            )
            for n, payload in enumerate(payloads)
        ]
        return [self.target.prepare(letter, 0, n) for n, letter in enumerate(letters)]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("keyed", [False, True])
@pytest.mark.parametrize("at", [0, 7, 29])
def test_a_redrive_to_a_sink_gets_past_the_payload_at_which_it_raises(
    error: Exception, keyed: bool, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = Writer(error)
    redrive = Redrive(sink, monkeypatch)
    payloads = [of(f"bad{n}" if n == at else n, key=n % 5 if keyed else None) for n in range(30)]
    unsent = redrive.target.send(redrive.items(*payloads), {0: 30})
    redrive.target.close()
    ((item, why, text),) = unsent
    assert (item.offset, why) == (at, UnsentReason.REFUSED)
    assert "no" in text
    counts = Counter(sink.written)
    assert sorted(counts) == [n for n in range(30) if n != at]
    assert max(counts.values()) <= 3
    assert redrive.cursor.positions == [{0: 30}]
    if keyed:
        for key in range(5):
            last = list(dict.fromkeys(reversed([n for n in sink.written if n % 5 == key])))[::-1]
            assert last == sorted(last)


def test_a_redrive_to_a_sink_that_raises_at_everything_ends_and_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = Writer(ValueError("no"))
    redrive = Redrive(sink, monkeypatch)
    items = redrive.items(*(of(n) for n in range(30)))
    sink.down = OSError("unreachable")
    with pytest.raises(
        RemoteError, match=r"is not accepting payloads: OSError: unreachable \(.* in send\); run the same command"
    ):
        redrive.target.send(items, {0: 30})
    assert redrive.cursor.positions == []
    sink.down = None
    assert redrive.target.send(items, {0: 30}) == []
    redrive.target.close()


def test_a_redrive_to_a_sink_that_fails_for_good_ends_at_once_and_blames_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sink = Writer(ValueError("no"))
    redrive = Redrive(sink, monkeypatch)
    items = redrive.items(*(of(n) for n in range(3)))
    sink.down = RemoteError("access denied", retryable=False)
    with pytest.raises(RemoteError, match=r"writer.out: access denied; run the same command again to continue"):
        redrive.target.send(items, {0: 3})
    assert (redrive.cursor.positions, sink.calls) == ([], 1)
    redrive.target.close()


def test_a_letter_whose_key_cannot_be_hashed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    redrive = Redrive(Writer(ValueError("no")), monkeypatch)
    with pytest.raises(redrive_sinks.NotSentError, match="is not hashable") as caught:
        redrive.items(of(1, key=["a"]))
    assert caught.value.why is UnsentReason.REFUSED
    redrive.target.close()


class Model(pydantic.BaseModel):
    at: datetime.datetime
    raw: bytes


@pytest.mark.parametrize(
    "payload",
    [
        RedisPayload(key=b"\xff", data={"at": datetime.datetime(2026, 1, 1), "raw": b"\xff"}),
        RedisPayload(key="k", data=b"\xff", ttl=5),
        RedisPayload(key="k", op="hset", data={"raw": b"raw", "at": datetime.datetime(2026, 1, 1), "n": 1.5}),
        RedisPayload(key="k", op="hset", data=Model(at=datetime.datetime(2026, 1, 1), raw=b"raw")),
        RedisPayload(key="k", op="push", data=[b"raw", "text", {"n": [1]}, None]),
        RedisPayload(key="k", op="srem", data=b"raw"),
        RedisPayload(key="k", op="hdel", data=["a", b"raw"]),
        RedisPayload(key="k", op="zrem", data=(b"raw",)),
        RedisPayload(key="k", op="ltrim", data=(-5, -1)),
        RedisPayload(key="k", op="incrbyfloat", data=0.1),
        RedisPayload(key="k", op="expire", ttl=0.5),
        RedisPayload(key="k", op="script", script="s", data=["a", b"\xff", 1, 1.5, None]),
        FilePayload(path="a", data="text\n", op="replace"),
        FilePayload(path="a", data=b"\x00\xff", op="replace"),
        FilePayload(path="a", data={"n": b"raw"}),
        MongoPayload("", "c", {"raw": b"raw", "at": datetime.datetime(2026, 1, 1)}, "replace", {"_id": b"k"}),
        MongoPayload("", "c", {"$inc": {"n": 1}}, "update_many", {"at": {"$gt": datetime.datetime(2026, 1, 1)}}),
        MongoPayload("", "c", None, "delete_many", {"a": 1}),
    ],
    ids=repr,
)
def test_a_payload_of_a_letter_is_sent_as_it_would_have_been_at_first(payload: Any) -> None:
    sinks: dict[type, Sink] = {
        RedisPayload: RedisSink("out", RedisSinkSettings(scripts={"s": "return 1"})),
        FilePayload: FilesystemSink("out", FilesystemSinkSettings(base_path="x")),
        MongoPayload: MongoSink("out", MongoSinkSettings(uri="mongodb://h", database="d")),
    }
    sink = sinks[type(payload)]
    letter = Letter(
        kind=LetterKind.DELIVERY,
        error="refused",
        sink_type=sink.type,
        sink_name="out",
        original_payloads=[encode_payload(payload)],
    )
    assert sink.encode(restore_payload(letter, letter.original_payloads[0])) == sink.encode(payload)
