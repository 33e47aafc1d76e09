"""The state and history of each trigger of a list, in memory, for pages and recordings; the store has the durable part.

Invariants: each trigger of the list has an entry, and no other trigger has one. A trigger that restarts at once after
each event counts as running throughout: its runs are counted, but not reported one by one. Everything belongs to one
event loop.
"""

from __future__ import annotations

import enum
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Protocol

from tidemill.core.triggers.lifecycle import EndVerdict, Next
from tidemill.store.records import TriggerRecord, TriggerSpec, TriggerState


class TriggerChange(enum.StrEnum):
    """A recorded event in the life of a trigger."""

    STARTED = "trigger_started"
    RESTARTED = "trigger_restarted"
    ENDED = "trigger_ended"
    FAILED = "trigger_failed"
    HANDED_OVER = "trigger_handed_over"


class TriggerPhase(enum.StrEnum):
    """The phase of a trigger's life."""

    RUNNING = "running"
    RESTARTING = "restarting"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    ELSEWHERE = "elsewhere"


class ShownTrigger(Protocol):
    """The part of a trigger's run that is displayed."""

    spec: TriggerSpec

    @property
    def fired(self) -> int:
        """The number of events that it has fired, over all of its runs here."""


@dataclass(slots=True)
class TriggerEntry:
    """A trigger of the list.

    Attributes:
        spec: Its entry in the list.
        phase: Its current phase.
        since: When the phase began, in seconds since the epoch.
        runs: How often it was started here.
        fired: How many events it fired here in runs of earlier sessions.
        run: The current or last run; None: it has not run yet.
        error: The last failure with its traceback, masked; '': there was none.
        failed_at: The time of the last failure.
        next_at: When it runs again; None: it is running, or will not run again.
    """

    spec: TriggerSpec
    phase: TriggerPhase
    since: float
    runs: int = 0
    fired: int = 0
    run: ShownTrigger | None = None
    error: str = ""
    failed_at: float | None = None
    next_at: float | None = None

    @property
    def events(self) -> int:
        """The number of events that it fired in this process."""
        return self.fired + (self.run.fired if self.run is not None else 0)


Facts = dict[str, str | int | float]
#: Takes the trigger's name, the change, the reason or error, and further facts.
Tell = Callable[[str, TriggerChange, str, Facts], None]
_MAX_CLASSES = 100
_PHASES = {
    EndVerdict.FINISHED: TriggerPhase.FINISHED,
    EndVerdict.FAILED: TriggerPhase.FAILED,
    EndVerdict.CANCELLED: TriggerPhase.CANCELLED,
}
_STORED = {
    TriggerState.FINISHED: TriggerPhase.FINISHED,
    TriggerState.FAILED: TriggerPhase.FAILED,
    TriggerState.CANCELLED: TriggerPhase.CANCELLED,
}


