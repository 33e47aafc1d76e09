"""Assigns the attempts of a worker to processes, and starts, replaces and ends the processes.

A process imports one file, and runs one attempt of it. Meanwhile the next process of the file is started, so that the
next attempt finds one ready. Attempts with `reuses` share a process one after another instead, because that is faster.
An attempt that waits at its `yield` keeps its process and gives its place to another one until it may go on.
Times are seconds of one monotonic clock.

Invariants:
- An attempt runs in one process, and a process runs one attempt at a time.
- An attempt that does not reuse processes gets a fresh one, which runs nothing afterwards.
- An attempt that was claimed ends once: its process reported a result (`ended`), or `Died` says why there is none.
- A process that has to leave, or was interrupted, is killed when its grace period ends, whatever it does.
- At most `concurrency` attempts have a place, and at most `idle_processes` idle processes are kept.
- An attempt that may go on gets the first place that becomes free; the time until then does not count in its deadline.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

#: An attempt: the task and its epoch.
Key = tuple[int, int]


class InterruptReason(enum.StrEnum):
    """Why an attempt is interrupted, or has died.

    CRASH: the process ended by itself. TIMEOUT: it took too long. REPLACED: the task has a newer epoch. DRAIN: the
    worker stops. IMPORT: importing the file took too long. LOST: there was no process, or the process that starts them
    died.
    """

    CRASH = "crash"
    TIMEOUT = "timeout"
    REPLACED = "replaced"
    DRAIN = "drain"
    IMPORT = "import"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt to run.

    Attributes:
        key: The task and its epoch.
        file: The file that its process has to import.
        deadline: When it times out; None: never.
        reuses: Whether its process may have run other such attempts before, and may run more afterwards.
    """

    key: Key
    file: str
    deadline: float | None = None
    reuses: bool = False


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of a worker.

    Attributes:
        concurrency: The number of attempts it runs at once, besides those that wait at their `yield`.
        recycle_after: The number of attempts after which a reused process is replaced.
        grace_seconds: The time between the request to end and the kill.
        idle_seconds: How long an idle process is kept.
        import_seconds: How long the import of a file may take.
        idle_processes: The number of idle processes that are kept.
    """

    concurrency: int = 8
    recycle_after: int = 100
    grace_seconds: float = 5.0
    idle_seconds: float = 60.0
    import_seconds: float = 60.0
    idle_processes: int = 32


# Effects, to be carried out in order.


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start a process that imports the file."""

    process: int
    file: str


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """Let a process run an attempt; the process may still be starting."""

    process: int
    attempt: Attempt


