"""What goes into the redelivery machine and comes out of it; see `redelivery`."""

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
    """How long and how often.

    Attributes:
        max_redeliveries: Deliveries after the first one; a failure of the last one is dead-lettered.
        backoff: How long an offset waits after each failure, and each time it was left unread.
        wait_seconds: How long those who failed an offset, or left it unread, may take to come back.
        max_open: Admitted offsets of one lane that are not done.
        max_open_bytes: What those of all lanes may hold together.
    """

    max_redeliveries: int = 5
    backoff: Backoff = field(default_factory=lambda: Backoff(0.5, 30.0))
    wait_seconds: float = 60.0
    max_open: int = 10_000
    max_open_bytes: int = 64 * 1024 * 1024


class RedeliveryVerdict(enum.Enum):
    """How a delivery ended.

    Attributes:
        CLEAN: Somebody accepted it, and nobody did anything else.
        FAILED: Somebody read it and failed.
        REJECTED: Somebody refused it for good.
        UNREAD: Nobody failed, but somebody never read it.
        UNSEEN: Nobody was there for it, or is left of those who were.
    """

    CLEAN = "clean"
    FAILED = "failed"
    REJECTED = "rejected"
    UNREAD = "unread"
    UNSEEN = "unseen"


def judge_outcome(acked: int, failed: int, rejected: int, unread: int = 0) -> RedeliveryVerdict:
    """Return what this many subscribers make of an event; a reject outweighs a failure, which outweighs the rest.

    Args:
        acked: How many accepted it.
        failed: How many failed it, those who never read it included.
        rejected: How many refused it for good.
        unread: How many of the failed are known never to have read it.

    Example:
        >>> verdict(acked=2, failed=1, rejected=0), verdict(acked=2, failed=1, rejected=0, unread=1)
        (<RedeliveryVerdict.FAILED: 'failed'>, <RedeliveryVerdict.UNREAD: 'unread'>)
    """
    if rejected:
        return RedeliveryVerdict.REJECTED
    if failed > unread:
        return RedeliveryVerdict.FAILED
    if failed:
        return RedeliveryVerdict.UNREAD
    return RedeliveryVerdict.CLEAN if acked else RedeliveryVerdict.UNSEEN


class Skip(enum.Enum):
    """Why an offset is not delivered."""

    CLEAN = "was done before the lane was assigned"
    STALE = "is behind what was read"
    FOREIGN = "its lane is not assigned"


class Delivery(Generic[LaneT, HeldT]):
    """One offset on its way to the subscribers. Read it; only `Redelivery` makes one.

    Attributes:
        lane: Where it came from.
        offset: Its place there.
        held: What is given to the subscribers.
        size_bytes: What it holds of the budget.
        number: Rises with every delivery, redeliveries included.
        failures: How often the offset failed before.
        unread: How often in a row nobody failed it, and not everybody read it.
        resolved: Whether it ended.
        waiting: How it waits to be given again, if it does.
    """

    __slots__ = ("failures", "held", "lane", "number", "offset", "resolved", "size_bytes", "unread", "waiting")

    def __init__(
        self, lane: LaneT, offset: int, held: HeldT, size_bytes: int, number: int, failures: int, unread: int = 0
    ) -> None:
        """Take everything as it is."""
        self.lane = lane
        self.offset = offset
        self.held = held
        self.size_bytes = size_bytes
        self.number = number
        self.failures = failures
        self.unread = unread
        self.resolved = False
        self.waiting: Waiting[LaneT, HeldT] | None = None

    def __repr__(self) -> str:
        """Show what matters while debugging."""
        return f"<Delivery {self.number} of {self.lane!r} at {self.offset}, failed {self.failures} times>"


class Waiting(Generic[LaneT, HeldT]):
    """A delivery that is not done, before it is given again.

    Attributes:
        delivery: Which.
        due: When its backoff is over.
        deadline: Until when it waits for those that are missing.
        missing: Who failed it or left it unread, and has to come back first.
        anybody: Whether it waits for anybody to join.
        concerns: Who failed it or left it unread, and is not gone for good.
        accepted: Whether anybody accepted it, so that it is clean once it concerns nobody.
    """

    __slots__ = ("accepted", "anybody", "concerns", "deadline", "delivery", "due", "missing")

    def __init__(self, delivery: Delivery[LaneT, HeldT], due: float, deadline: float) -> None:
        """Wait for nobody yet."""
        self.delivery = delivery
        self.due = due
        self.deadline = deadline
        self.missing: set[Hashable] = set()
        self.anybody = False
        self.concerns: set[Hashable] = set()
        self.accepted = False

    @property
    def held_up(self) -> bool:
        """Whether it has to wait for somebody."""
        return self.anybody or bool(self.missing)


@dataclass(frozen=True, slots=True)
class Commit(Generic[LaneT]):
    """What to commit of a lane.

    Attributes:
        lane: Which.
        floor: The first offset that is not done.
        clean: Done above it, as [start, end), in order.
        failures: How often offsets from the floor on have failed.
    """

    lane: LaneT
    floor: int
    clean: tuple[tuple[int, int], ...]
    failures: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Overdue(Generic[LaneT, HeldT]):
    """An offset that cannot be given again: `missing` did not come back; nobody came at all when it is empty."""

    delivery: Delivery[LaneT, HeldT]
    missing: frozenset[Hashable]
