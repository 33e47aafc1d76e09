"""The transactional producer's calls, stepped by hand: what no broker does when it should."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
import pytest

from tidemill.config.settings import KafkaSettings
from tidemill.core.transaction import End
from tidemill.sources.base import Fatal, Outgoing
from tidemill.sources.transactor import Transactor

TP = ("t", 0)


def error(code: int, *, retriable: bool = False, abort: bool = False, fatal: bool = False) -> ck.KafkaException:
    return ck.KafkaException(ck.KafkaError(code, "scripted", fatal, retriable, abort))


class Producer:
    """Answers each call by the script: an exception is raised, a function is called, the rest succeeds."""

    made: list[Producer]
    script: dict[str, list[Any]]

    def __init__(self, config: Any, logger: Any) -> None:
        self.made.append(self)
        self.config = config
        self.calls: list[str] = []
        self.produced: list[bytes] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        answers = self.script.get(name)
        answer = answers.pop(0) if answers else None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            answer()

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self._call(name)

    def produce(self, topic: str, value: bytes, key: Any, on_delivery: Any) -> None:
        self._call("produce")
        self.produced.append(value)

    def flush(self, seconds: float) -> int:
        self._call("flush")
        left = self.script.get("left")
        return left.pop(0) if left else 0


class Consumer:
    def consumer_group_metadata(self) -> str:
        return "place"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Transactor]:
    def make(**script: list[Any]) -> Transactor:
        kind = type("Scripted", (Producer,), {"made": [], "script": script})
        monkeypatch.setattr("tidemill.sources.transactor.ck.Producer", kind)
        transactor = Transactor(KafkaSettings(), "id", {}, [5_000, 2_000_000])
        transactor.open(lambda: False)
        return transactor

    return make


def through(transactor: Transactor, *records: Outgoing) -> Any:
    transactor.begin({TP: 7}, list(records))
    while (ended := transactor.step(Consumer())) is None:  # type: ignore[arg-type]
        assert transactor.fatal is None or not transactor.busy
    return ended


def calls(transactor: Transactor) -> list[str]:
    return [name for name in transactor._producer.calls if name != "init_transactions"]  # type: ignore[attr-defined]


def test_what_can_be_tried_again_is_the_same_call(made) -> None:
    again = error(ck.KafkaError._TIMED_OUT, retriable=True)
    transactor = made(send_offsets_to_transaction=[again, again], commit_transaction=[again], init_transactions=[again])
    assert through(transactor, Outgoing("out", None, b"1")) == (End.COMMITTED, {TP: 7})
    assert calls(transactor) == [
        *("begin_transaction", "produce"),
        *["send_offsets_to_transaction"] * 3,
        *["commit_transaction"] * 2,
    ]
    assert transactor._producer.produced == [b"1"], "records were handed over again"
    assert transactor.trouble is None
    assert transactor._producer.config["batch.size"] == 5_000, "no batch may be larger than the pickiest topic takes"
    assert transactor._producer.config["message.max.bytes"] == 2_000_000


def test_what_requires_an_abort_is_aborted_however_often_that_has_to_be_asked(made) -> None:
    transactor = made(
        commit_transaction=[error(ck.KafkaError.ILLEGAL_GENERATION, abort=True)],
        abort_transaction=[error(ck.KafkaError._TIMED_OUT, retriable=True)] * 2,
    )
    assert through(transactor, Outgoing("out", None, b"1")) == (End.ABORTED, {TP: 7})
    assert calls(transactor)[-3:] == ["abort_transaction"] * 3
    assert through(transactor) == (End.COMMITTED, {TP: 7})


def test_a_record_that_cannot_even_be_handed_over_is_blamed(made) -> None:
    transactor = made(produce=[None, error(ck.KafkaError.MSG_SIZE_TOO_LARGE)])
    records = [Outgoing("out", None, b"1"), Outgoing("out", None, b"2"), Outgoing("out", None, b"3")]
    assert through(transactor, *records)[0] is End.ABORTED
    assert [record.error is not None for record in records] == [False, True, False]
    assert records[1].oversize


def test_a_full_queue_is_waited_for_and_goes_on_where_it_was(made) -> None:
    transactor = made(produce=[None, BufferError("full")])
    assert through(transactor, *(Outgoing("out", None, b"%d" % n) for n in range(3)))[0] is End.COMMITTED
    assert transactor._producer.produced == [b"0", b"1", b"2"]


def test_a_record_that_has_to_go_alone_is_flushed_before_and_behind(made) -> None:
    transactor = made()
    through(transactor, Outgoing("o", None, b"1"), Outgoing("o", None, b"2", alone=True), Outgoing("o", None, b"3"))
    assert [name for name in calls(transactor) if name in ("produce", "flush")] == [
        *("produce", "flush", "produce", "flush", "produce")
    ]


@pytest.mark.parametrize(
    ("raised", "reason"),
    [
        (error(ck.KafkaError._FENCED, fatal=True), Fatal.FENCED),
        (error(ck.KafkaError.FENCED_INSTANCE_ID, abort=True), Fatal.FENCED),
        (error(ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED, fatal=True), Fatal.FAILED),
        (error(ck.KafkaError._STATE), Fatal.FAILED),
    ],
)
def test_what_is_fatal_ends_it_for_good(made, raised, reason) -> None:
    transactor = made(commit_transaction=[raised])
    assert through(transactor, Outgoing("out", None, b"1"))[0] is End.FATAL
    assert transactor.fatal is not None
    assert transactor.fatal[0] is reason
    transactor.begin({TP: 8}, [])
    assert transactor.step(Consumer()) is None, "nothing follows"


def test_a_transaction_that_grew_too_old_is_no_fencing(made, monkeypatch) -> None:
    transactor = made(commit_transaction=[error(ck.KafkaError.INVALID_PRODUCER_EPOCH, fatal=True)])
    monkeypatch.setattr("tidemill.sources.transactor.TRANSACTION_SECONDS", 0.0)
    through(transactor)
    assert transactor.fatal is not None
    assert transactor.fatal[0] is Fatal.FAILED


def test_a_start_that_is_refused_is_told(made) -> None:
    transactor = made(init_transactions=[error(ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, fatal=True)])
    assert transactor.fatal is not None
    assert "no transactions" in transactor.fatal[1]


def test_a_call_that_hangs_costs_its_producer_and_not_the_thread(made, monkeypatch) -> None:
    monkeypatch.setattr("tidemill.sources.transactor.CALL_SECONDS", 0.02)
    monkeypatch.setattr("tidemill.sources.transactor.HANG_SECONDS", 0.1)
    forever = threading.Event()
    transactor = made(send_offsets_to_transaction=[forever.wait])
    hung = transactor._producer
    started = time.monotonic()
    assert through(transactor, Outgoing("out", None, b"1")) == (End.ABORTED, {TP: 7})
    assert time.monotonic() - started < 5
    assert transactor._producer is not hung
    assert transactor._producer.calls == ["init_transactions"], "its start is the abort"
    assert "commit_transaction" not in hung.calls
    assert through(transactor, Outgoing("out", None, b"1"))[0] is End.COMMITTED
    forever.set()


def test_a_flush_that_a_failed_transaction_never_ends_is_aborted(made, monkeypatch) -> None:
    monkeypatch.setattr("tidemill.sources.transactor.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("tidemill.sources.transactor.CALL_SECONDS", 0.01)
    transactor = made(left=[1] * 1_000_000)
    transactor.begin({TP: 7}, [Outgoing("t", None, b"a"), Outgoing("t", None, b"b", alone=True)])
    deadline = time.monotonic() + 10
    while (ended := transactor.step(Consumer())) is None:
        assert time.monotonic() < deadline
    assert ended == (End.ABORTED, {TP: 7})
    assert transactor._producer.calls[-1] == "abort_transaction"
    transactor._producer.script.clear()
    assert through(transactor, Outgoing("t", None, b"a"), Outgoing("t", None, b"b", alone=True))[0] is End.COMMITTED


def test_finish_gives_up_in_time(made) -> None:
    transactor = made(
        abort_transaction=[], commit_transaction=[error(ck.KafkaError._TIMED_OUT, retriable=True)] * 10_000
    )
    transactor.begin({TP: 7}, [])
    assert transactor.finish(Consumer(), 0.05) == []
    transactor._producer.script["commit_transaction"].clear()
    assert transactor.finish(Consumer(), 1.0) == [(End.COMMITTED, {TP: 7})]
