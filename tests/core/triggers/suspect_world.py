"""A world without processes: a triggerer, the trials of its suspects, triggers that end processes, and hands that do.

Killers draw how long their process lives each time it starts. Everything else that decides is `Suspects`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidemill.core.triggers.suspects import ProcessEnd, Suspects, Trial, Verdict

#: Before a process of the triggerer is started again.
_PAUSE_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Killer:
    """A trigger that ends its process. `draw`: after how many seconds; `kill`: by SIGKILL."""

    draw: Callable[[], float]
    kill: bool = False


@dataclass(slots=True)
class _Process:
    began: float
    triggers: set[int]
    ends: float = float("inf")
    kill: bool = False


@dataclass
class World:
    """What happens to triggers.

    Attributes:
        triggers: All of them, each with its stream.
        killers: Those that end their process.
        now: The time, in seconds.
        failed: Which were blamed, in order.
        deaths: How many processes a trigger ended.
        trial_deaths: How many of those were trials.
    """

    triggers: Mapping[int, str | None]
    killers: Mapping[int, Killer]
    now: float = 1000.0
    failed: list[int] = field(default_factory=list)
    deaths: int = 0
    trial_deaths: int = 0

    def __post_init__(self) -> None:
        self.suspects = Suspects()
        self._trials: dict[int, tuple[Trial, _Process]] = {}
        self._held: set[int] = set()
        self._main = self._start(set(self.triggers))

    def run(self, until: float) -> None:
        """Let everything happen until a time, or until nobody is left who ends a process."""
        while set(self.killers) - set(self.failed):
            ends = {
                number: min(process.ends, process.began + trial.seconds)
                for number, (trial, process) in self._trials.items()
            }
            ends[0] = self._main.ends
            number = min(ends, key=lambda one: ends[one])
            if ends[number] > until:
                break
            self.now = max(self.now, ends[number])
            if number and self._trials[number][1].ends > ends[number]:
                self._survive(number)
            else:
                process = self._trials[number][1] if number else self._main
                self.deaths += 1
                self.trial_deaths += number > 0
                self._die(number, process.kill)
        self.now = max(self.now, until) if set(self.killers) - set(self.failed) else self.now

    def kill_triggerer(self) -> None:
        """Kill it from outside."""
        self._die(0, True)

    def kill_all(self, *, trials_first: bool) -> None:
        """Kill the triggerer and all trials from outside; their deaths are noticed in any order."""
        trials = sorted(self._trials)
        for number in [*trials, 0] if trials_first else [0, *trials]:
            if number in self._trials or not number:
                self._die(number, True)

    def kill_trial(self, which: int) -> None:
        """Kill one of the trials from outside, if there is one."""
        if self._trials:
            self._die(sorted(self._trials)[which % len(self._trials)], True)

    def _start(self, triggers: set[int]) -> _Process:
        process = _Process(self.now + _PAUSE_SECONDS, triggers)
        self._draw(process, triggers)
        return process

    def _draw(self, process: _Process, triggers: set[int]) -> None:
        for number in sorted(triggers & set(self.killers)):
            killer = self.killers[number]
            at = max(self.now, process.began) + killer.draw()
            if at < process.ends:
                process.ends, process.kill = at, killer.kill

    def _die(self, number: int, kill: bool) -> None:
        process = self._trials.pop(number)[1] if number else self._main
        at = max(self.now, process.began)
        running = {one: self.triggers[one] for one in process.triggers}
        end = ProcessEnd(running, at - process.began, at, kill)
        verdict = self.suspects.note_fatal(number, end) if number else self.suspects.note_death(end)
        free = process.triggers - set(verdict.held)
        self._held |= set(verdict.held)
        if verdict.culprit is not None:
            assert process.triggers == {verdict.culprit}, "it was not alone"
            self.failed.append(verdict.culprit)
            free.discard(verdict.culprit)
        if not number:
            self._main = self._start(free)
            free = set()
        self._drop(verdict, free)

    def _drop(self, verdict: Verdict, free: set[int]) -> None:
        for trial in verdict.dropped:
            self._trials.pop(trial.number, None)
            free |= set(trial.triggers)
        self._go_back(free)
        for trial in self.suspects.begin_trials():
            assert set(trial.triggers) <= self._held, "it runs elsewhere"
            self._held -= set(trial.triggers)
            self._trials[trial.number] = (trial, self._start(set(trial.triggers)))
        self._check()

    def _survive(self, number: int) -> None:
        _, process = self._trials.pop(number)
        self.suspects.note_survived(number, self.now)
        self._drop(Verdict(), process.triggers)

    def _go_back(self, triggers: set[int]) -> None:
        self._held -= triggers
        self._main.triggers |= triggers
        self._draw(self._main, triggers)

    def _check(self) -> None:
        """Make sure that everything runs once, that there are two trials at most, and that they share no stream."""
        places = [self._main.triggers, self._held, *(process.triggers for _, process in self._trials.values())]
        assert sum(map(len, places)) == len(self.triggers) - len(self.failed)
        assert set().union(*places, self.failed) == set(self.triggers)
        assert len(self._trials) <= 2
        streams = [{self.triggers[one] for one in process.triggers} - {None} for _, process in self._trials.values()]
        assert len(streams) < 2 or not streams[0] & streams[1]
        assert len({self.triggers[one] for one in self._held}) < 2, "only a part of one stream waits"
