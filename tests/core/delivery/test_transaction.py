"""The course of a transaction: which call follows which answer, and which result is to blame for an abort."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.delivery.transaction import (
    Fence,
    ProducerCall,
    RecordVerdict,
    Transaction,
    TransactionAnswer,
    TransactionEnd,
    choose_next,
    judge_fence,
    judge_records,
)


def test_a_successful_transaction_makes_each_call_once() -> None:
    course: list[ProducerCall | TransactionEnd] = [ProducerCall.BEGIN]
    while isinstance(call := course[-1], ProducerCall):
        course.append(choose_next(call, TransactionAnswer.DONE))
    assert course == [
        ProducerCall.BEGIN,
        ProducerCall.SEND,
        ProducerCall.OFFSETS,
        ProducerCall.COMMIT,
        TransactionEnd.COMMITTED,
    ]


@given(st.lists(st.sampled_from(TransactionAnswer), max_size=30))
def test_every_course_follows_the_rules_of_a_transactional_producer(answers: list[TransactionAnswer]) -> None:
    call: ProducerCall | TransactionEnd = ProducerCall.BEGIN
    for answer in answers:
        if isinstance(call, TransactionEnd):
            break
        after = choose_next(call, answer)
        if answer is TransactionAnswer.AGAIN:
            assert after is call, "what can be tried again is the same call"
        if answer is TransactionAnswer.FATAL:
            assert after is TransactionEnd.FATAL
        if after is TransactionEnd.COMMITTED:
            assert (call, answer) == (ProducerCall.COMMIT, TransactionAnswer.DONE)
        if after is TransactionEnd.ABORTED:
            assert (call, answer) == (ProducerCall.ABORT, TransactionAnswer.DONE)
        if call is ProducerCall.ABORT:
            assert after in (ProducerCall.ABORT, TransactionEnd.ABORTED, TransactionEnd.FATAL)
        call = after


def test_an_abort_that_requires_an_abort_is_fatal() -> None:
    assert choose_next(ProducerCall.ABORT, TransactionAnswer.ABORT) is TransactionEnd.FATAL
    assert choose_next(ProducerCall.SEND, TransactionAnswer.ABORT) is ProducerCall.ABORT


def at(call: ProducerCall) -> Transaction[str]:
    transaction = Transaction({"a": 10, "b": 20})
    while transaction.call is not call:
        assert (
            transaction.note_answer(
                TransactionAnswer.DONE if call is not ProducerCall.ABORT else TransactionAnswer.ABORT
            )
            is None
        )
    return transaction


def test_a_transaction_is_aborted_if_a_lane_is_given_up_before_its_offsets_were_accepted() -> None:
    for call in (ProducerCall.SEND, ProducerCall.OFFSETS, ProducerCall.ABORT):
        transaction = at(call)
        assert transaction.give_up(["b", "x"]) is None
        assert transaction.call is ProducerCall.ABORT
        assert transaction.note_answer(TransactionAnswer.AGAIN) is None
        assert transaction.call is ProducerCall.ABORT
        assert transaction.note_answer(TransactionAnswer.DONE) is TransactionEnd.ABORTED


def test_a_transaction_that_has_not_begun_ends_with_its_lane() -> None:
    assert at(ProducerCall.BEGIN).give_up({"a"}) is TransactionEnd.ABORTED


def test_a_transaction_whose_offsets_were_accepted_is_committed_even_if_a_lane_is_given_up() -> None:
    transaction = at(ProducerCall.COMMIT)
    assert transaction.give_up({"a"}) is None
    assert transaction.note_answer(TransactionAnswer.AGAIN) is None
    assert transaction.note_answer(TransactionAnswer.DONE) is TransactionEnd.COMMITTED


def test_giving_up_a_lane_does_not_affect_a_transaction_without_it() -> None:
    transaction = at(ProducerCall.SEND)
    assert not transaction.holds({"c"})
    assert transaction.give_up({"c"}) is None
    assert transaction.call is ProducerCall.SEND


def test_the_end_is_not_reported_for_forgotten_lanes() -> None:
    transaction = at(ProducerCall.SEND)
    transaction.forget({"a", "c"})
    assert transaction.offsets == {"b": 20}


@given(st.lists(st.one_of(st.sampled_from(TransactionAnswer), st.just("give up")), max_size=30))
def test_nothing_of_a_lane_that_was_given_up_in_time_is_ever_committed(steps: list[TransactionAnswer | str]) -> None:
    transaction, doomed = Transaction({"a": 10}), False
    for step in steps:
        if isinstance(step, TransactionAnswer):
            end = transaction.note_answer(step)
        else:
            doomed = doomed or transaction.call is not ProducerCall.COMMIT
            end = transaction.give_up({"a"})
        assert not (doomed and (end is TransactionEnd.COMMITTED or transaction.call is ProducerCall.COMMIT))
        if end is not None:
            break


def test_a_producer_whose_transaction_timed_out_was_not_replaced() -> None:
    assert judge_fence(53.9, 60.0) is Fence.REPLACED
    assert judge_fence(54.0, 60.0) is Fence.EXPIRED


@given(st.lists(st.booleans(), max_size=10))
def test_only_what_failed_alone_is_to_blame(alone: list[bool]) -> None:
    verdicts = judge_records(alone)
    assert len(verdicts) == len(alone)
    for was_alone, verdict in zip(alone, verdicts, strict=True):
        assert (verdict is RecordVerdict.REFUSED) == (was_alone or len(alone) == 1)
