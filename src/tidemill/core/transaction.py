"""One transaction's course: which call comes next, how it ends, and whose fault it was when it had to be aborted.

The rules of a transactional producer: what can be tried again is the very same call, until it is answered; what
requires an abort is aborted, and everything of the transaction offered again; what is fatal ends the producer, and
with it the engine.

Invariants: after `COMMIT` or `ABORT` was called, no other call follows but the same again; only one that was answered
ends a transaction; a result is blamed only if it failed alone, since a broker refuses the whole batch it travelled in.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence


class Call(enum.Enum):
    """What is asked of the producer, in this order; `ABORT` instead of the rest."""

    BEGIN = "begin"
    SEND = "send"
    OFFSETS = "offsets"
    COMMIT = "commit"
    ABORT = "abort"


class Answer(enum.Enum):
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


def following(call: Call, answer: Answer) -> Call | End:
    """Return what follows an answer.

    Example:
        >>> following(Call.OFFSETS, Answer.AGAIN)
        <Call.OFFSETS: 'offsets'>
        >>> following(Call.COMMIT, Answer.ABORT)
        <Call.ABORT: 'abort'>
    """
    if answer is Answer.DONE:
        return _NEXT[call]
    if answer is Answer.AGAIN:
        return call
    if answer is Answer.ABORT and call is not Call.ABORT:
        return Call.ABORT
    return End.FATAL


class Fence(enum.Enum):
    """What it means that the brokers take nothing more from this producer."""

    REPLACED = "replaced"
    EXPIRED = "expired"


def fenced(open_seconds: float, timeout_seconds: float) -> Fence:
    """Tell a producer that another one replaced from one whose transaction the brokers gave up for its age.

    Args:
        open_seconds: How long its transaction was open.
        timeout_seconds: After how long brokers give one up. Their clocks and the way there count too, so nine tenths
            of it are taken for it.
    """
    return Fence.EXPIRED if open_seconds >= 0.9 * timeout_seconds else Fence.REPLACED


class Verdict(enum.Enum):
    """What becomes of a result that the brokers will not take."""

    ALONE = "alone"
    REFUSED = "refused"


def judged(alone: Sequence[bool]) -> list[Verdict]:
    """Judge the results of one aborted transaction that brokers refused for what they are.

    Args:
        alone: For each of them, whether it was sent in a batch of its own.

    Returns:
        For each: it is refused for good, or has to be sent alone to find out.

    Example:
        >>> judged([False, False])
        [<Verdict.ALONE: 'alone'>, <Verdict.ALONE: 'alone'>]
        >>> judged([False])
        [<Verdict.REFUSED: 'refused'>]
    """
    only = len(alone) == 1
    return [Verdict.REFUSED if only or was_alone else Verdict.ALONE for was_alone in alone]
