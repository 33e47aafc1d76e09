"""The inputs and outputs of `redelivery`."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidemill.core.retry import Backoff

LaneT = TypeVar("LaneT", bound=Hashable)
HeldT = TypeVar("HeldT")


@dataclass(frozen=True, slots=True)
class RedeliveryLimits:
    """The limits of redelivery.

    Attributes:
        max_redeliveries: The number of deliveries after the first one; if the last one fails, the offset is
            dead-lettered.
        backoff: How long an offset waits after each failure, and each time it was left unread.
        wait_seconds: How long subscribers that failed an offset, or left it unread, may take to come back.
        max_open: The number of open offsets per lane.
        max_open_bytes: The total size of the open offsets of all lanes.
    """

    max_redeliveries: int = 5
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0))
    wait_seconds: float = 60.0
    max_open: int = 10_000
    max_open_bytes: int = 64 * 1024 * 1024


class RedeliveryVerdict(enum.Enum):
    """The outcome of a delivery.

    Attributes:
        CLEAN: All subscribers accepted it, and there was at least one.
        FAILED: A subscriber read it and failed.
        REJECTED: A subscriber rejected it permanently.
        UNREAD: None failed, but at least one never read it.
        UNSEEN: There was no subscriber, or all of them were released.
    """

    CLEAN = "clean"
    FAILED = "failed"
    REJECTED = "rejected"
    UNREAD = "unread"
    UNSEEN = "unseen"


def judge_outcome(acked: int, failed: int, rejected: int, unread: int = 0) -> RedeliveryVerdict:
    """Return the verdict on an event; a reject outweighs a failure, which outweighs the rest.

    Args:
        acked: The number of subscribers that accepted it.
        failed: The number that failed it, including those that never read it.
        rejected: The number that rejected it permanently.
        unread: How many of the failed are known never to have read it.

    Example:
        >>> judge_outcome(acked=2, failed=1, rejected=0), judge_outcome(acked=2, failed=1, rejected=0, unread=1)
        (<RedeliveryVerdict.FAILED: 'failed'>, <RedeliveryVerdict.UNREAD: 'unread'>)
    """
    if rejected:
        return RedeliveryVerdict.REJECTED
    if failed > unread:
        return RedeliveryVerdict.FAILED
    if failed:
        return RedeliveryVerdict.UNREAD
    return RedeliveryVerdict.CLEAN if acked else RedeliveryVerdict.UNSEEN


class SkipReason(enum.Enum):
    """Why an offset is not delivered."""

    CLEAN = "was done before the lane was assigned"
    STALE = "was read before"
    FOREIGN = "its lane is not assigned"


class OffsetDelivery(Generic[LaneT, HeldT]):
    """One delivery of an offset to the subscribers. Only `Redelivery` creates and changes it.

    Attributes:
        lane: The lane of the offset.
        offset: The offset.
        held: The payload for the subscribers.
        size_bytes: Its share of the budget.
        number: Rises with every delivery, redeliveries included.
        failures: How many times the offset has failed before.
        unread: How many times in a row it was left unread without a failure.
        resolved: Whether the delivery has an outcome.
        waiting: The state of its wait for redelivery, if it waits.
    """

    __slots__ = ("failures", "held", "lane", "number", "offset", "resolved", "size_bytes", "unread", "waiting")

    def __init__(
        self, lane: LaneT, offset: int, held: HeldT, size_bytes: int, number: int, failures: int, unread: int = 0
    ) -> None:
        self.lane = lane
        self.offset = offset
        self.held = held
        self.size_bytes = size_bytes
        self.number = number
        self.failures = failures
        self.unread = unread
        self.resolved = False
        self.waiting: WaitingDelivery[LaneT, HeldT] | None = None

    def __repr__(self) -> str:
        return f"<Delivery {self.number} of {self.lane!r} at {self.offset}, failed {self.failures} times>"


class WaitingDelivery(Generic[LaneT, HeldT]):
    """A delivery that waits to be redelivered.

    Attributes:
        delivery: The delivery.
        due: When its backoff is over.
        deadline: Until when it waits for missing subscribers.
        missing: The subscribers that failed it or left it unread, and have to come back first.
        anybody: Whether it waits for any subscriber to join.
        concerns: The subscribers that failed it or left it unread, and have not left permanently.
        accepted: Whether any subscriber accepted it, so that it is clean once `concerns` is empty.
    """

    __slots__ = ("accepted", "anybody", "concerns", "deadline", "delivery", "due", "missing")

    def __init__(self, delivery: OffsetDelivery[LaneT, HeldT], due: float, deadline: float) -> None:
        self.delivery = delivery
        self.due = due
        self.deadline = deadline
        self.missing: set[Hashable] = set()
        self.anybody = False
        self.concerns: set[Hashable] = set()
        self.accepted = False

    @property
    def held_up(self) -> bool:
        """Whether it has to wait for a subscriber."""
        return self.anybody or bool(self.missing)


@dataclass(frozen=True, slots=True)
class Commit(Generic[LaneT]):
    """The commit of a lane.

    Attributes:
        lane: The lane.
        floor: The first offset that is not done.
        clean: The offsets above the floor that are done, as [start, end), in order.
        failures: How many times offsets from the floor on have failed.
    """

    lane: LaneT
    floor: int
    clean: tuple[tuple[int, int], ...]
    failures: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Overdue(Generic[LaneT, HeldT]):
    """An offset that cannot be redelivered: `missing` did not come back; if it is empty, no subscriber came at all."""

    delivery: OffsetDelivery[LaneT, HeldT]
    missing: frozenset[Hashable]