@dataclass(frozen=True, slots=True)
class GoOn:
    """Let the attempt that a process runs go on after its `yield`."""

    process: int


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Raise an exception in the attempt that a process runs."""

    process: int
    why: InterruptReason


@dataclass(frozen=True, slots=True)
class RetireProcess:
    """Ask an idle process to exit."""

    process: int


@dataclass(frozen=True, slots=True)
class KillProcess:
    """Kill a process and its group."""

    process: int


@dataclass(frozen=True, slots=True)
class Died:
    """An attempt has ended without a result."""

    attempt: Attempt
    why: InterruptReason


Effect = StartProcess | RunAttempt | GoOn | Interrupt | RetireProcess | KillProcess | Died


@dataclass(frozen=True, slots=True)
class _Process:
    """The state of a process.

    Attributes:
        file: The file it imports.
        since: When it started or became idle.
        loaded: Whether the file is imported.
        attempt: The attempt it runs.
        runs: The number of attempts it was given.
        why: Why it was interrupted, or is being killed.
        leaving: Whether it gets no further attempt.
        kill_at: When it is killed; None: it may live, or was killed already.
        relieved: Whether another process was started to replace it.
        blocked_at: Since when its attempt waits at its `yield`, without a place; None: it has one.
        turn: The order in which such attempts may go on; None: this one may not yet.
    """

    file: str
    since: float
    loaded: bool = False
    attempt: Attempt | None = None
    runs: int = 0
    why: InterruptReason = InterruptReason.CRASH
    leaving: bool = False
    kill_at: float | None = None
    relieved: bool = False
    blocked_at: float | None = None
    turn: int | None = None

    @property
    def is_idle(self) -> bool:
        return self.attempt is None and not self.leaving

    def suits(self, attempt: Attempt) -> bool:
        """Return whether it can run an attempt. A process that is idle after an attempt has run only attempts with
        `reuses`.
        """
        return self.is_idle and self.file == attempt.file and (attempt.reuses or not self.runs)


class WorkerSlots:
    """The processes of a worker and their attempts."""

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self._processes: dict[int, _Process] = {}
        self._started = 0
        self._turns = 0
        self._draining = False

    @property
    def held(self) -> list[Attempt]:
        """The attempts that are running or wait at their `yield`."""
        return [process.attempt for process in self._processes.values() if process.attempt is not None]

    @property
    def busy(self) -> int:
        """The number of places that attempts have."""
        return sum(one.attempt is not None and one.blocked_at is None for one in self._processes.values())

    @property
    def capacity(self) -> int:
        """The number of attempts that can be claimed now."""
        return 0 if self._draining else max(0, self._limits.concurrency - self.busy)

    @property
    def processes(self) -> dict[int, str]:
        """The processes that have not ended, with their files."""
        return {number: process.file for number, process in self._processes.items()}

    @property
    def next_due(self) -> float | None:
        """The time of the next call to `tick`; None: only after another input."""
        return min(
            (due for process in self._processes.values() if (due := self._due(process)) is not None), default=None
        )

    def find_attempt(self, number: int) -> Attempt | None:
        """Return the attempt that a process runs, or None."""
        process = self._processes.get(number)
        return None if process is None else process.attempt

    # -- inputs -------------------------------------------------------------------------------------------------------

    def claim(self, attempt: Attempt, now: float) -> list[Effect]:
        """Find a process for an attempt, preferably the one that ran an attempt last, since its memory is warm."""
        suitable = [number for number, process in self._processes.items() if process.suits(attempt)]
        if not suitable:
            return [*self._start(attempt.file, now), *self._give(self._started, attempt, now)]
        number = max(suitable, key=self._rank)
        return self._give(number, attempt, now)

    def note_loaded(self, number: int) -> None:
        """Record that a process has imported its file."""
        if number in self._processes:
            self._processes[number] = replace(self._processes[number], loaded=True)

    def note_ended(self, number: int, now: float, *, clean: bool) -> list[Effect]:
        """Process the result of an attempt.

        Args:
            number: Its process.
            now: The current time.
            clean: Whether the process and its file are unchanged.
        """
        process = self._processes.get(number)
        if process is None or process.attempt is None:
            return []
        done = replace(process, attempt=None, since=now, kill_at=None, blocked_at=None, turn=None)
        self._processes[number] = done
        is_used_up = not process.attempt.reuses or done.runs >= self._limits.recycle_after
        going_on = self._fill_places(now)
        if process.why is not InterruptReason.CRASH or not clean or is_used_up:
            return [*going_on, *self._relieve(number, process.attempt, now), *self._retire(number, now)]
        return [*going_on, *self._retire_surplus(now)]

    def block(self, number: int, now: float) -> list[Effect]:
        """Take the place of an attempt that waits at its `yield`."""
        process = self._processes.get(number)
        if process is None or process.attempt is None or process.blocked_at is not None:
            return []
        self._processes[number] = replace(process, blocked_at=now, turn=None)
        ended = self._interrupt(number, InterruptReason.DRAIN, now) if self._draining else []
        return [*ended, *self._fill_places(now)]

    def unblock(self, key: Key, now: float) -> list[Effect]:
        """Let an attempt that waits at its `yield` go on as soon as there is a place for it."""
        for number, process in self._processes.items():
            waits = process.blocked_at is not None and process.turn is None
            if waits and process.attempt is not None and process.attempt.key == key:
                self._turns += 1
                self._processes[number] = replace(process, turn=self._turns)
                return self._fill_places(now)
        return []

    def note_stale(self, number: int, now: float) -> list[Effect]:
        """Record that the file of a process has changed."""
        process = self._processes.get(number)
        return self._retire(number, now) if process is not None and process.is_idle else []

    def note_exited(self, number: int, now: float, *, lost: bool = False) -> list[Effect]:
        """Process the exit of a process. `lost`: it neither exited by itself nor was killed; the process that starts
        them failed.
        """
        process = self._processes.pop(number, None)
        if process is None or process.attempt is None:
            return []
        why = InterruptReason.LOST if lost and process.why is InterruptReason.CRASH else process.why
        return [Died(process.attempt, why), *self._fill_places(now)]

    def end(self, key: Key, now: float, why: InterruptReason = InterruptReason.REPLACED) -> list[Effect]:
        """End an attempt; one that has ended, or is being ended, changes nothing."""
        for number, process in self._processes.items():
            if process.attempt is not None and process.attempt.key == key:
                return self._interrupt(number, why, now)
        return []

    def drain(self, now: float) -> list[Effect]:
        """Claim no more attempts, retire idle processes, and end attempts that wait at their `yield`: their elements
        may be waiting for this worker.
        """
        self._draining = True
        effects: list[Effect] = []
        for number, process in list(self._processes.items()):
            if process.is_idle:
                effects += self._retire(number, now)
            elif process.blocked_at is not None:
                effects += self._interrupt(number, InterruptReason.DRAIN, now)
        return effects

    def end_all(self, now: float) -> list[Effect]:
        """End all attempts, and claim no more."""
        effects = self.drain(now)
        for attempt in self.held:
            effects += self.end(attempt.key, now, InterruptReason.DRAIN)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Take the steps that are due."""
        effects: list[Effect] = []
        for number, process in list(self._processes.items()):
            due = self._due(process)
            if due is None or now < due:
                continue
            if process.kill_at is not None:
                self._processes[number] = replace(process, kill_at=None, leaving=True)
                effects.append(KillProcess(number))
            elif not process.loaded and now >= process.since + self._limits.import_seconds:
                self._processes[number] = replace(process, loaded=True, leaving=True, why=InterruptReason.IMPORT)
                effects.append(KillProcess(number))
            elif process.attempt is not None:
                effects += self._interrupt(number, InterruptReason.TIMEOUT, now)
            else:
                effects += self._retire(number, now)
        return effects

    # -- steps --------------------------------------------------------------------------------------------------------

    def _due(self, process: _Process) -> float | None:
        """Return when the next step for a process is due."""
        if process.kill_at is not None:
            return process.kill_at
        if process.leaving:
            return None
        times = [] if process.loaded else [process.since + self._limits.import_seconds]
        if process.attempt is None:
            times.append(process.since + self._limits.idle_seconds)
        elif (
            process.why is InterruptReason.CRASH and process.attempt.deadline is not None and process.blocked_at is None
        ):
            times.append(process.attempt.deadline)
        return min(times, default=None)

    def _fill_places(self, now: float) -> list[Effect]:
        """Give free places to the attempts that may go on, in the order in which they were allowed to."""
        waiting = sorted(
            (process.turn, number)
            for number, process in self._processes.items()
            if process.turn is not None and process.why is InterruptReason.CRASH
        )
        effects: list[Effect] = []
        for _, number in waiting[: max(0, self._limits.concurrency - self.busy)]:
            process = self._processes[number]
            attempt, since = process.attempt, process.blocked_at
            if attempt is not None and attempt.deadline is not None and since is not None:
                attempt = replace(attempt, deadline=attempt.deadline + now - since)
            self._processes[number] = replace(process, attempt=attempt, blocked_at=None, turn=None)
            effects.append(GoOn(number))
        return effects

    def _rank(self, number: int) -> tuple[bool, bool, float]:
        process = self._processes[number]
        return process.loaded, process.runs > 0, process.since

    def _start(self, file: str, now: float) -> list[Effect]:
        self._started += 1
        self._processes[self._started] = _Process(file, now)
        return [StartProcess(self._started, file)]

    def _give(self, number: int, attempt: Attempt, now: float) -> list[Effect]:
        process = self._processes[number]
        given = replace(process, attempt=attempt, runs=process.runs + 1)
        if not process.loaded:
            given = replace(given, since=now)
        self._processes[number] = given
        effects: list[Effect] = [RunAttempt(number, attempt)]
        # Do this some attempts before the last one, so that the successor has imported the file by then.
        last = self._limits.recycle_after if attempt.reuses else 1
        if given.runs >= last - last // 10:
            effects += self._relieve(number, attempt, now)
        return [*effects, *self._retire_surplus(now)]

    def _relieve(self, number: int, last: Attempt, now: float) -> list[Effect]:
        """Start the successor of a process that is about to leave, unless another process suits attempts like its last
        one.
        """
        process = self._processes[number]
        if process.relieved or self._draining:
            return []
        self._processes[number] = replace(process, relieved=True)
        if any(other.suits(last) for at, other in self._processes.items() if at != number):
            return []
        return self._start(process.file, now)

    def _retire(self, number: int, now: float) -> list[Effect]:
        kill_at = now + self._limits.grace_seconds
        self._processes[number] = replace(self._processes[number], leaving=True, kill_at=kill_at)
        return [RetireProcess(number)]

    def _retire_surplus(self, now: float) -> list[Effect]:
        """Retire the processes that have been idle longest, beyond the number that is kept."""
        idle = sorted((process.since, number) for number, process in self._processes.items() if process.is_idle)
        surplus = len(idle) if self._draining else len(idle) - self._limits.idle_processes
        return [effect for _, number in idle[: max(0, surplus)] for effect in self._retire(number, now)]

    def _interrupt(self, number: int, why: InterruptReason, now: float) -> list[Effect]:
        process = self._processes[number]
        if process.why is not InterruptReason.CRASH:
            return []
        kill_at = now + self._limits.grace_seconds
        self._processes[number] = replace(process, why=why, kill_at=kill_at, leaving=True)
        return [Interrupt(number, why)]
