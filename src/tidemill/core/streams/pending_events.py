"""Numbers for the trigger events that subscribers derived from raw events, until they are confirmed as stored.

One `PendingEvents` serves all groups of a manager. Binding and confirming happen for every trigger event. Therefore
these functions are written flat, the owners of numbers are in a list rather than a dict, and the common case, a number
that is confirmed while its subscriber is still on the event, does not touch the event.

Invariants:
1. A number is used once.
2. An event is not resolved while a number bound to it is neither confirmed nor given up.
3. Unknown, repeated and late numbers change nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from operator import length_hint
from typing import Any, Final

from tidemill.core.streams.members import Member

#: Shorter lists of owners are not trimmed.
_TRIM_FROM: Final = 1024


class PendingEvents:
    """The numbers, and the subscribers that own them."""

    __slots__ = ("_first", "_groups", "_last", "_owners", "_recent", "_recent_key")

    def __init__(self) -> None:
        self._last = 0
        # The owners of the numbers from `_first` on; None once confirmed or given up.
        self._owners: list[Member[Any, Any, Any] | None] = []
        self._first = 1
        # The members of each group, by key and name.
        self._groups: dict[Hashable, dict[Hashable, Member[Any, Any, Any]]] = {}
        self._recent: dict[Hashable, Member[Any, Any, Any]] = {}
        self._recent_key: Hashable = None

    def open(self, key: Hashable, members: dict[Hashable, Member[Any, Any, Any]]) -> None:
        """Bind a key to a group. Numbers can be bound only through such a key.

        Args:
            key: Anything but None.
            members: The members of the group, by name. The mapping is shared, so later changes apply.
        """
        self._groups[key] = members
        self._recent_key = None

    def close(self, key: Hashable, members: dict[Hashable, Member[Any, Any, Any]]) -> None:
        """Unbind a key, if it is bound to this group."""
        if self._groups.get(key) is members:
            del self._groups[key]
            self._recent_key = None

    def _find(self, key: Hashable) -> dict[Hashable, Member[Any, Any, Any]]:
        self._recent = found = self._groups[key]
        self._recent_key = key
        return found

    def bind_pending_event(self, *, trigger_id: Hashable, key: Hashable) -> int | None:
        """Make the raw event that a trigger is on wait until the trigger event that it has just yielded is stored.

        Call it as soon as the trigger event is taken from the filter, before anything is awaited.

        Returns:
            The number for `confirm_persisted`; None if nothing has to wait: the key is unknown, its stream is not
            acknowledged, or the trigger is not on an event, has rejected it or has failed.
        """
        try:
            # A tuple is hashed again for each lookup; a key that is used repeatedly is the same object.
            members = self._recent if key is self._recent_key else self._find(key)
            member = members[trigger_id]
        except KeyError:
            return None
        # `bind`, inlined: another call for every event would cost too much.
        if member.window is None:
            return None
        self._last = seq = self._last + 1
        self._owners.append(member)
        if member.newest:
            member.carry()
        member.newest = seq
        return seq

    def bind(self, member: Member[Any, Any, Any]) -> int | None:
        """Bind a number to the event that a member is on; see `bind_pending_event`."""
        if member.window is None:
            return None
        self._last = seq = self._last + 1
        self._owners.append(member)
        if member.newest:
            member.carry()
        member.newest = seq
        return seq

    def confirm_persisted(self, seqs: Iterable[int]) -> None:
        """Confirm that trigger events are stored durably.

        Args:
            seqs: Numbers of any groups, iterated once; unknown and repeated ones change nothing.
        """
        owners, first = self._owners, self._first
        for seq in seqs:
            try:
                index = seq - first
                if index < 0:
                    continue
                member = owners[index]
            except (IndexError, TypeError):
                # Not used yet, or None from a `bind_pending_event` that had nothing to wait for.
                continue
            if member is not None:
                owners[index] = None
                if member.newest == seq:
                    # The member is still on the event, which cannot be resolved before the member moves on.
                    member.newest = 0
                else:
                    sent = member.carried.pop(seq)
                    sent.pending -= 1
                    if not sent.pending:
                        member.ledger.note_resolved(sent)
                        member.home.note_resolved()

    def refuse_persisted(self, seqs: Iterable[int], error: str | None) -> None:
        """Fail the raw events of trigger events that will never be stored.

        Args:
            seqs: Numbers of any groups; unknown, repeated and confirmed ones change nothing.
            error: Why they are refused; None: the subscriber is not to blame.
        """
        for seq in seqs:
            index = seq - self._first
            member = self._owners[index] if 0 <= index < len(self._owners) else None
            if member is not None:
                member.group.refuse(member, seq, error)

    def give_up(self, seq: int) -> None:
        """Forget a number that has not been confirmed."""
        self._owners[seq - self._first] = None

    def trim(self) -> int:
        """Free the memory of the oldest numbers that are done; return how many numbers still take memory."""
        owners = self._owners
        if len(owners) >= _TRIM_FROM:
            # Find the first number that is not done, if any; everything before it is done.
            unread = iter(owners)
            found = next(filter(None, unread), None)
            done = len(owners) - length_hint(unread) - (found is not None)
            if done * 2 > len(owners):
                del owners[:done]
                self._first += done
        return len(owners)
