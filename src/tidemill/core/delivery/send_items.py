"""The inputs, effects and limits of `send_queue.SendQueue`."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from tidemill.core.retry import Backoff

LaneT = TypeVar("LaneT", bound=Hashable)
ValueT = TypeVar("ValueT")


class RefusedItem(Protocol):
    """A sink's answer about one item."""

    @property
    def error(self) -> str:
        """The error message."""

    @property
    def retryable(self) -> bool:
        """Whether the sink may accept the same item later."""

    @property
    def oversize(self) -> bool:
        """Whether the item is larger than the sink ever accepts."""

    @property
    def waits(self) -> bool:
        """Whether the sink did not try the item because it refused an earlier one of the batch."""


class State(enum.Enum):
    """The state of an item in the queue."""

    QUEUED = "queued"
    WAITING = "waiting"
    ASKED = "asked"
    GONE = "gone"


class Decision(enum.Enum):
    """The answer to `AskDecision`."""

    RETRY = "retry"
    DROP = "drop"


class Item(Generic[LaneT, ValueT]):
    """An item to deliver.

    Attributes:
        lane: Items of one lane are abandoned together.
        key: Items of one key are delivered in order; an item without a key (None) has no order.
        size_bytes: The size of the item in a batch.
        value: The payload; opaque.
        attempts: The number of refusals; waiting behind another item does not count.
        doubted_at: See `culprit.Suspect`.
        raised_alone: See `culprit.Suspect`; from then on the item is sent alone.
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
        """Whether the item is done: delivered, given up, dropped or abandoned."""
        return self.state is State.GONE

    def note_refusal(self, deadline: float) -> float:
        """Count a refusal and return the end of the item's retries; the first refusal fixes it at `deadline`."""
        self.attempts += 1
        if self.deadline is None:
            self.deadline = deadline
        return self.deadline

    def __lt__(self, other: Item[LaneT, ValueT]) -> bool:
        """Order by arrival: of items due at the same time, the oldest goes first."""
        return self.number < other.number


@dataclass(frozen=True, slots=True)
class ItemsDelivered(Generic[LaneT, ValueT]):
    """The sink confirmed these items."""

    items: Sequence[Item[LaneT, ValueT]]


@dataclass(frozen=True, slots=True)
class AskDecision(Generic[LaneT, ValueT]):
    """These items need a decision. Answer with `SendQueue.note_decision`.

    Attributes:
        items: The refused items.
        error: The reason.
        oversize: Whether the items are larger than the sink ever accepts.
        attempts: The number of refusals of each item.
        sink_failed: Whether the sink failed as a whole, permanently; then no item is to blame.
    """

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int
    sink_failed: bool = False


@dataclass(frozen=True, slots=True)
class GaveUp(Generic[LaneT, ValueT]):
    """These items are not retried."""

    items: Sequence[Item[LaneT, ValueT]]
    error: str
    oversize: bool
    attempts: int


Effect = ItemsDelivered[LaneT, ValueT] | AskDecision[LaneT, ValueT] | GaveUp[LaneT, ValueT]


class HeldKey(Generic[LaneT, ValueT]):
    """A key whose first item is being retried or awaits a decision, and the items behind it.

    Attributes:
        head: The first item.
        behind: The other items, in order.
        asked: The number of items behind that await a decision.
    """

    __slots__ = ("asked", "behind", "head")

    def __init__(self, head: Item[LaneT, ValueT]) -> None:
        self.head = head
        self.behind: deque[Item[LaneT, ValueT]] = deque()
        self.asked = 0


class BatchFailures(Generic[LaneT, ValueT]):
    """The refused items of one batch. Items that failed in the same way share one `AskDecision` or `GaveUp`.

    Attributes:
        now: The current time.
        due: When the whole batch is retried; None: each item has its own backoff.
        bits: 32 random bits.
        again: When items behind the last refused one may be sent; None if none was refused.
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

    def add(self, item: Item[LaneT, ValueT], answer: RefusedItem, *, asked: bool) -> None:
        """Add an item that needs a decision (`asked`) or is given up."""
        same = self._same.setdefault((answer.error, answer.oversize, item.attempts), ([], []))
        same[0 if asked else 1].append(item)

    def yield_effects(self) -> Iterator[Effect[LaneT, ValueT]]:
        """Yield one effect for each group of items that failed in the same way."""
        for (error, oversize, attempts), (asked, given_up) in self._same.items():
            if asked:
                yield AskDecision(asked, error, oversize, attempts, self.sink_failed)
            if given_up:
                yield GaveUp(given_up, error, oversize, attempts)


@dataclass(frozen=True, slots=True)
class WholeBatch:
    """The answer for every item of a batch when the sink itself failed."""

    error: str
    retryable: bool
    oversize: bool = False
    waits: bool = False


class WhenOpen(enum.Enum):
    """What happens to items while the circuit breaker is open."""

    HOLD = "hold"
    GIVE_UP = "give up"


DEFAULT_BACKOFF = Backoff(0.1, 10.0)


@dataclass(frozen=True, slots=True)
class SendLimits:
    """The limits of a queue.

    Attributes:
        max_count: The maximum number of items in a batch.
        max_bytes: The maximum size of a batch, unless a single item is larger.
        linger_seconds: How long a batch that is not full waits for more items.
        budget_seconds: How long an item is retried after its first refusal before it needs a decision.
        backoff: The delays between attempts.
        max_retries: The maximum number of retries after a decision to retry, within one more budget.
        breaker_failures: The number of consecutive failures that opens the circuit breaker.
        breaker_seconds: The longest time the breaker stays open before one item is sent as a probe.
        when_open: What happens to items while the breaker is open.
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
