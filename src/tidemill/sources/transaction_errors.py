"""Interprets Kafka errors with respect to the transaction of the failed call."""

from __future__ import annotations

import confluent_kafka as ck

from tidemill.core.delivery.transaction import TransactionAnswer

_FENCED = frozenset(
    {
        ck.KafkaError._FENCED,
        ck.KafkaError.INVALID_PRODUCER_EPOCH,
        ck.KafkaError.PRODUCER_FENCED,
    }
)
#: The brokers' answers to offsets of an earlier generation, or of an expelled member.
_REBALANCED = frozenset({ck.KafkaError.ILLEGAL_GENERATION, ck.KafkaError.UNKNOWN_MEMBER_ID})


def is_fenced(error: ck.KafkaError) -> bool:
    """Return whether another producer or group member has taken over the id."""
    return error.code() in _FENCED or error.code() == ck.KafkaError.FENCED_INSTANCE_ID


def is_rebalance(error: ck.KafkaError) -> bool:
    """Return whether the brokers rejected offsets because the group has rebalanced since the transaction began."""
    return error.code() in _REBALANCED


def classify_error(error: ck.KafkaError) -> TransactionAnswer:
    """Return how a transaction continues after a call that raised this error."""
    if is_fenced(error) or error.fatal():
        return TransactionAnswer.FATAL
    if error.txn_requires_abort():
        return TransactionAnswer.ABORT
    if error.retriable() or error.code() == ck.KafkaError._TIMED_OUT:
        return TransactionAnswer.AGAIN
    return TransactionAnswer.FATAL


def may_still_arrive(error: BaseException) -> bool:
    """Return whether offsets may still arrive: the client stopped waiting, and no broker rejected them."""
    return isinstance(error, ck.KafkaException) and error.args[0].txn_requires_abort() and error.args[0].code() < 0
