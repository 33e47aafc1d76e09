"""One transaction's course: which call comes next, how it ends, and whose fault it was when it had to be aborted.

The rules of a transactional producer: what can be tried again is the very same call, until it is answered; what
requires an abort is aborted, and everything of the transaction offered again; what is fatal ends the producer, and
with it the engine.

A lane may be given up while its transaction is open: another member of the group owns it, or soon will, and reads from
the last committed offset. Once brokers have accepted the lane's offset, the next owner has to wait for the end of this
transaction, so it may be committed. Before that it has to be aborted, because the next owner does the same work.

Invariants: after `COMMIT` or `ABORT` was called, no other call follows but the same again; only one that was answered
ends a transaction; a transaction of which a lane was given up before its offsets were accepted is never committed; a
result is blamed only if it failed alone, since a broker refuses the whole batch it travelled in.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

LaneT = TypeVar("LaneT", bound=Hashable)


class Call(enum.Enum):
    """What is asked of the producer, in this order; `ABORT` instead of the rest."""

    BEGIN = "begin"
    SEND = "send"
    OFFSETS = "offsets"
    COMMIT = "commit"
    ABORT = "abort"


class TransactionAnswer(enum.Enum):
    """What it says."""

    DONE = "done"
    AGAIN = "again"
    ABORT = "abort"
    FATAL = "fatal"


class End(enum.Enum):
    """How a transaction ended."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    FATAL = "fatal"


_NEXT: dict[Call, Call | End] = {
    Call.BEGIN: Call.SEND,
    Call.SEND: Call.OFFSETS,
    Call.OFFSETS: Call.COMMIT,
    Call.COMMIT: End.COMMITTED,
    Call.ABORT: End.ABORTED,
}


def choose_next(call: Call, answer: TransactionAnswer) -> Call | End:
    """Return what follows an answer.

    Example:
        >>> choose_next(Call.OFFSETS, TransactionAnswer.AGAIN)
        <Call.OFFSETS: 'offsets'>
        >>> choose_next(Call.COMMIT, TransactionAnswer.ABORT)
        <Call.ABORT: 'abort'>
    """
    if answer is TransactionAnswer.DONE:
        return _NEXT[call]
    if answer is TransactionAnswer.AGAIN:
        return call
    if answer is TransactionAnswer.ABORT and call is not Call.ABORT:
        return Call.ABORT
    return End.FATAL


def given_up(call: Call) -> Call | End:
    """Return what follows when a lane is given up while this call is next, or has to be repeated.

    Example:
        >>> given_up(Call.OFFSETS)
        <Call.ABORT: 'abort'>
        >>> given_up(Call.COMMIT)
        <Call.COMMIT: 'commit'>
    """
    if call is Call.BEGIN:
        return End.ABORTED
    return call if call in (Call.COMMIT, Call.ABORT) else Call.ABORT


class Transaction(Generic[LaneT]):
    """An open transaction: which offsets it commits, and which call comes next.

    Attributes:
        call: The call to make, or to repeat.
        lanes: The lanes it has offsets of.
        offsets: What it commits, and what its end is reported for: without the lanes that were forgotten.

    Example:
        >>> transaction = Transaction({"a": 10, "b": 20})
        >>> transaction.answered(TransactionAnswer.DONE), transaction.call
        (None, <Call.SEND: 'send'>)
        >>> transaction.give_up({"b"}), transaction.call
        (None, <Call.ABORT: 'abort'>)
        >>> transaction.forget({"b"})
        >>> transaction.answered(TransactionAnswer.DONE), transaction.offsets
        (<End.ABORTED: 'aborted'>, {'a': 10})
    """

    __slots__ = ("call", "lanes", "offsets")

    def __init__(self, offsets: Mapping[LaneT, int]) -> None:
        """Start before its first call."""
        self.call = Call.BEGIN
        self.lanes = frozenset(offsets)
        self.offsets = dict(offsets)

    def answered(self, answer: TransactionAnswer) -> End | None:
        """Take the answer to `call`; return how the transaction ended, if it did."""
        return self._go_on(choose_next(self.call, answer))

    def holds(self, lanes: Collection[LaneT]) -> bool:
        """Tell whether it has offsets of any of these lanes."""
        return not self.offsets.keys().isdisjoint(lanes)

    def give_up(self, lanes: Collection[LaneT]) -> End | None:
        """Note that lanes belong, or soon will, to another member; return how the transaction ended, if it did."""
        return self._go_on(given_up(self.call)) if self.holds(lanes) else None

    def forget(self, lanes: Collection[LaneT]) -> None:
        """Leave lanes out of what its end is reported for: they may be owned again by then, with other work."""
        for lane in lanes:
            self.offsets.pop(lane, None)

    def _go_on(self, after: Call | End) -> End | None:
        if isinstance(after, End):
            return after
        self.call = after
        return None


class Fence(enum.Enum):
    """What it means that the brokers take nothing more from this producer."""

    REPLACED = "replaced"
    EXPIRED = "expired"


def judge_fence(open_seconds: float, timeout_seconds: float) -> Fence:
    """Tell a producer that another one replaced from one whose transaction the brokers gave up for its age.

    Args:
        open_seconds: How long its transaction was open.
        timeout_seconds: After how long brokers give one up. Their clocks and the way there count too, so nine tenths
            of it are taken for it.
    """
    return Fence.EXPIRED if open_seconds >= 0.9 * timeout_seconds else Fence.REPLACED


class RecordVerdict(enum.Enum):
    """What becomes of a result that the brokers will not take."""

    ALONE = "alone"
    REFUSED = "refused"


def judge_records(alone: Sequence[bool]) -> list[RecordVerdict]:
    """Judge the results of one aborted transaction that brokers refused for what they are.

    Args:
        alone: For each of them, whether it was sent in a batch of its own.

    Returns:
        For each: it is refused for good, or has to be sent alone to find out.

    Example:
        >>> judge_records([False, False])
        [<RecordVerdict.ALONE: 'alone'>, <RecordVerdict.ALONE: 'alone'>]
        >>> judge_records([False])
        [<RecordVerdict.REFUSED: 'refused'>]
    """
    only = len(alone) == 1
    return [RecordVerdict.REFUSED if only or was_alone else RecordVerdict.ALONE for was_alone in alone]
