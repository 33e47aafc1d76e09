"""Finds the trigger that kills its whole host, from deaths that the store counts.

Theory of operation. When a host is lost, no process is left that could say which trigger it ran last. The store then
counts a death for every trigger that ran there. One loss has many causes; from the second one on a trigger is a
suspect, which triggerers run only as a trial, in a process of its own. A trial takes half of the suspects with the most
deaths: a trigger that kills every host it runs on is always among those. If the host of a trial is lost, too, its half
has one more death, and is halved again. Suspects whose trial lives long enough are cleared.

What waits for a trial does not run, so the wait is limited. A triggerer begins no other trial beside one for as long as
`compute_patience` allows after so many deaths; then it tries another half, and everything once a suspect has waited for
`REST_SECONDS`. A host that is lost while it tries several parts narrows nothing down. But the patience grows with each
death until it exceeds the trial, so that nothing else is tried beside it. The triggers of a stream are tried together
with those of it that are not suspects, because one session reads a stream. A single stream is split if the others wait
no longer for the trial than the patience allows; otherwise it is tried as a whole.

`core.triggers.suspects` does the same within one host, whose deaths a surviving parent sees.

Invariants:
1. A trigger is blamed only for hosts that were lost while they tried it alone, and no other trigger.
2. The triggers of a shared stream stay together unless there is nothing else to halve.
3. A triggerer without a trial begins one while there are suspects.
4. A suspect that could run waits no longer than `REST_SECONDS` and the patience with the trials before. That exceeds
   neither twice the life of the lost host nor a day.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tidemill.core.triggers.suspects import (
    ALONE_KILLS,
    FORGET_SECONDS,
    LONGEST_TRIAL_SECONDS,
    SUSPECT_DEATHS,
    compute_patience,
)

#: The shortest trial: a service on a busy machine needs some seconds to start.
SHORTEST_TRIAL_SECONDS = 10.0
#: A triggerer that may begin a trial beside others tries all suspects that have not run for this long.
REST_SECONDS = 600.0
#: The number of trials of a triggerer beyond which it tries only suspects that have waited for long.
MOST_TRIALS = 2
#: Deaths further apart than this, in microseconds, do not add up.
FORGET_US = round(FORGET_SECONDS * 1e6)
#: The hosts that must be lost while they try a trigger alone.
CULPRIT_LOSSES = ALONE_KILLS
#: The deaths that make a trigger a suspect.
SUSPECT_LOSSES = SUSPECT_DEATHS
#: The processes that must be lost while they call `on_kill` of a trigger before nothing calls it any more.
KILL_LOSSES = 3


@dataclass(frozen=True, slots=True)
class FreeSuspect:
    """A suspect that no triggerer runs, or another such trigger of its stream.

    Attributes:
        id: The trigger.
        deaths: How many of its hosts were lost.
        lived_us: How long one of them had run it at most.
        stream: Its shared stream; None: it has none.
        waited_us: How long it has been waiting.
    """

    id: int
    deaths: int
    lived_us: int
    stream: str | None = None
    waited_us: int = 0


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The suspects to try next.

    Attributes:
        triggers: Their ids.
        seconds: They are cleared if their process lives this long.
        deaths: How many of their hosts were lost at most.
        is_split: Whether the other triggers of their stream wait until the trial is over.
    """

    triggers: tuple[int, ...]
    seconds: float
    deaths: int = SUSPECT_LOSSES
    is_split: bool = False


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


def compute_least_wait(beside: int) -> float:
    """Return how many seconds some suspect must have waited before a triggerer with this many trials begins another."""
    return REST_SECONDS if beside >= MOST_TRIALS else 0.0


def choose_kills(losses: Mapping[int, int]) -> tuple[int, ...]:
    """Return the calls of `on_kill` for the next process that makes such calls only.

    Those that were lost once are made together. What is lost again is then made alone, so that a trigger whose
    `on_kill` kills its process costs others no call.

    Args:
        losses: How many processes were lost during each call.

    Example:
        >>> choose_kills({5: 1, 6: 2, 7: 1}), choose_kills({6: 2, 8: 2})
        ((5, 7), (6,))
    """
    fewest = min(losses.values(), default=0)
    found = [number for number, lost in sorted(losses.items()) if lost == fewest]
    return tuple(found if fewest < KILL_LOSSES - 1 else found[:1])


