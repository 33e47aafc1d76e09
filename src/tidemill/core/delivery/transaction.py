"""The sequence of calls of one Kafka transaction: the next call, the outcome, and the result to blame for an abort.

The rules of a transactional producer: after a retryable error the same call is repeated until it is answered; after an
abortable error the transaction is aborted, and everything in it is offered again; a fatal error ends the producer, and
with it the engine.

A lane may be given up while its transaction is open: another member of the group owns it, or soon will, and reads from
the last committed offset. Once the brokers have accepted the lane's offset, the next owner has to wait for the end of
this transaction, so it may be committed. Before that it must be aborted, because the next owner does the same work.

Invariants: after `COMMIT` or `ABORT` only the same call may follow; only a call that was answered ends a transaction; a
transaction is never committed if one of its lanes was given up before its offsets were accepted; a result is blamed
only if it failed alone, since a broker refuses the whole batch that contains it.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


class ProducerCall(enum.Enum):
    """The calls to the producer, in order. `ABORT` replaces the remaining ones."""

    BEGIN = "begin"
    SEND = "send"
    OFFSETS = "offsets"
    COMMIT = "commit"
    ABORT = "abort"


class TransactionAnswer(enum.Enum):
    """The producer's answer to a call."""

    DONE = "done"
    AGAIN = "again"
    ABORT = "abort"
    FATAL = "fatal"


class TransactionEnd(enum.Enum):
    """The outcome of a transaction."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    FATAL = "fatal"


_NEXT: dict[ProducerCall, ProducerCall | TransactionEnd] = {
    ProducerCall.BEGIN: ProducerCall.SEND,
    ProducerCall.SEND: ProducerCall.OFFSETS,
    ProducerCall.OFFSETS: ProducerCall.COMMIT,
    ProducerCall.COMMIT: TransactionEnd.COMMITTED,
    ProducerCall.ABORT: TransactionEnd.ABORTED,
}


def choose_next(call: ProducerCall, answer: TransactionAnswer) -> ProducerCall | TransactionEnd:
    """Return the call or outcome that follows an answer.

    Example:
        >>> choose_next(ProducerCall.OFFSETS, TransactionAnswer.AGAIN)
        <ProducerCall.OFFSETS: 'offsets'>
        >>> choose_next(ProducerCall.COMMIT, TransactionAnswer.ABORT)
        <ProducerCall.ABORT: 'abort'>
    """
    if answer is TransactionAnswer.DONE:
        return _NEXT[call]
    if answer is TransactionAnswer.AGAIN:
        return call
    if answer is TransactionAnswer.ABORT and call is not ProducerCall.ABORT:
        return ProducerCall.ABORT
    return TransactionEnd.FATAL


def choose_next_given_up(call: ProducerCall) -> ProducerCall | TransactionEnd:
    """Return the call or outcome that follows when a lane is given up while this call is next or has to be repeated.

    Example:
        >>> choose_next_given_up(ProducerCall.OFFSETS)
        <ProducerCall.ABORT: 'abort'>
        >>> choose_next_given_up(ProducerCall.COMMIT)
        <ProducerCall.COMMIT: 'commit'>
    """
    if call is ProducerCall.BEGIN:
        return TransactionEnd.ABORTED
    return call if call in (ProducerCall.COMMIT, ProducerCall.ABORT) else ProducerCall.ABORT


class Transaction(Generic[LaneT]):
    """An open transaction: the offsets it commits and its next call.

    Attributes:
        call: The call to make or to repeat.
        lanes: The lanes whose offsets the transaction commits.
        offsets: The offsets whose outcome is reported: all of them, except for lanes that were forgotten.

    Example:
        >>> transaction = Transaction({"a": 10, "b": 20})
        >>> transaction.note_answer(TransactionAnswer.DONE), transaction.call
        (None, <ProducerCall.SEND: 'send'>)
        >>> transaction.give_up({"b"}), transaction.call
        (None, <ProducerCall.ABORT: 'abort'>)
        >>> transaction.forget({"b"})
        >>> transaction.note_answer(TransactionAnswer.DONE), transaction.offsets
        (<TransactionEnd.ABORTED: 'aborted'>, {'a': 10})
    """

    __slots__ = ("call", "lanes", "offsets")

    def __init__(self, offsets: Mapping[LaneT, int]) -> None:
        self.call = ProducerCall.BEGIN
        self.lanes = frozenset(offsets)
        self.offsets = dict(offsets)

    def note_answer(self, answer: TransactionAnswer) -> TransactionEnd | None:
        """Process the answer to `call`; return the outcome if the transaction is over."""
        return self._go_on(choose_next(self.call, answer))

    def holds(self, lanes: Collection[LaneT]) -> bool:
        """Return whether the transaction has offsets of any of these lanes."""
        return not self.offsets.keys().isdisjoint(lanes)

    def give_up(self, lanes: Collection[LaneT]) -> TransactionEnd | None:
        """Give up lanes that belong, or soon will, to another member; return the outcome if the transaction is over."""
        return self._go_on(choose_next_given_up(self.call)) if self.holds(lanes) else None

    def forget(self, lanes: Collection[LaneT]) -> None:
        """Exclude lanes from the reported outcome: they may be owned again by then, with other work."""
        for lane in lanes:
            self.offsets.pop(lane, None)

    def _go_on(self, after: ProducerCall | TransactionEnd) -> TransactionEnd | None:
        if isinstance(after, TransactionEnd):
            return after
        self.call = after
        return None


class Fence(enum.Enum):
    """Why the brokers fenced this producer."""

    REPLACED = "replaced"
    EXPIRED = "expired"


def judge_fence(open_seconds: float, timeout_seconds: float) -> Fence:
    """Return whether a fenced producer was replaced by another one or its transaction timed out at the brokers.

    Args:
        open_seconds: How long the transaction was open.
        timeout_seconds: The transaction timeout. Clocks differ and requests take time, so nine tenths of it count as
            the whole.
    """
    return Fence.EXPIRED if open_seconds >= 0.9 * timeout_seconds else Fence.REPLACED


class RecordVerdict(enum.Enum):
    """The verdict on a result that the brokers rejected."""

    ISOLATED = "isolated"
    REFUSED = "refused"


def judge_records(isolated: Sequence[bool]) -> list[RecordVerdict]:
    """Judge the results of an aborted transaction that the brokers rejected for their content.

    Args:
        isolated: For each result, whether it was sent in a batch of its own.

    Returns:
        For each result, whether it is refused permanently, or must first be sent in a batch of its own to see if it is
        at fault.

    Example:
        >>> judge_records([False, False])
        [<RecordVerdict.ISOLATED: 'isolated'>, <RecordVerdict.ISOLATED: 'isolated'>]
    """
    only = len(isolated) == 1
    return [RecordVerdict.REFUSED if only or was_isolated else RecordVerdict.ISOLATED for was_isolated in isolated]
