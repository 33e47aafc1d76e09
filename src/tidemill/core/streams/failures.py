"""Resolves events for members that do not accept them, and records which member is to blame until the event is settled.

Invariants: a member fails or rejects an event once; afterwards the event does not wait for the member. A member that
was released fails nothing, because it does not count.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Final, Generic, TypeVar

from tidemill.core.ledger import Ledger, LedgerEntry
from tidemill.core.streams.members import Member, MemberBlame, RejectOutcome, SentEvent
from tidemill.core.streams.pending_events import PendingEvents

LaneT = TypeVar("LaneT", bound=Hashable)
EventT = TypeVar("EventT")
PayloadT = TypeVar("PayloadT")

#: The error recorded for a member that rejected an event.
REJECTED: Final = "it rejected the event"


class GroupFailures(Generic[LaneT, PayloadT, EventT]):
    """The failures and rejects of one group.

    Args:
        ledger: The ledger of the group's events.
        pending_events: The source of its numbers.
    """

    __slots__ = ("_blame", "_ledger", "_pending_events")

    def __init__(self, ledger: Ledger[LaneT, PayloadT], pending_events: PendingEvents) -> None:
        self._ledger = ledger
        self._pending_events = pending_events
        # The errors of the members that failed each event; None for a member that never read it.
        self._blame: dict[LedgerEntry[LaneT, PayloadT], dict[Hashable, str | None]] = {}

    def __bool__(self) -> bool:
        """Return whether any unsettled event was failed, rejected or left unread."""
        return bool(self._blame)

    def note(
        self, sent: SentEvent[LaneT, PayloadT, EventT], member: Member[LaneT, PayloadT, EventT], error: str | None
    ) -> None:
        """Count an event as failed by a member; without an error the member is not blamed."""
        sent.acked -= 1
        if not member.released:
            sent.failed += 1
            self._blame.setdefault(sent, {})[member.name] = error

    def note_unread(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Count all events that a member has not read as failed."""
        for sent in member.yield_unread():
            self.note(sent, member, None)

    def fail(
        self, member: Member[LaneT, PayloadT, EventT], sent: SentEvent[LaneT, PayloadT, EventT], error: str | None
    ) -> None:
        """Fail an event for a member that is on it, or has moved past it with unconfirmed numbers."""
        self.note(sent, member, error)
        self._give_up_event(member, sent)

    def reject(
        self, member: Member[LaneT, PayloadT, EventT], sent: SentEvent[LaneT, PayloadT, EventT]
    ) -> RejectOutcome:
        """Reject an event for a member, if the member is still on it."""
        if member.window is not sent:
            return RejectOutcome.REJECTED_BEFORE if member.refused is sent else RejectOutcome.STALE
        sent.acked -= 1
        sent.rejected += 1
        self._blame.setdefault(sent, {})[member.name] = REJECTED
        self._give_up_event(member, sent)
        member.refused = sent
        return RejectOutcome.REJECTED

    def give_up_all(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        """Forget all numbers of a member without resolving anything."""
        self._give_up_newest(member)
        for seq in member.carried:
            self._pending_events.give_up(seq)
        member.carried.clear()
        member.window = None

    def blame(self, entry: LedgerEntry[LaneT, PayloadT]) -> MemberBlame:
        """Return the members that failed or rejected an unsettled event, and those that never read it."""
        found = self._blame.get(entry, {})
        failures = {name: error for name, error in found.items() if error is not None}
        return MemberBlame(failures, tuple(name for name, error in found.items() if error is None))

    def forget(self, entries: Iterable[LedgerEntry[LaneT, PayloadT]]) -> None:
        """Forget the blame for settled events."""
        if self._blame:
            for entry in entries:
                self._blame.pop(entry, None)

    def _give_up_event(self, member: Member[LaneT, PayloadT, EventT], sent: SentEvent[LaneT, PayloadT, EventT]) -> None:
        """Forget a member's numbers that are bound to an event, and move the member past the event."""
        bound = member.find_bound(sent)
        if member.window is sent:
            self._give_up_newest(member)
            member.window = None
        for seq in bound:
            self._pending_events.give_up(seq)
            waiting = member.carried.pop(seq)
            waiting.pending -= 1
            if not waiting.pending:
                self._ledger.note_resolved(waiting)

    def _give_up_newest(self, member: Member[LaneT, PayloadT, EventT]) -> None:
        if member.newest:
            self._pending_events.give_up(member.newest)
            member.newest = 0
