"""Decides which runs of a DAG begin, and which active runs yield to them (`max_active_runs`).

A task with `depends_on_past` waits for its instance in the previous run. A run that can do nothing else until then must
not keep the run it waits for from starting, so it yields to that run and waits again.

Invariants:
1. No more runs are active than the limit allows.
2. A run yields only to a run that cannot be waiting for it: one with an earlier logical date, or with none. So two runs
   never yield to each other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class StartCandidate(NamedTuple):
    """A run that waits or is active. `logical_us`: its logical date; None: it waits for no other run."""

    number: int
    logical_us: int | None


@dataclass(frozen=True, slots=True)
class Starts:
    """The decision about runs: those that begin, and active ones that wait again."""

    begin: tuple[int, ...]
    wait: tuple[int, ...] = ()


def find_yielding(waiting: Iterable[StartCandidate], active: Iterable[StartCandidate]) -> list[StartCandidate]:
    """Return the active runs that would have to yield to a waiting one if they can do nothing.

    Example:
        >>> active = [StartCandidate(2, 200), StartCandidate(3, 50), StartCandidate(4, None)]
        >>> find_yielding([StartCandidate(1, 100)], active)
        [StartCandidate(number=2, logical_us=200)]
    """
    others = list(waiting)
    return [one for one in active if any(_goes_before(other, one) for other in others)]


def plan_starts(
    waiting: Sequence[StartCandidate], active: Sequence[StartCandidate], idle: Iterable[int], limit: int
) -> Starts:
    """Decide which runs begin.

    Args:
        waiting: The waiting runs, in the order in which they were created.
        active: The active runs.
        idle: The active runs that can do nothing until an earlier run ends.
        limit: The maximum number of active runs.
    """
    room = max(0, limit - len(active))
    begin = [one.number for one in waiting[:room]]
    # The latest one first: it waits longest.
    yielding = sorted(
        (one for one in active if one.number in set(idle)), key=lambda one: one.logical_us or 0, reverse=True
    )
    wait = []
    for one in waiting[room:]:
        other = next((each for each in yielding if _goes_before(one, each)), None)
        if other is not None:
            yielding.remove(other)
            wait.append(other.number)
            begin.append(one.number)
    return Starts(tuple(begin), tuple(wait))


def _goes_before(waiting: StartCandidate, active: StartCandidate) -> bool:
    if active.logical_us is None:
        return False
    return waiting.logical_us is None or waiting.logical_us < active.logical_us
