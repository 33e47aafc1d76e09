"""The transactional producer's calls, stepped by hand: what no broker does when it should."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable
from typing import Any

import confluent_kafka as ck
import pytest
from tests.until import slack, wait_until

from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.core.delivery.transaction import RecordVerdict, TransactionEnd
from tidemill.sources.base import Fatal, Outgoing
from tidemill.sources.group_metadata import is_member
from tidemill.sources.transactional_producer import TransactionalProducer
from tidemill.testing.kafka import unique_name

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


def span_messages(generation: int, member: bytes) -> bytes:
    return b"CGMDv2:" + struct.pack("=i", generation) + b"group\0" + member + b"\0\0instance\0"


class Placed:
    """A consumer whose place in the group is set by hand."""

    def __init__(self, place: bytes) -> None:
        self.place = place

    def consumer_group_metadata(self) -> bytes:
        return self.place


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Callable[..., TransactionalProducer]:
    def make(**script: list[Any]) -> TransactionalProducer:
        kind = type("Scripted", (Producer,), {"made": [], "script": script})
        monkeypatch.setattr("tidemill.sources.transactional_producer.ck.Producer", kind)
        producer = TransactionalProducer(KafkaSettings(), "id", {}, [5_000, 2_000_000])
        producer.open(lambda: False)
        return producer

    return make


def through(producer: TransactionalProducer, *records: Outgoing) -> Any:
    producer.begin({TP: 7}, list(records))
    while (ended := producer.step(Consumer())) is None:  # type: ignore[arg-type]
        assert producer.fatal is None or not producer.busy
    return ended


def calls(producer: TransactionalProducer) -> list[str]:
    return [name for name in producer._producer.calls if name != "init_transactions"]  # type: ignore[attr-defined]


def test_what_can_be_tried_again_is_the_same_call(made) -> None:
    again = error(ck.KafkaError._TIMED_OUT, retriable=True)
    producer = made(send_offsets_to_transaction=[again, again], commit_transaction=[again], init_transactions=[again])
    assert through(producer, Outgoing("out", None, b"1")) == (TransactionEnd.COMMITTED, {TP: 7})
    assert calls(producer) == [
        *("begin_transaction", "produce"),
        *["send_offsets_to_transaction"] * 3,
        *["commit_transaction"] * 2,
    ]
    assert producer._producer.produced == [b"1"], "records were handed over again"
    assert producer.trouble is None
    assert producer._producer.config["batch.size"] == 5_000, "no batch may be larger than the pickiest topic takes"
    assert producer._producer.config["message.max.bytes"] == 2_000_000


def test_what_requires_an_abort_is_aborted_however_often_that_has_to_be_asked(made) -> None:
    producer = made(
        commit_transaction=[error(ck.KafkaError.ILLEGAL_GENERATION, abort=True)],
        abort_transaction=[error(ck.KafkaError._TIMED_OUT, retriable=True)] * 2,
    )
    assert through(producer, Outgoing("out", None, b"1")) == (TransactionEnd.ABORTED, {TP: 7})
    assert calls(producer)[-3:] == ["abort_transaction"] * 3
    assert through(producer) == (TransactionEnd.COMMITTED, {TP: 7})


def test_a_record_that_cannot_even_be_handed_over_is_blamed(made) -> None:
    producer = made(produce=[None, error(ck.KafkaError.MSG_SIZE_TOO_LARGE)])
    records = [Outgoing("out", None, b"1"), Outgoing("out", None, b"2"), Outgoing("out", None, b"3")]
    assert through(producer, *records)[0] is TransactionEnd.ABORTED
    assert [record.error is not None for record in records] == [False, True, False]
    assert records[1].oversize


def refusing(producer: TransactionalProducer, *refused: Outgoing) -> Callable[[], None]:
    def refuse() -> None:
        for record in refused:
            producer._records._on_delivery(record, ck.KafkaError(ck.KafkaError.INVALID_RECORD), None)

    return refuse


def refused_later(producer: TransactionalProducer, *refused: Outgoing) -> None:
    def refuse() -> None:
        refusing(producer, *refused)()
        raise error(ck.KafkaError.INVALID_RECORD, abort=True)

    producer._producer.script["commit_transaction"] = [refuse]  # type: ignore[attr-defined]


def test_guilt_is_judged_over_all_of_a_transaction(made) -> None:
    producer = made(commit_transaction=[])
    bad, innocent, fine = (Outgoing("out", None, value) for value in (b"bad", b"innocent", b"fine"))
    refused_later(producer, bad, innocent)
    assert through(producer, bad, innocent, fine)[0] is TransactionEnd.ABORTED
    assert [record.verdict for record in (bad, innocent, fine)] == [
        RecordVerdict.ISOLATED,
        RecordVerdict.ISOLATED,
        None,
    ]
    bad.isolated, bad.error = True, None
    innocent.isolated, innocent.error = True, None
    refused_later(producer, bad)
    assert through(producer, bad, innocent, fine)[0] is TransactionEnd.ABORTED
    assert bad.verdict is RecordVerdict.REFUSED
    assert innocent.error is None


def test_a_record_of_a_partition_that_went_meanwhile_still_counts_as_a_suspect(made) -> None:
    producer, consumer = made(commit_transaction=[], send_offsets_to_transaction=again(1)), Moving()
    bad, innocent = Outgoing("out", None, b"bad"), Outgoing("out", None, b"innocent")
    begun(producer, consumer, bad, innocent)
    producer._producer.script["abort_transaction"] = [refusing(producer, bad, innocent)]
    assert producer.give_up(consumer, [TP], 1.0)[0][0] is TransactionEnd.ABORTED
    assert innocent.verdict is RecordVerdict.ISOLATED


def test_a_full_queue_is_waited_for_and_continues_where_it_was(made) -> None:
    producer = made(produce=[None, BufferError("full")])
    assert through(producer, *(Outgoing("out", None, b"%d" % n) for n in range(3)))[0] is TransactionEnd.COMMITTED
    assert producer._producer.produced == [b"0", b"1", b"2"]


def test_a_record_that_has_to_go_alone_is_flushed_before_and_behind(made) -> None:
    producer = made()
    through(producer, Outgoing("o", None, b"1"), Outgoing("o", None, b"2", isolated=True), Outgoing("o", None, b"3"))
    assert [name for name in calls(producer) if name in ("produce", "flush")] == [
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
def test_what_is_fatal_ends_it(made, raised, reason) -> None:
    producer = made(commit_transaction=[raised])
    assert through(producer, Outgoing("out", None, b"1"))[0] is TransactionEnd.FATAL
    assert producer.fatal is not None
    assert producer.fatal[0] is reason
    producer.begin({TP: 8}, [])
    assert producer.step(Consumer()) is None, "nothing follows"


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        (span_messages(7, b"first"), Fatal.FENCED),
        (span_messages(8, b"first"), Fatal.FENCED),
        (span_messages(9, b"second"), Fatal.FAILED),
        (span_messages(-1, b""), Fatal.FAILED),
    ],
)
@pytest.mark.parametrize("call", ["send_offsets_to_transaction", "commit_transaction"])
def test_an_engine_whose_client_has_joined_anew_was_replaced_by_nobody(made, call, now, reason) -> None:
    consumer = Placed(span_messages(7, b"first"))

    def answer() -> None:
        consumer.place = now
        raise error(ck.KafkaError.FENCED_INSTANCE_ID, abort=True)

    producer = made(**{call: [answer]})
    producer.begin({TP: 7}, [])
    assert producer.step(consumer) == (TransactionEnd.FATAL, {TP: 7})
    assert producer.fatal is not None
    assert producer.fatal[0] is reason
    assert ("expelled this engine" in producer.fatal[1]) is (reason is Fatal.FAILED)


def test_a_transaction_that_grew_too_old_is_no_fencing(made, monkeypatch) -> None:
    producer = made(commit_transaction=[error(ck.KafkaError.INVALID_PRODUCER_EPOCH, fatal=True)])
    monkeypatch.setattr("tidemill.sources.transactional_producer.TRANSACTION_SECONDS", 0.0)
    through(producer)
    assert producer.fatal is not None
    assert producer.fatal[0] is Fatal.FAILED


def test_a_start_that_is_refused_is_reported(made) -> None:
    producer = made(init_transactions=[error(ck.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, fatal=True)])
    assert producer.fatal is not None
    assert "no transactions" in producer.fatal[1]


def test_a_call_that_hangs_costs_its_producer_and_not_the_thread(made, monkeypatch) -> None:
    monkeypatch.setattr("tidemill.sources.transactional_producer.CALL_SECONDS", 0.02)
    monkeypatch.setattr("tidemill.sources.transactional_producer.HANG_SECONDS", 0.1)
    forever = threading.Event()
    producer = made(send_offsets_to_transaction=[forever.wait])
    hung = producer._producer
    started = time.monotonic()
    assert through(producer, Outgoing("out", None, b"1")) == (TransactionEnd.ABORTED, {TP: 7})
    assert time.monotonic() - started < slack(5)
    assert producer._producer is not hung
    assert producer._producer.calls == ["init_transactions"], "its start is the abort"
    assert "commit_transaction" not in hung.calls
    assert through(producer, Outgoing("out", None, b"1"))[0] is TransactionEnd.COMMITTED
    forever.set()


def test_a_flush_that_a_failed_transaction_never_ends_is_aborted(made, monkeypatch) -> None:
    monkeypatch.setattr("tidemill.sources.outgoing_records.FLUSH_SECONDS", 0.05)
    monkeypatch.setattr("tidemill.sources.transactional_producer.CALL_SECONDS", 0.01)
    producer = made(left=[1] * 1_000_000)
    producer.begin({TP: 7}, [Outgoing("t", None, b"a"), Outgoing("t", None, b"b", isolated=True)])
    ended = wait_until(lambda: producer.step(Consumer()), pause_seconds=0.0)
    assert ended == (TransactionEnd.ABORTED, {TP: 7})
    assert producer._producer.calls[-1] == "abort_transaction"
    producer._producer.script.clear()
    assert (
        through(producer, Outgoing("t", None, b"a"), Outgoing("t", None, b"b", isolated=True))[0]
        is TransactionEnd.COMMITTED
    )


def test_finish_gives_up_in_time(made) -> None:
    producer = made(abort_transaction=[], commit_transaction=[error(ck.KafkaError._TIMED_OUT, retriable=True)] * 10_000)
    producer.begin({TP: 7}, [])
    assert producer.finish(Consumer(), 0.05) == []
    producer._producer.script["commit_transaction"].clear()
    assert producer.finish(Consumer(), 1.0) == [(TransactionEnd.COMMITTED, {TP: 7})]


# -- partitions that go while a transaction is open ------------------------------------------------------------

OTHER = ("t", 1)


def again(count: int) -> list[Any]:
    return [error(ck.KafkaError._TIMED_OUT, retriable=True) for _ in range(count)]


def begun(producer: TransactionalProducer, consumer: Consumer, *records: Outgoing) -> None:
    producer.begin({TP: 10, OTHER: 20}, list(records))
    assert producer.step(consumer) is None  # type: ignore[arg-type]


class Moving(Consumer):
    """A member whose group goes on to the next generation when it is told to."""

    generation = 1
    member_id = "m"

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + struct.pack("=i", self.generation) + b"g\0%s\0\0i\0" % self.member_id.encode()


def test_offsets_go_out_with_the_generation_in_which_their_transaction_began(made):
    producer, consumer, places = made(send_offsets_to_transaction=again(2)), Moving(), []
    producer._producer.send_offsets_to_transaction = lambda positions, place, seconds: (
        places.append(place),
        producer._producer._call("send_offsets_to_transaction"),
    )
    first = consumer.consumer_group_metadata()
    begun(producer, consumer)
    consumer.generation = 2
    while producer.step(consumer) is None:
        assert producer.busy
    assert places == [first] * 3
    through(producer)
    producer.begin({TP: 11}, [])
    assert producer.step(consumer) == (TransactionEnd.COMMITTED, {TP: 11})
    assert places[-1] == consumer.consumer_group_metadata()


@pytest.mark.parametrize("place", [None, b"CGMDv2:\xff\xff\xff\xffg\0\0\0i\0", b"CGMDv2:\1\0\0\0g\0\0\0i\0"])
def test_nothing_begins_while_the_member_has_no_place_in_the_group(made, place):
    producer, consumer = made(), Moving()
    consumer.consumer_group_metadata = lambda: place
    begun(producer, consumer)
    assert calls(producer) == []
    assert producer.give_up(consumer, [TP, OTHER], 1.0) == [(TransactionEnd.ABORTED, {TP: 10, OTHER: 20})]
    assert calls(producer) == []
    assert not producer.busy


def test_a_transaction_that_lost_a_partition_before_its_offsets_were_accepted_is_aborted(made):
    producer, consumer = made(send_offsets_to_transaction=again(1)), Moving()
    begun(producer, consumer, Outgoing("out", None, b"1"))
    assert producer.give_up(consumer, [OTHER], 1.0) == [(TransactionEnd.ABORTED, {TP: 10, OTHER: 20})]
    assert calls(producer)[-1] == "abort_transaction"
    assert "commit_transaction" not in calls(producer)
    assert through(producer) == (TransactionEnd.COMMITTED, {TP: 7}), "the part that is still owned can go"


def test_a_transaction_whose_offsets_were_accepted_is_committed_although_a_partition_goes(made):
    producer, consumer = made(commit_transaction=again(2)), Moving()
    begun(producer, consumer)
    assert producer.give_up(consumer, [OTHER], 1.0) == [(TransactionEnd.COMMITTED, {TP: 10, OTHER: 20})]
    assert "abort_transaction" not in calls(producer)


def test_a_transaction_without_the_partitions_that_go_stays_as_it_is(made):
    producer, consumer = made(send_offsets_to_transaction=again(1)), Moving()
    assert producer.give_up(consumer, [TP], 1.0) == []
    begun(producer, consumer)
    assert producer.give_up(consumer, [("t", 2)], 1.0) == []
    assert producer.step(consumer) == (TransactionEnd.COMMITTED, {TP: 10, OTHER: 20})


def test_an_abort_that_takes_too_long_continues_later_and_tells_nothing_of_what_was_forgotten(made):
    producer, consumer = made(send_offsets_to_transaction=again(1), abort_transaction=again(20_000)), Moving()
    begun(producer, consumer)
    assert producer.give_up(consumer, [OTHER], 0.05) == []
    producer.forget([OTHER])
    assert producer.busy
    producer._producer.script.clear()
    assert producer.step(consumer) == (TransactionEnd.ABORTED, {TP: 10})


def test_a_commit_that_takes_too_long_continues_later_and_tells_nothing_of_what_was_forgotten(made):
    producer, consumer = made(commit_transaction=again(20_000)), Moving()
    begun(producer, consumer)
    assert producer.give_up(consumer, [OTHER], 0.05) == []
    producer.forget([OTHER])
    producer._producer.script.clear()
    assert producer.step(consumer) == (TransactionEnd.COMMITTED, {TP: 10})
    assert "abort_transaction" not in calls(producer)


@pytest.mark.parametrize("answer", [None, error(ck.KafkaError.FENCED_INSTANCE_ID, abort=True)])
def test_a_doomed_transaction_waits_for_the_answer_about_its_offsets_and_is_aborted_whatever_it_is(
    made, monkeypatch, answer
):
    monkeypatch.setattr("tidemill.sources.transactional_producer.CALL_SECONDS", 0.02)
    gate = threading.Event()

    def late() -> None:
        gate.wait(10)
        if answer is not None:
            raise answer

    producer, consumer = made(send_offsets_to_transaction=[late]), Moving()
    begun(producer, consumer)
    assert producer.give_up(consumer, [OTHER], 0.05) == []
    producer.forget([OTHER])
    assert "abort_transaction" not in calls(producer), "a producer carries out one call at a time"
    gate.set()
    assert producer.finish(consumer, 10.0) == [(TransactionEnd.ABORTED, {TP: 10})]
    assert producer.fatal is None, "its own member rejoined under another id: nobody took its place"
    assert "commit_transaction" not in calls(producer)


def test_a_doomed_transaction_whose_offsets_never_get_an_answer_costs_its_producer(made, monkeypatch):
    monkeypatch.setattr("tidemill.sources.transactional_producer.CALL_SECONDS", 0.02)
    forever = threading.Event()
    producer, consumer = made(send_offsets_to_transaction=[forever.wait]), Moving()
    hung = producer._producer
    begun(producer, consumer)
    monkeypatch.setattr("tidemill.sources.transactional_producer.HANG_SECONDS", 0.1)
    assert producer.give_up(consumer, [OTHER], 10.0) == [(TransactionEnd.ABORTED, {TP: 10, OTHER: 20})]
    assert producer._producer is not hung
    assert producer._producer.calls == ["init_transactions"], "its start is the abort"
    forever.set()


def test_offsets_without_an_answer_cost_their_producer_since_they_may_count_for_its_next_transaction(made):
    producer = made(send_offsets_to_transaction=[error(ck.KafkaError._TIMED_OUT, abort=True)])
    late = producer._producer
    assert through(producer, Outgoing("out", None, b"1"))[0] is TransactionEnd.ABORTED
    assert producer._producer is not late
    assert producer._producer.calls == ["init_transactions"], "its start aborts, and raises the epoch"


def test_offsets_that_brokers_reject_do_not_cost_their_producer(made):
    producer = made(send_offsets_to_transaction=[error(ck.KafkaError.ILLEGAL_GENERATION, abort=True)])
    client = producer._producer
    assert through(producer, Outgoing("out", None, b"1"))[0] is TransactionEnd.ABORTED
    assert producer._producer is client


def test_giving_up_waits_no_longer_than_it_may(made):
    seconds: list[float] = []

    def slow(patience: float) -> None:
        seconds.append(patience)
        time.sleep(patience)
        raise error(ck.KafkaError._TIMED_OUT, retriable=True)

    producer, consumer = made(send_offsets_to_transaction=again(1)), Moving()
    begun(producer, consumer)
    producer._producer.abort_transaction = slow
    assert producer.give_up(consumer, [TP], 0.3) == []
    assert max(seconds) <= 0.3


@pytest.mark.parametrize("name", ["send_offsets_to_transaction", "commit_transaction", "produce"])
@pytest.mark.parametrize("kind", [TypeError, SystemError, SystemExit])
def test_an_error_that_is_not_one_of_the_client_ends_the_engine_and_commits_nothing(made, name, kind):
    producer = made(**{name: [lambda: (_ for _ in ()).throw(kind("odd"))]})
    assert through(producer, Outgoing("out", None, b"1"))[0] is TransactionEnd.FATAL
    assert producer.fatal is not None
    assert producer.fatal[0] is Fatal.FAILED
    assert f"{kind.__name__}: odd" in producer.fatal[1]
    if name != "commit_transaction":
        assert "commit_transaction" not in calls(producer)


async def test_the_place_of_a_real_member_is_told_from_that_of_none(embedded_kafka):
    topic, group = unique_name(), unique_name("group")
    embedded_kafka.create_topic(topic)
    consumer = ck.Consumer(
        {"bootstrap.servers": embedded_kafka.bootstrap, "group.id": group, "group.instance.id": "i", "log_level": 0}
    )
    try:
        assert not is_member(consumer.consumer_group_metadata())
        consumer.subscribe([topic])
        wait_until(lambda: (consumer.poll(0.05), consumer.assignment())[1], pause_seconds=0.0)
        assert is_member(consumer.consumer_group_metadata())
    finally:
        consumer.close()