class TriggerBook:
    """The triggers of a list.

    Args:
        clock: Returns seconds since the epoch.

    Attributes:
        entries: The triggers, by name.
        tell: Called with each change; it must neither block nor raise.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._names: list[str] | None = None
        self._first_runs: dict[str, Facts] = {}
        self.entries: dict[str, TriggerEntry] = {}
        self.tell: Tell = _ignore_change

    def note_listed(self, records: Iterable[TriggerRecord]) -> None:
        """Record the triggers of the list, with the stored state of those that do not run."""
        self._names = None
        for record in records:
            spec = record.spec
            if (entry := self.entries.get(spec.name)) is not None:
                entry.spec = spec
            else:
                phase = _STORED.get(record.state, TriggerPhase.ELSEWHERE)
                self.entries[spec.name] = TriggerEntry(spec, phase, self._clock())

    def keep_only(self, names: Collection[str]) -> None:
        """Forget triggers that were removed from the list."""
        self._names = None
        self.entries = {name: entry for name, entry in self.entries.items() if name in names}

    def note_started(self, run: ShownTrigger) -> None:
        """Record the start of a trigger's run."""
        entry = self.entries.get(run.spec.name)
        if entry is None:
            return
        entry.runs += 1
        if entry.run is not run:
            entry.fired, entry.run = entry.events, run
        if entry.phase is TriggerPhase.RUNNING:
            return
        self._change(entry, TriggerPhase.RUNNING)
        change = TriggerChange.STARTED if entry.runs == 1 else TriggerChange.RESTARTED
        self.tell(run.spec.name, change, "", self._describe_run(entry))

    def _describe_run(self, entry: TriggerEntry) -> Facts:
        if entry.runs > 1:
            return {"class": entry.spec.classpath, "run": entry.runs}
        # Thousands of triggers that start together share these dicts until they are recorded.
        classpath = entry.spec.classpath
        if classpath not in self._first_runs and len(self._first_runs) >= _MAX_CLASSES:
            self._first_runs.clear()
        return self._first_runs.setdefault(classpath, {"class": classpath, "run": 1})

    def note_ended(self, run: ShownTrigger, following: Next, reason: str | None, error: str | None) -> None:
        """Record how a run ended, and whether the trigger restarts."""
        entry = self.entries.get(run.spec.name)
        if entry is None or following.pause_seconds == 0:
            return
        pause = following.pause_seconds
        self._change(entry, _PHASES[following.verdict] if pause is None else TriggerPhase.RESTARTING, pause)
        data: Facts = {"events": entry.events}
        if pause is not None:
            data["restarts_in_seconds"] = round(pause, 1)
        if following.verdict is EndVerdict.FAILED:
            entry.error, entry.failed_at = error or "", entry.since
            self.tell(run.spec.name, TriggerChange.FAILED, entry.error, data)
        else:
            self.tell(run.spec.name, TriggerChange.ENDED, reason or following.verdict.value, data)

    def note_cancelled(self, run: ShownTrigger, reason: str) -> None:
        """Record that a trigger was cancelled while it waited to restart."""
        if (entry := self.entries.get(run.spec.name)) is not None:
            self._change(entry, TriggerPhase.CANCELLED)
            self.tell(run.spec.name, TriggerChange.ENDED, reason, {"events": entry.events})

    def note_handed_over(self, run: ShownTrigger) -> None:
        """Record that another host now runs a trigger."""
        if (entry := self.entries.get(run.spec.name)) is not None and entry.phase is not TriggerPhase.ELSEWHERE:
            self._change(entry, TriggerPhase.ELSEWHERE)
            self.tell(run.spec.name, TriggerChange.HANDED_OVER, "another host runs it", {"events": entry.events})

    def count_phases(self) -> dict[TriggerPhase, int]:
        """Return the number of triggers in each phase."""
        counts = dict.fromkeys(TriggerPhase, 0)
        for entry in self.entries.values():
            counts[entry.phase] += 1
        return counts

    def list_after(
        self, name: str | None, limit: int, phases: Collection[TriggerPhase] = (), text: str = ""
    ) -> tuple[list[TriggerEntry], bool]:
        """Return the next triggers by name, and whether there are more.

        Args:
            name: The last name of the previous page; None: begin with the first.
            limit: The size of a page.
            phases: Only triggers in one of these phases; empty: all.
            text: Only triggers with this text in their name or class.
        """
        if self._names is None:
            self._names = sorted(self.entries)
        found: list[TriggerEntry] = []
        wanted = text.lower()
        for one in self._names_after(name):
            entry = self.entries[one]
            if phases and entry.phase not in phases:
                continue
            if wanted and wanted not in one.lower() and wanted not in entry.spec.classpath.lower():
                continue
            if len(found) == limit:
                return found, True
            found.append(entry)
        return found, False

    def _names_after(self, name: str | None) -> Iterable[str]:
        assert self._names is not None
        start = 0 if name is None else bisect_right(self._names, name)
        return (self._names[index] for index in range(start, len(self._names)))

    def _change(self, entry: TriggerEntry, phase: TriggerPhase, pause: float | None = None) -> None:
        entry.phase, entry.since = phase, self._clock()
        entry.next_at = None if pause is None else entry.since + pause


def _ignore_change(name: str, change: TriggerChange, text: str, data: Facts) -> None:
    pass
