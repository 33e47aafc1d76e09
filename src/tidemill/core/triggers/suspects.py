"""Which trigger ends the process that runs it: those that ran at its deaths are tried apart until it stands alone.

Theory of operation. A trigger that calls `os._exit`, crashes C code or uses up all memory ends the triggerer, and
every other trigger with it. The death names nobody, so deaths are counted per trigger. One that ran at several deaths
in a row, each soon after a start, is a suspect: the triggerer no longer runs it, and it waits for a trial, in a process
that runs nothing but suspects. If that dies, too, those that ran in it are tried in halves; if it does not, they are
cleared, and go back. One that ended its process when it was alone, more than once, is the culprit.

Invariants:
1. A trigger is blamed only for processes that ended while they ran no other one.
2. Every suspect is cleared, blamed or has ended after a bounded number of trials, about two per halving.
3. What runs in no trial and was at no death is never held back.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: At this many deaths in a row a trigger becomes a suspect: something else may have killed the process once.
SUSPECT_DEATHS = 3
#: This many processes have to end with a trigger alone in them until it is blamed.
ALONE_DEATHS = 2
#: A process that lived this long costs the others little when it ends, and what ended it would take as long in a trial,
#: for which the other suspects would have to wait.
SLOW_SECONDS = 30.0
#: The shortest trial. A longer one takes twice as long as the process lived that had died.
TRIAL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Trial:
    """Triggers to run in a process that runs nothing else.

    Attributes:
        triggers: Their ids.
        seconds: They are cleared if the process lives this long with them.
        deaths: How many trials of this one trigger, alone, its process did not outlive.
    """

    triggers: tuple[int, ...]
    seconds: float
    deaths: int = 0


class Suspects:
    """The triggers of one triggerer that may end its process.

    Example:
        >>> suspects = Suspects()
        >>> [suspects.note_death([7, 8], 0.5) for _ in range(3)]
        [(), (), (7, 8)]
        >>> suspects.begin_trial()
        Trial(triggers=(7,), seconds=2.0, deaths=0)
    """

    __slots__ = ("_deaths", "_trial", "_trials")

    def __init__(self) -> None:
        """Suspect none."""
        self._deaths: dict[int, int] = {}
        # The last one is the next.
        self._trials: list[Trial] = []
        self._trial: Trial | None = None

    def note_death(self, running: Collection[int], lived_seconds: float) -> tuple[int, ...]:
        """Note that the triggerer died, and return which triggers wait for a trial from now on.

        Args:
            running: The triggers that ran in it.
            lived_seconds: How long ago it was started.
        """
        if lived_seconds > SLOW_SECONDS:
            self._deaths = {}
            return ()
        self._deaths = {number: self._deaths.get(number, 0) + 1 for number in running}
        found = tuple(sorted(number for number, deaths in self._deaths.items() if deaths >= SUSPECT_DEATHS))
        for number in found:
            del self._deaths[number]
        if found:
            # After those that wait already.
            self._trials[:0] = _halve(Trial(found, max(TRIAL_SECONDS, 2 * lived_seconds)))
        return found

    def begin_trial(self) -> Trial | None:
        """Return whom to try next, after the last trial has been judged; None: nobody waits."""
        self._trial = self._trials.pop() if self._trials else None
        return self._trial

    def note_survived(self) -> None:
        """Note that the process of the trial has outlived it: what ran in it is cleared."""
        self._trial = None

    def note_fatal(self, running: Collection[int], waiting: Collection[int]) -> int | None:
        """Note that the process of the trial died, and return the culprit; None: it is not known yet.

        Args:
            running: The triggers that ran in it.
            waiting: Those of the trial that it had not begun to run.
        """
        trial, self._trial = self._trial, None
        if trial is None:
            return None
        if waiting:
            self._trials.append(Trial(tuple(sorted(waiting)), trial.seconds))
        ran = tuple(sorted(running))
        if len(trial.triggers) == 1 and ran:
            if trial.deaths + 1 >= ALONE_DEATHS:
                return ran[0]
            self._trials.append(Trial(ran, trial.seconds, trial.deaths + 1))
        elif ran:
            self._trials += _halve(Trial(ran, trial.seconds))
        return None


def _halve(trial: Trial) -> list[Trial]:
    """Return the trials of both halves, of which the last one comes first."""
    middle = (len(trial.triggers) + 1) // 2
    halves = (trial.triggers[middle:], trial.triggers[:middle])
    return [Trial(half, trial.seconds) for half in halves if half]
