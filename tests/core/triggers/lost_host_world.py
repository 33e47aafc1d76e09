"""A world without processes: hosts that run triggers, trials of suspects, and triggers that kill their whole host.

Killers draw how long their process lives each time it starts. What the store counts and who waits is kept here;
everything else that decides is `lost_hosts`.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tidemill.core.triggers.lost_hosts import (
    CULPRIT_LOSSES,
    FORGET_US,
    REST_SECONDS,
    SUSPECT_LOSSES,
    FreeSuspect,
    LostTrial,
    TrialPlan,
    choose_trial,
    find_alone,
)
from tidemill.core.triggers.suspects import compute_patience

#: Before a lost host is up again.
RESTART_SECONDS = 30.0


@dataclass
class _Record:
    deaths: int = 0
    alone: int = 0
    lived: float = 0.0
    at: float = 0.0


@dataclass
class _Process:
    began: float
    # Since when it runs each trigger.
    triggers: dict[int, float]
    kills_at: float = math.inf
    plan: TrialPlan | None = None

    @property
    def solo_until(self) -> float:
        assert self.plan is not None
        return self.began + min(self.plan.seconds, compute_patience(self.plan.deaths))

    @property
    def ends_at(self) -> float:
        return math.inf if self.plan is None else self.began + self.plan.seconds


@dataclass
class _Host:
    up_at: float
    main: _Process
    trials: list[_Process] = field(default_factory=list)

    @property
    def processes(self) -> list[_Process]:
        return [self.main, *self.trials]


@dataclass
class Hosts:
    """What happens to triggers.

    Attributes:
        count: The number of hosts.
        triggers: All triggers, each with its stream.
        killers: Those that kill their host, each with a function that draws after how many seconds.
        chance: Places triggers.
        failed: Those that were blamed.
        losses: How many hosts were lost.
        longest_wait: The longest time that a trigger did not run.
        longest_life: The longest time after which a process killed its host.
    """

    count: int
    triggers: Mapping[int, str | None]
    killers: Mapping[int, Callable[[], float]]
    chance: random.Random
    most: int = 60
    now: float = 1000.0
    failed: list[int] = field(default_factory=list)
    losses: int = 0
    longest_wait: float = 0.0
    longest_life: float = 0.0

    def __post_init__(self) -> None:
        self.records: dict[int, _Record] = {}
        self.free: dict[int, float] = dict.fromkeys(self.triggers, self.now)
        self.hosts = [_Host(self.now, _Process(self.now, {})) for _ in range(self.count)]

    def run(self, most_losses: int) -> None:
        """Let everything happen until all killers have failed and everything else runs as usual."""
        while self.losses <= most_losses:
            self._place()
            if set(self.killers) <= set(self.failed) and not any(host.trials for host in self.hosts):
                assert not self.free, "all that is left runs"
                return
            self._step()
        raise AssertionError(f"{self.losses} losses, and {self.failed} of {list(self.killers)} have failed")

    def _step(self) -> None:
        """Let the next thing happen: a loss, the end of a trial, or somebody may begin one."""
        times = [host.up_at for host in self.hosts if host.up_at > self.now]
        for process in (one for host in self.hosts for one in host.processes):
            times += [process.kills_at, process.ends_at]
            if process.plan is not None and process.solo_until > self.now:
                times.append(process.solo_until)
        waits = [since + REST_SECONDS for since in self.free.values()]
        self.now = min(time for time in [*times, *waits] if time > self.now)
        for host in self.hosts:
            if any(process.kills_at <= self.now for process in host.processes):
                self._lose(host)
            for trial in [one for one in host.trials if one.ends_at <= self.now]:
                host.trials.remove(trial)
                for one in trial.triggers:
                    if one in self.records:
                        self.records[one].deaths, self.records[one].alone = SUSPECT_LOSSES - 1, 0
                    self.free[one] = self.now

    def _lose(self, host: _Host) -> None:
        self.losses += 1
        number = self.hosts.index(host)
        alone = find_alone([LostTrial(number, trial.triggers) for trial in host.trials])
        for process in host.processes:
            for one, since in process.triggers.items():
                self.longest_life = max(self.longest_life, self.now - since)
                known = self.records.setdefault(one, _Record())
                if known.at < self.now - FORGET_US / 1e6:
                    known.deaths, known.alone, known.lived = 0, 0, 0.0
                known.deaths, known.alone = known.deaths + 1, known.alone + (one in alone)
                known.lived, known.at = max(known.lived, self.now - since), self.now
                self.free[one] = self.now
        host.trials, host.up_at = [], self.now + RESTART_SECONDS
        host.main = _Process(host.up_at, {})

    def _place(self) -> None:
        """Fail culprits, and have everything run that may."""
        up = [host for host in self.hosts if host.up_at <= self.now]
        for one in [one for one in self.free if self._count(one, "alone") >= CULPRIT_LOSSES and up]:
            self.failed.append(one)
            del self.free[one]
        self.chance.shuffle(up)
        for host in up:
            if all(self.now >= trial.solo_until for trial in host.trials):
                self._try(host)
        for one in list(self.free):
            self._join(one, up)

    def _count(self, one: int, what: str) -> int:
        return getattr(self.records[one], what) if one in self.records else 0

    def _readers(self, stream: str | None) -> list[_Process]:
        if stream is None:
            return []
        processes = [one for host in self.hosts for one in host.processes]
        readers = [one for one in processes if any(self.triggers[each] == stream for each in one.triggers)]
        assert len(readers) < 2, "two processes read a stream"
        return readers

    def _try(self, host: _Host) -> None:
        waiting = [one for one in self.free if not self._readers(self.triggers[one])]
        suspects = {one for one in waiting if self._count(one, "deaths") >= SUSPECT_LOSSES}
        streams = {self.triggers[one] for one in suspects} - {None}
        given = [self._describe(one) for one in waiting if one in suspects or self.triggers[one] in streams]
        plan = choose_trial(given, self.most, beside=len(host.trials))
        if plan is None:
            assert host.trials or not suspects
            return
        process = _Process(self.now, {}, plan=plan)
        host.trials.append(process)
        for one in plan.triggers:
            self._start(one, process)

    def _describe(self, one: int) -> FreeSuspect:
        known = self.records.get(one, _Record())
        waited_us = round((self.now - self.free[one]) * 1e6)
        return FreeSuspect(one, known.deaths, round(known.lived * 1e6), self.triggers[one], waited_us)

    def _join(self, one: int, up: list[_Host]) -> None:
        """Claim a trigger that is no suspect, or that joins the trial of its stream."""
        stream = self.triggers[one]
        readers = self._readers(stream)
        if readers:
            (reader,) = readers
            is_suspect = self._count(one, "deaths") >= SUSPECT_LOSSES
            if reader.plan is None or not (reader.plan.is_split or is_suspect):
                self._start(one, reader)
            return
        mates = [each for each in self.free if stream is not None and self.triggers[each] == stream]
        if up and all(self._count(each, "deaths") < SUSPECT_LOSSES for each in [one, *mates]):
            self._start(one, self.chance.choice(up).main)

    def _start(self, one: int, process: _Process) -> None:
        self.longest_wait = max(self.longest_wait, self.now - self.free.pop(one))
        process.triggers[one] = self.now
        if one in self.killers:
            process.kills_at = min(process.kills_at, self.now + self.killers[one]())
