"""What goes in and out of `core.outbox.SendQueue`: items, what became of them, and how a queue behaves."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tidemill.core.retry import Backoff

LaneT = TypeVar("LaneT", bound=Hashable)
ValueT = TypeVar("ValueT")


class Refused(Protocol):
    """A sink's answer about one item."""

    @property
    def error(self) -> str:
        """What happened."""

    @property
    def retryable(self) -> bool:
        """Whether the same item may be taken later."""

    @property
    def oversize(self) -> bool:
        """Whether it is larger than the sink takes at all."""


class State(enum.Enum):
    """Where an item is."""

    QUEUED = "queued"
    WAITING = "waiting"
    ASKED = "asked"
    GONE = "gone"


class Decision(enum.Enum):
    """The answer to `Ask`."""

    RETRY = "retry"
    DROP = "drop"


class Item(Generic[LaneT, ValueT]):
    """One thing to deliver.

    Attributes:
        lane: What can be abandoned together.
        key: Orders items; None: in no order to any other.
        size_bytes: What it counts for in a batch.
        value: Opaque.
        attempts: How often it was refused.
    """

    __slots__ = ("attempts", "deadline", "extended", "key", "lane", "number", "size_bytes", "state", "value")

    def __init__(self, lane: LaneT, key: Hashable, size_bytes: int, value: ValueT) -> None:
        """Make an item that was never tried."""
        self.lane = lane
        self.key = key
        self.size_bytes = size_bytes
        self.value = value
        self.attempts = 0
        self.deadline: float | None = None
        self.extended = False
        self.number = 0
        self.state = State.QUEUED

    @property
    def gone(self) -> bool:
        """Whether it ended."""
        return self.state is State.GONE

    def __lt__(self, other: Item[LaneT, ValueT]) -> bool:
        """Order by arrival: of items due at the same time the oldest goes first."""
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Delivered(Generic[LaneT, ValueT]):
    """The sink confirmed these."""

    items: Sequence[Item[LaneT, ValueT]]


@dataclass(frozen=True, slots=True)
class Ask(Generic[LaneT, ValueT]):
    """Somebody has to decide about these; answer with `SendQueue.decided`."""

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int


@dataclass(frozen=True, slots=True)
class GaveUp(Generic[LaneT, ValueT]):
    """These are not tried again."""

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int


Effect = Delivered[LaneT, ValueT] | Ask[LaneT, ValueT] | GaveUp[LaneT, ValueT]


DEFAULT_BACKOFF = Backoff(0.1, 10.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """How a queue behaves.

    Attributes:
        max_count: A batch has at most this many items.
        max_bytes: And this many bytes, unless a single item is larger.
        linger_seconds: How long a batch that is not full waits for more.
        budget_seconds: How long an item is tried again after its first refusal before somebody is asked.
        backoff: Between tries.
    """

    max_count: int = 500
    max_bytes: int = 1024 * 1024
    linger_seconds: float = 0.0
    budget_seconds: float = 600.0
    backoff: Backoff = DEFAULT_BACKOFF