def choose_trial(suspects: Sequence[FreeSuspect], most: int, *, beside: int = 0) -> TrialPlan | None:
    """Return the next trial: half of the suspects with the most deaths, or those with fewer; None: nothing now.

    Args:
        suspects: The suspects that no triggerer runs, and the other such triggers of their streams.
        most: The number of triggers that a process runs at once.
        beside: The number of trials that the triggerer has.

    Example:
        >>> suspects = [FreeSuspect(1, 2, 0), FreeSuspect(2, 4, 0), FreeSuspect(3, 4, 20_000_000)]
        >>> choose_trial(suspects, 100).triggers
        (2,)
        >>> late = [FreeSuspect(1, 2, 0, waited_us=600_000_000), *suspects[1:]]
        >>> choose_trial(late, 100).triggers, choose_trial(late, 100, beside=1).triggers
        ((1,), (1, 2, 3))
    """
    deaths = max((one.deaths for one in suspects), default=0)
    if deaths < SUSPECT_LOSSES or _find_wait(suspects) < compute_least_wait(beside):
        return None
    units: dict[str | int, list[FreeSuspect]] = {}
    # Triggers that ran for long may need long trials; the others do not wait for those.
    for one in sorted(suspects, key=lambda one: (one.lived_us, one.id)):
        units.setdefault(one.id if one.stream is None else one.stream, []).append(one)
    if beside and _find_wait(suspects) >= REST_SECONDS:
        return _plan(_fill(list(units.values()), most))
    worst = [unit for unit in units.values() if any(one.deaths == deaths for one in unit)]
    if len(worst) == 1 and worst[0][0].stream is not None and compute_seconds(worst[0]) <= compute_patience(deaths):
        plan = _split(worst[0], most, deaths)
    else:
        plan = _plan(_fill(worst, most, deaths))
    rest = [unit for unit in units.values() if all(_is_behind(one, deaths) for one in unit)]
    chosen = [one for one in suspects if one.id in plan.triggers]
    if not beside and rest and _is_turn(_join(rest), chosen):
        return _plan(_fill(rest, most))
    return plan


def compute_seconds(suspects: Iterable[FreeSuspect]) -> float:
    """Return how long a trial of these suspects lasts: twice as long as their hosts had lived."""
    lived_seconds = max(one.lived_us for one in suspects) / 1e6
    return min(LONGEST_TRIAL_SECONDS, max(SHORTEST_TRIAL_SECONDS, 2 * lived_seconds))


def _split(unit: Sequence[FreeSuspect], most: int, deaths: int) -> TrialPlan:
    """Try half of the worst triggers of a stream, or those with fewer deaths if these have waited for longer."""
    worst = [one for one in unit if one.deaths == deaths]
    half = worst[: min((len(worst) + 1) // 2, most)]
    others = [one for one in unit if _is_behind(one, deaths)]
    is_turn = bool(others) and _is_turn(others, half)
    chosen = sorted(others, key=lambda one: -one.waited_us)[:most] if is_turn else half
    return TrialPlan(_list_ids(chosen), compute_seconds(unit), deaths, not is_turn)


def _fill(units: Sequence[Sequence[FreeSuspect]], most: int, deaths: int | None = None) -> list[FreeSuspect]:
    """Return as many units as a process runs, at least one.

    With `deaths`, these have half of the triggers with that many deaths.
    """

    def count(unit: Sequence[FreeSuspect]) -> int:
        return sum(one.deaths == deaths for one in unit)

    room = len(_join(units)) if deaths is None else (count(_join(units)) + 1) // 2
    chosen: list[FreeSuspect] = []
    for unit in sorted(units, key=lambda unit: -(count(unit) or len(unit))):
        if not chosen or (count([*chosen, *unit]) <= room and len(chosen) + len(unit) <= most):
            chosen += unit
    return chosen


def _plan(chosen: Sequence[FreeSuspect]) -> TrialPlan:
    return TrialPlan(_list_ids(chosen), compute_seconds(chosen), max(one.deaths for one in chosen))


def _is_behind(one: FreeSuspect, deaths: int) -> bool:
    """Return whether one more death makes a trigger none of the worst, which would not be told apart any more."""
    return one.deaths <= max(deaths - 2, SUSPECT_LOSSES - 1)


def _is_turn(others: Sequence[FreeSuspect], chosen: Sequence[FreeSuspect]) -> bool:
    """Return whether triggers have waited for long, and no less than those that would be tried."""
    return _find_wait(others) >= max(REST_SECONDS, _find_wait(chosen))


def _find_wait(suspects: Sequence[FreeSuspect]) -> float:
    return max(one.waited_us for one in suspects) / 1e6


def _join(units: Sequence[Sequence[FreeSuspect]]) -> list[FreeSuspect]:
    return [one for unit in units for one in unit]


def _list_ids(suspects: Sequence[FreeSuspect]) -> tuple[int, ...]:
    return tuple(sorted(one.id for one in suspects))
