"""Finds the trigger that kills its process: triggers that ran when the process died are tried in ever smaller halves.

Theory of operation. A trigger that calls `os._exit`, crashes C code or exhausts the memory kills the triggerer, and
with it every other trigger. A death does not name its cause, so deaths are counted per trigger, however long the
process had lived. Triggers that ran at several deaths are suspects. None is held back: the suspects run in two trial
processes, one half in each, and the triggerer runs all others. When a trial process dies, its half is halved again, and
the other half returns to the triggerer. When a trial process lives for twice the lifetime of the triggerer, its half is
cleared and returns to the triggerer, too. A cleared trigger stays one death away from suspicion for a day, and its next
trial takes twice as long, so that a trigger that kills at irregular intervals is found. A trigger that kills its
process more than once while it is alone in it is the culprit.

Processes also die for external reasons, such as a user's kill or a lack of memory. Therefore deaths of the triggerer
only make suspects. A kill (SIGKILL) counts less than any other death, and not at all if another process was killed in
the same moment.

Only one process may run the triggers of a shared stream. All of them are suspects if one is, and halving does not split
a stream unless there is nothing else to split. In that case the halves run one after the other, and all other triggers
of the stream wait meanwhile. They wait no longer than `compute_patience` allows after this many deaths; a stream whose
trial would last longer is tried as a whole, together with the triggers that join it, until more processes have died.

Hosts die, too, and with them the process that could say so. `core.triggers.lost_hosts` finds the suspects then, from
deaths that the store has counted; they are tried here in the same way.

Invariants:
1. A trigger is blamed only for processes that died while they ran no other trigger.
2. Each death of a trial process halves its triggers, so there are about log2(suspects) deaths until one is alone.
3. Triggers that did not run when the triggerer died, or that passed their trial, run in the triggerer. Only triggers
   of a stream that is split ever wait for a trial, and not longer than `compute_patience`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

#: The number of deaths that makes a trigger a suspect: something else may have killed the process once.
SUSPECT_DEATHS = 2
#: The number of processes that must die with a trigger alone in them before it is blamed.
ALONE_DEATHS = 2
#: The same for kills, which may come from outside.
ALONE_KILLS = 3
#: Processes that are killed within this time of each other were killed from outside.
SAME_SECONDS = 2.0
#: Deaths that are further apart do not add up, and after this time cleared triggers are forgotten.
FORGET_SECONDS = 86400.0
#: The shortest trial. A longer one takes twice the lifetime of the triggerer.
TRIAL_SECONDS = 2.0
#: The longest trial.
LONGEST_TRIAL_SECONDS = 86400.0
#: How long triggers wait for the trial of triggers that have had `SUSPECT_DEATHS` deaths.
PATIENCE_SECONDS = 60.0
#: Each further death multiplies it by this.
_PATIENCE_GROWTH = 4
#: If the triggerer dies this many times as fast, its suspects replace those that are on trial.
_HASTE = 4


@dataclass(frozen=True, slots=True)
class ProcessEnd:
    """A process that ended while it ran triggers.

    Attributes:
        running: The triggers that ran in it, each with its shared stream; None: it has none.
        lived_seconds: The lifetime of the process.
        at: When it ended, in seconds.
        killed: Whether it was killed, possibly from outside.
        waiting: Triggers of its trial that it had not started yet.
        deaths: The earlier deaths of its triggers that the store has counted; triggers without any may be left out.
    """

    running: Mapping[int, str | None]
    lived_seconds: float
    at: float
    killed: bool = False
    waiting: Collection[int] = ()
    deaths: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trial:
    """Triggers that run in a process without any others.

    Attributes:
        number: The number of the trial; a repeated trial keeps its number.
        triggers: Their ids.
        seconds: They are cleared if the process lives this long with them.
        deaths: How many times its process died while it contained a single trigger.
        kills: How many of these deaths were kills.
        explained: Whether another trigger has since been blamed for the deaths that made these suspects.
        losses: How many deaths its triggers have had in all.
        is_split: Whether these are some of the triggers of a stream; the others of the stream wait. Otherwise triggers
            that join its streams meanwhile join the trial.
        after: The trial that must be over before this one begins; 0: none.
    """

    number: int
    triggers: tuple[int, ...]
    seconds: float
    deaths: int = 0
    kills: int = 0
    explained: bool = False
    losses: int = SUSPECT_DEATHS
    is_split: bool = False
    after: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """The consequences of a process's exit.

    Attributes:
        held: The triggers of trials that are about to begin; all other triggers of the process are free.
        dropped: The trials to end at once, begun or not; their triggers are free.
        culprit: The trigger that is to fail.
        is_death: Whether the store counts a death for the other triggers.
        explained: The triggers whose earlier deaths the culprit explains.
    """

    held: tuple[int, ...] = ()
    dropped: tuple[Trial, ...] = ()
    culprit: int | None = None
    is_death: bool = True
    explained: tuple[int, ...] = ()


@dataclass(slots=True)
class _Record:
    """The record of a trigger.

    Attributes:
        deaths: The deaths that count.
        meanwhile: How many of them were deaths of the triggerer after trials began, and so not caused by a trigger on
            trial.
        cleared: How many times it was cleared.
        at: When any of this last changed.
    """

    deaths: int = 0
    meanwhile: int = 0
    cleared: int = 0
    at: float = field(default=0.0)


def compute_patience(deaths: int) -> float:
    """Return how many seconds other triggers wait for a trial of triggers that have had this many deaths.

    It grows with the deaths, so that it comes to exceed each trial, and a trigger that kills its processes is tried
    without others; and it is short after few deaths, so that others do not wait long for nothing.

    Example:
        >>> [compute_patience(deaths) for deaths in (1, 2, 3, 4, 9)]
        [60.0, 60.0, 240.0, 960.0, 86400.0]
    """
    growth = float(_PATIENCE_GROWTH ** min(max(0, deaths - SUSPECT_DEATHS), 20))
    return min(LONGEST_TRIAL_SECONDS, PATIENCE_SECONDS * growth)


class Suspects:
    """The triggers of one triggerer that may kill its process.

    Example:
        >>> suspects = Suspects()
        >>> end = ProcessEnd({7: None, 8: None}, 0.5, 100.0)
        >>> [suspects.note_death(end).held for _ in range(2)]
        [(), (7, 8)]
        >>> [(trial.triggers, trial.seconds) for trial in suspects.begin_trials()]
        [((7,), 2.0), ((8,), 2.0)]
    """

    __slots__ = ("_begun", "_hasty", "_killed", "_lives", "_number", "_records", "_trials")

    def __init__(self) -> None:
        self._records: dict[int, _Record] = {}
        # The lifetimes of the last triggerers.
        self._lives: deque[float] = deque(maxlen=SUSPECT_DEATHS)
        self._trials: dict[int, Trial] = {}
        self._begun: set[int] = set()
        # Whether these trials replaced others. Then they cannot be replaced themselves: two sets could replace each
        # other for ever.
        self._hasty = False
        self._number = 0
        # The trial (0: the triggerer) whose process was killed last, and when.
        self._killed: tuple[int, float] | None = None

    def note_death(self, end: ProcessEnd) -> Verdict:
        """Process the death of the triggerer."""
        if self._is_outside(0, end):
            return Verdict(is_death=False)
        self._lives.append(end.lived_seconds)
        self._records = {
            number: known for number, known in self._records.items() if end.at - known.at <= FORGET_SECONDS
        }
        for number in end.running:
            known = self._records.setdefault(number, _Record())
            known.deaths, known.at = max(known.deaths, end.deaths.get(number, 0)) + 1, end.at
            known.meanwhile += bool(self._trials)
        suspects = {
            number: stream for number, stream in end.running.items() if self._records[number].deaths >= SUSPECT_DEATHS
        }
        if not suspects:
            return Verdict()
        # The others of their streams would wait for the trial, because one process reads a stream.
        streams = {stream for stream in suspects.values() if stream is not None}
        suspects = {number: stream for number, stream in end.running.items() if number in suspects or stream in streams}
        if self._trials and not self._may_drop():
            # The suspects continue to run, and are tried after a later death.
            return Verdict(is_death=False)
        self._hasty = bool(self._trials)
        dropped = self._drop()
        for known in self._records.values():
            known.meanwhile = 0
        losses = max(self._records[number].deaths for number in suspects)
        self._halve(suspects, self._find_seconds(suspects), losses)
        return Verdict(tuple(sorted(suspects)), dropped)

    @property
    def tried(self) -> frozenset[int]:
        """The triggers of all trials."""
        return frozenset(number for trial in self._trials.values() for number in trial.triggers)

    @property
    def trials(self) -> int:
        """The number of trials."""
        return len(self._trials)

    def adopt(self, triggers: Collection[int], seconds: float, losses: int, *, is_split: bool = False) -> None:
        """Try triggers that are suspects because other hosts were lost."""
        if not self._trials:
            self._hasty = False
        self._add(triggers, Trial(0, (), seconds, losses=losses, is_split=is_split))

    def begin_trials(self) -> tuple[Trial, ...]:
        """Return the trials to begin now."""
        found = [
            trial
            for number, trial in self._trials.items()
            if number not in self._begun and trial.after not in self._trials
        ]
        self._begun.update(trial.number for trial in found)
        return tuple(found)

    def note_survived(self, number: int, at: float) -> int:
        """Clear the triggers of a trial whose process lived long enough; return how many deaths they keep.

        Args:
            number: The trial.
            at: The current time in seconds.
        """
        trial = self._trials.pop(number, None)
        self._begun.discard(number)
        for one in trial.triggers if trial is not None and not trial.explained else ():
            # Its record may have been forgotten meanwhile.
            known = self._records.setdefault(one, _Record(SUSPECT_DEATHS - 1))
            known.cleared, known.at = known.cleared + 1, at
        return 0 if trial is None or trial.explained else SUSPECT_DEATHS - 1

    def note_fatal(self, number: int, end: ProcessEnd) -> Verdict:
        """Process the death of a trial process.

        Args:
            number: The trial, which may already have been dropped.
            end: How the process ended.
        """
        outside = self._is_outside(number, end)
        trial = self._trials.get(number)
        if trial is None:
            return Verdict()
        self._begun.discard(number)
        if outside or not end.running:
            return self._repeat(replace(trial, triggers=tuple(sorted({*end.running, *end.waiting}))))
        if len(trial.triggers) > 1 or end.running.keys() != set(trial.triggers):
            # Triggers that ran elsewhere, or had not begun, did not cause this death; others may have joined the trial.
            dropped = tuple(one for one in self._drop() if one.number != number)
            self._halve(end.running, trial.seconds, trial.losses + 1)
            return Verdict(tuple(sorted(end.running)), dropped)
        trial = replace(trial, deaths=trial.deaths + 1, kills=trial.kills + end.killed)
        if trial.deaths - trial.kills < ALONE_DEATHS and trial.deaths < ALONE_KILLS:
            return self._repeat(trial)
        del self._trials[number]
        return Verdict(culprit=trial.triggers[0], explained=self._explain())

    def _explain(self) -> tuple[int, ...]:
        """Forget the deaths that a culprit explains: all but the triggerer's while the culprit was on trial."""
        explained = tuple(sorted(number for number, known in self._records.items() if not known.meanwhile))
        self._records = {
            number: replace(known, deaths=known.meanwhile, cleared=0)
            for number, known in self._records.items()
            if known.meanwhile
        }
        self._trials = {number: replace(trial, explained=True) for number, trial in self._trials.items()}
        return explained

    def _repeat(self, trial: Trial) -> Verdict:
        if trial.triggers:
            self._trials[trial.number] = trial
        else:
            del self._trials[trial.number]
        return Verdict(trial.triggers)

    def _is_outside(self, number: int, end: ProcessEnd) -> bool:
        """Return whether this process and the previous one were killed from outside; neither then counts against a
        trial.
        """
        if not end.killed:
            return False
        before, self._killed = self._killed, (number, end.at)
        if before is None or before[0] == number or abs(end.at - before[1]) > SAME_SECONDS:
            return False
        if before[1] < end.at - end.lived_seconds:
            # This process was started after that kill: one trigger may have caused both.
            return False
        other = self._trials.get(before[0])
        if other is not None and other.kills:
            self._trials[before[0]] = replace(other, deaths=other.deaths - 1, kills=other.kills - 1)
        return True

    def _may_drop(self) -> bool:
        """Return whether the triggerer dies so much faster than the trials last that they are given up."""
        slowest = 2 * max(self._lives)
        return not self._hasty and _HASTE * slowest <= min(trial.seconds for trial in self._trials.values())

    def _drop(self) -> tuple[Trial, ...]:
        """End and return all trials."""
        dropped = tuple(self._trials.values())
        self._trials.clear()
        self._begun.clear()
        return dropped

    def _find_seconds(self, suspects: Iterable[int]) -> float:
        """Return the duration of a trial of these suspects."""
        cleared = max(self._records[number].cleared for number in suspects)
        lived = max(TRIAL_SECONDS, 2 * max(self._lives))
        return float(min(LONGEST_TRIAL_SECONDS, lived * 2 ** min(cleared, 20)))

    def _halve(self, running: Mapping[int, str | None], seconds: float, losses: int) -> None:
        """Try triggers in two halves; until they are blamed, one more death makes them suspects again."""
        for number in running:
            known = self._records.get(number)
            if known is not None:
                known.deaths = SUSPECT_DEATHS - 1
        streams: dict[str | int, list[int]] = {}
        for number in sorted(running):
            stream = running[number]
            streams.setdefault(number if stream is None else stream, []).append(number)
        is_split = len(streams) == 1 and None not in running.values() and seconds <= compute_patience(losses)
        parts = [[number] for number in sorted(running)] if is_split else list(streams.values())
        halves: tuple[list[int], list[int]] = ([], [])
        for part in sorted(parts, key=len, reverse=True):
            min(halves, key=len).extend(part)
        after = 0
        for half in halves:
            if half:
                self._add(half, Trial(0, (), seconds, losses=losses, is_split=is_split, after=after))
                after = self._number if is_split else 0

    def _add(self, triggers: Collection[int], trial: Trial) -> None:
        self._number += 1
        self._trials[self._number] = replace(trial, number=self._number, triggers=tuple(sorted(triggers)))
