"""The inputs, effects and limits of `send_queue.SendQueue`: items, what became of them, and how a queue behaves."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
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
        """Whether the sink may accept the same item later."""

    @property
    def oversize(self) -> bool:
        """Whether it is larger than the sink ever accepts."""

    @property
    def waits(self) -> bool:
        """Whether it was not tried because an earlier item of the batch was refused."""


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
        lane: Items of one lane are abandoned together.
        key: Items of one key are delivered in order; None: the item has no order.
        size_bytes: Its size in a batch.
        value: Opaque.
        attempts: How often it was refused; waiting behind another item does not count.
        doubted_at: See `culprit.Suspect`.
        raised_alone: See `culprit.Suspect`; from then on it is sent alone.
    """

    __slots__ = (
        "attempts",
        "deadline",
        "doubted_at",
        "extended",
        "key",
        "lane",
        "last_attempt",
        "number",
        "raised_alone",
        "size_bytes",
        "state",
        "value",
    )

    def __init__(self, lane: LaneT, key: Hashable, size_bytes: int, value: ValueT) -> None:
        self.lane = lane
        self.key = key
        self.size_bytes = size_bytes
        self.value = value
        self.attempts = 0
        self.deadline: float | None = None
        self.extended = False
        self.last_attempt = 0
        self.doubted_at: int | None = None
        self.raised_alone = False
        self.number = 0
        self.state = State.QUEUED

    @property
    def gone(self) -> bool:
        """Whether it has ended."""
        return self.state is State.GONE

    def note_refusal(self, deadline: float) -> float:
        """Count a refusal, and return until when the item is retried: the deadline of its first refusal."""
        self.attempts += 1
        if self.deadline is None:
            self.deadline = deadline
        return self.deadline

    def __lt__(self, other: Item[LaneT, ValueT]) -> bool:
        """Order by arrival: of items due at the same time the oldest goes first."""
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class Delivered(Generic[LaneT, ValueT]):
    """The sink confirmed these."""

    items: Sequence[Item[LaneT, ValueT]]


@dataclass(frozen=True, slots=True)
class Ask(Generic[LaneT, ValueT]):
    """These need a decision; answer with `SendQueue.note_decision`.

    Attributes:
        items: What was refused.
        error: Why.
        oversize: Whether they are larger than the sink ever accepts.
        attempts: How often each was refused.
        sink_failed: Whether the sink failed as a whole, permanently: none of the items is to blame.
    """

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int
    sink_failed: bool = False


@dataclass(frozen=True, slots=True)
class GaveUp(Generic[LaneT, ValueT]):
    """These are not retried."""

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int


Effect = Delivered[LaneT, ValueT] | Ask[LaneT, ValueT] | GaveUp[LaneT, ValueT]


class Hold(Generic[LaneT, ValueT]):
    """A key whose first item is retried or awaits a decision, and the items behind it.

    Attributes:
        head: The first item.
        behind: The others, in order.
        asked: How many of those behind await a decision.
    """

    __slots__ = ("asked", "behind", "head")

    def __init__(self, head: Item[LaneT, ValueT]) -> None:
        self.head = head
        self.behind: deque[Item[LaneT, ValueT]] = deque()
        self.asked = 0


class Failures(Generic[LaneT, ValueT]):
    """What was refused of one batch; items that failed in the same way share one `Ask` or `GaveUp`.

    Attributes:
        now: The time.
        due: When all of it is retried; None: each item has its own backoff.
        bits: 32 random bits.
        again: When items that wait for the last one refused may be sent; None while none was refused.
        sink_failed: Whether the sink failed as a whole, permanently.
    """

    __slots__ = ("_same", "again", "bits", "due", "now", "sink_failed")

    def __init__(self, now: float, due: float | None, bits: int, *, sink_failed: bool = False) -> None:
        self.sink_failed = sink_failed
        self.now = now
        self.due = due
        self.bits = bits
        self.again: float | None = None
        self._same: dict[tuple[str, bool, int], tuple[list[Item[LaneT, ValueT]], list[Item[LaneT, ValueT]]]] = {}

    def add(self, item: Item[LaneT, ValueT], answer: Refused, *, asked: bool) -> None:
        """Add an item that needs a decision (`asked`), or is given up."""
        same = self._same.setdefault((answer.error, answer.oversize, item.attempts), ([], []))
        same[0 if asked else 1].append(item)

    def yield_effects(self) -> Iterator[Effect[LaneT, ValueT]]:
        """Yield what becomes of the items."""
        for (error, oversize, attempts), (asked, given_up) in self._same.items():
            if asked:
                yield Ask(asked, error, oversize, attempts, self.sink_failed)
            if given_up:
                yield GaveUp(given_up, error, oversize, attempts)


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The answer about every item when the sink itself failed."""

    error: str
    retryable: bool
    oversize: bool = False
    waits: bool = False


class WhenOpen(enum.Enum):
    """What becomes of items while the sink's circuit breaker is open."""

    HOLD = "hold"
    GIVE_UP = "give up"


DEFAULT_BACKOFF = Backoff(0.1, 10.0)


@dataclass(frozen=True, slots=True)
class Limits:
    """How a queue behaves.

    Attributes:
        max_count: A batch has at most this many items.
        max_bytes: And at most this many bytes, unless a single item is larger.
        linger_seconds: How long a batch that is not full waits for more.
        budget_seconds: How long an item is retried after its first refusal before it needs a decision.
        backoff: The delays between attempts.
        max_retries: How often an item is retried after a decision to retry it, within one more budget.
        breaker_failures: After how many failures in a row the sink's circuit breaker opens.
        breaker_seconds: The longest time it stays open before one item is sent as a probe.
        when_open: What becomes of items meanwhile.
    """

    max_count: int = 500
    max_bytes: int = 1024 * 1024
    linger_seconds: float = 0.0
    budget_seconds: float = 600.0
    backoff: Backoff = DEFAULT_BACKOFF
    max_retries: int = 20
    breaker_failures: int = 5
    breaker_seconds: float = 5.0
    when_open: WhenOpen = WhenOpen.HOLD
