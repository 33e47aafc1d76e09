"""Finds the trigger that kills its whole host, from deaths that the store counts.

Theory of operation. When a host is lost, no process is left that could say which trigger it ran last. The store then
counts a death for every trigger that ran there. One loss has many causes; from the second one on a trigger is a
suspect, which triggerers run only as a trial, in a process of its own. A trial takes half of the suspects with the most
deaths: a trigger that kills every host it runs on is always among those. If the host of a trial is lost, too, its half
has one more death, and is halved again. Suspects whose trial lives long enough are cleared. A triggerer tries
another half beside a trial that has lived for a while, and later all that is left, because a trial may last for hours.

`core.triggers.suspects` does the same within one host, whose deaths a surviving parent sees.

Invariants:
1. A trigger is blamed only for hosts that were lost while they tried it alone, and no other trigger.
2. The triggers of a shared stream stay together unless there is nothing else to halve.
3. A trial is never empty while there are suspects.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tidemill.core.triggers.suspects import (
    ALONE_KILLS,
    FORGET_SECONDS,
    LONGEST_TRIAL_SECONDS,
    SUSPECT_DEATHS,
)

#: The shortest trial: a service on a busy machine needs some seconds to start.
SHORTEST_TRIAL_SECONDS = 10.0
#: A triggerer begins a second trial beside one that has lived this long.
SECOND_TRIAL_SECONDS = 60.0
#: A triggerer tries all suspects that two trials have left when the second one has lived this long. None waits longer,
#: except triggers of a stream that is being tried.
REST_TRIAL_SECONDS = 600.0
#: Deaths further apart than this, in microseconds, do not add up.
FORGET_US = round(FORGET_SECONDS * 1e6)
#: The hosts that must be lost while they try a trigger alone.
CULPRIT_LOSSES = ALONE_KILLS
#: The deaths that make a trigger a suspect.
SUSPECT_LOSSES = SUSPECT_DEATHS


@dataclass(frozen=True, slots=True)
class FreeSuspect:
    """A suspect that no triggerer runs.

    Attributes:
        id: The trigger.
        deaths: How many of its hosts were lost.
        lived_us: How long the last of them had run it at most.
        stream: Its shared stream; None: it has none.
    """

    id: int
    deaths: int
    lived_us: int
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The suspects to try next. `seconds`: they are cleared if their process lives this long."""

    triggers: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class LostTrial:
    """The process of a trial on a lost host.

    Attributes:
        parent: The service that had started it.
        triggers: The triggers that it ran.
    """

    parent: int | None
    triggers: Collection[int]


def find_alone(trials: Sequence[LostTrial]) -> frozenset[int]:
    """Return the triggers whose host tried them and no others.

    Example:
        >>> sorted(find_alone([LostTrial(1, [7]), LostTrial(2, [8]), LostTrial(2, [9]), LostTrial(3, [4, 5])]))
        [7]
    """
    parents = [trial.parent for trial in trials]
    return frozenset(
        next(iter(trial.triggers)) for trial in trials if len(trial.triggers) == 1 and parents.count(trial.parent) == 1
    )


def choose_trial(suspects: Sequence[FreeSuspect], most: int, *, takes_all: bool = False) -> TrialPlan | None:
    """Return the next trial: half of the suspects with the most deaths; None without suspects.

    Args:
        suspects: The suspects that no triggerer runs.
        most: The number of triggers that a process runs at once.
        takes_all: Whether to try all of them, so that none waits for the end of a long trial. The triggers of a single
            stream are halved nevertheless.

    Example:
        >>> suspects = [FreeSuspect(1, 2, 0), FreeSuspect(2, 3, 0), FreeSuspect(3, 3, 20_000_000)]
        >>> choose_trial(suspects, 100)
        TrialPlan(triggers=(2,), seconds=10.0)
        >>> choose_trial(suspects, 100, takes_all=True)
        TrialPlan(triggers=(1, 2, 3), seconds=40.0)
    """
    if not suspects:
        return None
    deaths = max(one.deaths for one in suspects)
    worst = sorted((one for one in suspects if takes_all or one.deaths == deaths), key=lambda one: one.id)
    units: dict[str | int, list[FreeSuspect]] = {}
    for one in worst:
        units.setdefault(one.id if one.stream is None else one.stream, []).append(one)
    is_single = len(units) == 1
    parts = [[one] for one in worst] if is_single else list(units.values())
    room = len(worst) if takes_all and not is_single else (len(worst) + 1) // 2
    chosen: list[FreeSuspect] = []
    for part in sorted(parts, key=len, reverse=True):
        if not chosen or len(chosen) + len(part) <= min(room, most):
            chosen += part
    lived_seconds = max(one.lived_us for one in chosen) / 1e6
    seconds = min(LONGEST_TRIAL_SECONDS, max(SHORTEST_TRIAL_SECONDS, 2 * lived_seconds))
    return TrialPlan(tuple(sorted(one.id for one in chosen)), seconds)
