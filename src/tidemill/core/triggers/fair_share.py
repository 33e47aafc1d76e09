"""Divides waiting triggers among triggerers, and decides which ones a triggerer hands over.

Theory of operation. Each triggerer claims for itself, when it is rung. Of what waits it takes its part of the level to
which all live triggerers would fill up together; the others take theirs. All triggers of one shared stream are a unit,
which one triggerer runs. A unit that fits into no triggerer's capacity goes to the emptiest one. If one has waited for
long that fits into a capacity, but into no room, the triggerer with the most room, of several the first one, claims
nothing else until it fits. A triggerer that runs far more than the mean, because another one has started, hands units
over, which the emptier ones then claim.

Invariants:
1. The shares of all triggerers add up to at least what waits, or to all free capacity.
2. No share exceeds the free capacity, except for a unit larger than every capacity, or than the room of the only
   triggerer.
3. A unit that fits into a capacity is claimed once enough of that triggerer's triggers have ended.
4. A hand-over makes the larger of two triggerers smaller, so hand-overs end.
5. A triggerer that begins to read a stream claims all its waiting triggers at once. Otherwise the first ones would
   read, and acknowledge to the broker, what the others have not seen.
6. At most one of the triggerers of one queue keeps its room for a unit, and the only one never does: small triggers go
   on elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

#: A triggerer hands over if it runs this much more than the mean, as a fraction of it.
_FAR = 0.1


class TriggererLoad(NamedTuple):
    """A triggerer: how many triggers it runs, and how many it runs at most. `session` tells equal ones apart."""

    held: int
    capacity: int
    session: int = 0


class WaitingTrigger(NamedTuple):
    """A trigger that can be claimed, with its shared stream."""

    id: int
    stream: str | None = None


class StreamUnit(NamedTuple):
    """The triggers of a shared stream: how many wait, and how many the claimer runs."""

    waiting: int
    running: int

    @property
    def size(self) -> int:
        """The number of its triggers."""
        return self.waiting + self.running


class ClaimChoice(NamedTuple):
    """The triggers that a triggerer claims.

    Attributes:
        triggers: The triggers, without those of `whole`.
        whole: Streams that it begins to read; it claims all their waiting triggers.
        oversized: Streams that exceed every capacity, and that it reads nevertheless.
        unfit: Streams that are left to others.
        kept: Streams that have waited for long and fit into no triggerer's room: the claimer keeps its room for them.
    """

    triggers: tuple[int, ...]
    whole: frozenset[str]
    oversized: frozenset[str]
    unfit: frozenset[str]
    kept: frozenset[str] = frozenset()


class HeldUnit(NamedTuple):
    """Triggers that can only be handed over together: `size` of one stream, or a single one."""

    key: str | int
    size: int


def compute_share(own: TriggererLoad, others: Sequence[TriggererLoad], waiting: int) -> int:
    """Return how many of the waiting triggers a triggerer takes.

    Example:
        >>> compute_share(TriggererLoad(10, 100), [TriggererLoad(0, 100)], 30)
        10
        >>> compute_share(TriggererLoad(10, 100), [TriggererLoad(0, 5)], 30)
        25
    """
    free = max(0, own.capacity - own.held)
    everybody = [own, *others]
    low, high = min(load.held for load in everybody), max(load.held for load in everybody) + waiting
    while low < high:  # the lowest level at which everything fits
        level = (low + high) // 2
        if sum(max(0, min(load.capacity, level) - load.held) for load in everybody) >= waiting:
            high = level
        else:
            low = level + 1
    return max(0, min(free, waiting, low - own.held))


def choose_claims(
    rows: Sequence[WaitingTrigger],
    units: Mapping[str, StreamUnit],
    share: int,
    room: int,
    own: TriggererLoad,
    others: Sequence[TriggererLoad],
    late: Collection[str] = (),
) -> ClaimChoice:
    """Choose triggers to claim, in the given order.

    Args:
        rows: Triggers that can be claimed, the most urgent first.
        units: The units of their streams.
        share: The number of triggers to take; those of streams that the triggerer reads come on top.
        room: The number of triggers to take at once; a stream that it begins to read may exceed it.
        own: The claimer.
        others: The other triggerers. Without any, units need not fit into the capacity.
        late: The streams that have waited for long.

    Example:
        >>> rows = [WaitingTrigger(1), WaitingTrigger(2, "wide"), WaitingTrigger(3), WaitingTrigger(4)]
        >>> choice = choose_claims(rows, {"wide": StreamUnit(9, 0)}, 2, 5, TriggererLoad(0, 5), [TriggererLoad(0, 10)])
        >>> choice.triggers, sorted(choice.whole), sorted(choice.unfit)
        ((1, 3), [], ['wide'])
    """
    largest = max(load.capacity for load in (own, *others))
    held, least = own.held, min((load.held for load in others), default=math.inf)
    free = max(room, own.capacity - own.held)
    chosen: list[int] = []
    joined: set[str] = set()
    whole: set[str] = set()
    oversized: set[str] = set()
    unfit: set[str] = set()
    streams = {row.stream for row in rows if row.stream is not None and row.stream in late}
    kept = frozenset(key for key in streams if _keeps_room(units[key], own, others))
    if kept:
        share = 0
    for row in rows:
        stream = row.stream
        if stream is not None and not (stream in joined or stream in whole or stream in unfit):
            unit = units[stream]
            if unit.size > largest and (unit.running or held <= least):
                oversized.add(stream)
                (joined if unit.running else whole).add(stream)
                held += unit.waiting
            elif (unit.waiting <= free or not others) and unit.running:
                joined.add(stream)
                free -= unit.waiting
            elif (unit.waiting <= free or not others) and share > 0:
                whole.add(stream)
                share, room, free = share - unit.waiting, room - unit.waiting, free - unit.waiting
            else:
                unfit.add(stream)
        if stream in whole:
            continue
        if stream in oversized:
            chosen.append(row.id)
        elif room > 0 and (stream in joined or (stream is None and share > 0)):
            chosen.append(row.id)
            share, room, free = share - 1, room - 1, free - (stream is None)
    return ClaimChoice(tuple(chosen), frozenset(whole), frozenset(oversized), frozenset(unfit), kept)


def _keeps_room(unit: StreamUnit, own: TriggererLoad, others: Sequence[TriggererLoad]) -> bool:
    """Return whether a triggerer claims nothing else until a unit fits: none has more room of those that can run it.

    Of triggerers with equal room the first one does; if all of them did, nothing would be claimed until a trigger ends.
    The only triggerer claims the unit at once, beyond its capacity.
    """
    if not others or unit.running or own.capacity < unit.size:
        return False
    able = [load for load in others if load.capacity >= unit.size]
    room = own.capacity - own.held
    if unit.waiting <= max([room, *(load.capacity - load.held for load in able)]):
        return False
    return all((room, -own.session) >= (load.capacity - load.held, -load.session) for load in able)


def is_far_above(own: TriggererLoad, others: Sequence[TriggererLoad]) -> bool:
    """Return whether a triggerer runs far more than the mean.

    Example:
        >>> is_far_above(TriggererLoad(2, 9), [TriggererLoad(0, 9)]), is_far_above(TriggererLoad(2, 9), [])
        (True, False)
    """
    mean = (own.held + sum(load.held for load in others)) / (1 + len(others))
    return own.held - mean >= max(1.0, _FAR * mean)


def choose_moves(
    own: TriggererLoad, others: Sequence[TriggererLoad], units: Sequence[HeldUnit], limit: int
) -> list[str | int]:
    """Return the units that a triggerer hands over now.

    Args:
        own: The triggerer.
        others: The other triggerers.
        units: What it may hand over.
        limit: The number of triggers to hand over at once; a single larger unit may go, too.

    Example:
        >>> choose_moves(TriggererLoad(4, 9), [TriggererLoad(0, 9)], [HeldUnit("wide", 3), HeldUnit(7, 1)], 100)
        ['wide']
    """
    if not is_far_above(own, others):
        return []
    mean = (own.held + sum(load.held for load in others)) / (1 + len(others))
    held, moved = own.held, 0
    loads = [list(load) for load in others]
    chosen: list[str | int] = []
    for unit in sorted(units, key=lambda one: -one.size):
        if held - mean < 1.0 or (chosen and moved + unit.size > limit):
            break
        fitting = [load for load in loads if load[0] + unit.size <= load[1]]
        emptiest = min(fitting, key=lambda load: (load[0], -load[1]), default=None)
        if emptiest is None or emptiest[0] + unit.size >= held:
            continue
        emptiest[0] += unit.size
        held, moved = held - unit.size, moved + unit.size
        chosen.append(unit.key)
    return chosen


def find_interested(
    queues: Collection[str], others: Sequence[tuple[Collection[str], TriggererLoad]]
) -> list[TriggererLoad]:
    """Return the loads of the triggerers that serve all of these queues; without queues they serve every one.

    One that serves only a part of them cannot take every trigger that another leaves to it.
    """
    return [load for served, load in others if not served or (queues and set(queues) <= set(served))]
