"""The board: the locked rows of tasks and runs of a transaction, to which inputs are fed.

Theory of operation: `lock` locks the runs and tasks that have inputs. `give` feeds an input to the state machine and
collects its effects. `settle` propagates outcomes to the direct successors, which it locks under the lock of their run,
and decides successors that wait; skips and upstream failures propagate further, wave after wave. `flush` writes
everything. Propagated outcomes are counted in memory and never read again.

Invariants: a row changes only as the state machine answers. A transaction decides at most `limit` tasks; the rest are
marked `pending` for the scheduler. Every propagated outcome is counted in the tallies.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from sqlalchemy import Connection

from tidemill.core.tasks.attempt import Answer, Moved, feed
from tidemill.core.tasks.dependencies import Readiness, TaskOutcome, Told, decide
from tidemill.core.tasks.endings import Failure
from tidemill.core.tasks.inputs import (
    Channel,
    Clear,
    ClearXComs,
    DiscardEvents,
    Effect,
    Failed,
    FileMissing,
    Input,
    MakeTrigger,
    MapTold,
    OpenMap,
    Ready,
    ResetMap,
    Ring,
    RunCallback,
    StopMap,
    StopTrigger,
    StoreXComs,
    TellSuccessors,
    TriggerEnded,
    TriggerFailed,
    identify,
)
from tidemill.core.tasks.instance import UNMAPPED
from tidemill.core.tasks.task_row import ENDED, TaskState
from tidemill.store.context import CallContext
from tidemill.store.dag_plan import move_counts
from tidemill.store.queries.dags.state.depends_on_past import find_next_tasks, is_past_done, mark_pending
from tidemill.store.queries.dags.state.effects import DueCallback, Effects, JournalRow, MadeTrigger, write_effects
from tidemill.store.queries.dags.state.journal import find_left
from tidemill.store.queries.dags.state.map_rows import MapWrites, write_maps
from tidemill.store.queries.dags.state.task_rows import (
    Found,
    InstanceKey,
    RunEntry,
    TaskEntry,
    TaskValues,
    find_pending,
    find_units,
    locate_tasks,
    lock_named,
    lock_runs,
    lock_tasks,
    lock_units,
    read_runs,
    read_tasks,
    write_runs,
    write_tasks,
)
from tidemill.store.queries.isolation import note_broken_run
from tidemill.store.queries.triggers.cursors import find_triggerers

#: The value of `skips` if an attempt skips everything downstream.
ALL_DOWNSTREAM = "*"
#: The states of a task before its first attempt.
_READY = (TaskState.NONE, TaskState.SCHEDULED, TaskState.QUEUED)
#: The maximum number of tasks that one transaction decides.
LIMIT = 500


@dataclass(slots=True)
class _Told:
    task: TaskEntry
    before: Told
    after: Told


@dataclass(slots=True)
class Board:
    """The rows that a transaction has locked.

    Attributes:
        connection: A connection inside a transaction.
        context: The transaction's context.
        limit: The maximum number of tasks to decide.
        moved: The number of transitions.
        left: Whether undecided tasks are left for the scheduler.
        runs: The runs by id. Those in `locked` may change; the others were only read.
        locked: The ids of the runs that this transaction has locked.
        tasks: The locked tasks by id.
        maps: The changes to the maps of mapped tasks.
        wrote_callbacks: Whether callbacks were written.
    """

    connection: Connection
    context: CallContext
    limit: int = LIMIT
    moved: int = 0
    left: bool = False
    wrote_callbacks: bool = False
    runs: dict[int, RunEntry] = field(default_factory=dict)
    locked: set[int] = field(default_factory=set)
    tasks: dict[int, TaskEntry] = field(default_factory=dict)
    maps: MapWrites = field(default_factory=MapWrites)
    _named: dict[InstanceKey, TaskEntry] = field(default_factory=dict)
    _told: list[_Told] = field(default_factory=list)
    _doubtful: dict[int, TaskEntry] = field(default_factory=dict)
    _effects: Effects = field(default_factory=Effects)

    # -- locking ---------------------------------------------------------------------------------------------------

    def lock(self, tasks: Collection[int], runs: Collection[int] = ()) -> None:
        """Lock the runs, including the runs of the tasks, and then the tasks. Call this first, and only once."""
        located = locate_tasks(self.connection, tasks) if tasks else None
        wanted = {*runs, *(located.unmapped if located else ())}
        if wanted:
            found = lock_runs(self.connection, wanted)
            self.locked |= found[0].keys()
            self._keep_runs(found)
        if located is not None:
            known, unreadable = located.runs
            new = {number: run for number, run in known.items() if number not in self.runs}
            self._keep_runs((new, unreadable))
            self._add_locked(tasks, located.units)

    def take(self, rows: Iterable[TaskValues]) -> list[TaskEntry]:
        """Add task rows locked by this transaction without locking their runs, for inputs that end no task."""
        found = list(rows)
        self._read_runs({row[1] for row in found})
        self._add(found)
        return [self.tasks[row[0]] for row in found if row[0] in self.tasks]

    def read(self, tasks: Collection[int]) -> None:
        """Add tasks without locking anything; they must not get inputs."""
        rows = read_tasks(self.connection, tasks) if tasks else []
        self._read_runs({row[1] for row in rows})
        self._add(rows)

    def _read_runs(self, numbers: set[int]) -> None:
        missing = numbers - self.runs.keys()
        if missing:
            self._keep_runs(read_runs(self.connection, missing))

    def _keep_runs(self, found: Found) -> None:
        runs, unreadable = found
        self.runs |= runs
        for number, error in unreadable.items():
            note_broken_run(self.connection, self.context, number, error)

    def add(self, tasks: Collection[int]) -> None:
        """Lock more tasks of locked runs; the runs of elements of mapped tasks need no lock.

        With a task in a unit of a mapped group, the unit is locked, which comes before its tasks. A transaction that
        holds a unit may lock others of its tasks later.
        """
        if tasks:
            self._add_locked(tasks, find_units(self.connection, tasks))

    def _add_locked(self, tasks: Collection[int], units: Collection[InstanceKey]) -> None:
        rows = lock_units(self.connection, tasks, units) if units else lock_tasks(self.connection, tasks)
        self._read_runs({row[1] for row in rows if row[3] != UNMAPPED})
        self._add(rows)

    def add_pending(self) -> None:
        """Lock pending tasks of locked runs, up to the limit."""
        found = find_pending(self.connection, self.runs, self.limit)
        elements = [task for task, index in found.items() if index != UNMAPPED]
        if found:
            # The units of elements are found first: a task in a unit is locked after it.
            self._add_locked(found, find_units(self.connection, elements) if elements else ())
        self.left = self.left or len(found) >= self.limit
        self.doubt(entry for task in found if (entry := self.tasks.get(task)) is not None and entry.pending)

    def load(self, keys: Iterable[InstanceKey]) -> None:
        """Lock task instances of locked runs."""
        missing = sorted({key for key in keys if key not in self._named})
        if missing:
            self._add(lock_named(self.connection, missing))

    def add_elements(self, rows: Iterable[TaskValues]) -> list[TaskEntry]:
        """Add element rows of locked runs that this transaction has locked."""
        found = list(rows)
        self._add(found)
        return [self.tasks[row[0]] for row in found if row[0] in self.tasks]

    def _add(self, rows: Iterable[TaskValues]) -> None:
        heads = []
        for row in rows:
            run = self.runs.get(row[1])
            # A run whose structure is unreadable is missing.
            if run is None or row[0] in self.tasks:
                continue
            try:
                entry = TaskEntry(row, run)
            except Exception as error:
                note_broken_run(self.connection, self.context, run.id, error)
            else:
                self.tasks[entry.id] = self._named[run.id, entry.task_id, entry.map_index] = entry
                if entry.row.policy.is_map:
                    heads.append(entry)
        if heads:
            self.maps.load_told(self.connection, heads)

    def find(self, run: int, task_id: str, map_index: int = UNMAPPED) -> TaskEntry | None:
        """Return a locked task instance; None if the run has no such instance."""
        return self._named.get((run, task_id, map_index))

    # -- feeding ---------------------------------------------------------------------------------------------------

    def give_all(self, given: Iterable[tuple[int, Input]], by: str) -> list[Answer | None]:
        """Feed inputs to locked tasks, in order; the answer is None if there is no such task."""
        pairs = list(given)
        stale = [
            (task, one.epoch)
            for task, one in pairs
            if one.epoch is not None and task in self.tasks and one.epoch != self.tasks[task].row.epoch
        ]
        left = find_left(self.connection, stale) if stale else {}
        answers: list[Answer | None] = []
        for task, one in pairs:
            entry = self.tasks.get(task)
            known = None if one.epoch is None else left.get((task, one.epoch))
            answers.append(None if entry is None else self.give(entry, one, by, known))
        return answers

    def give(self, entry: TaskEntry, given: Input, by: str, left: str | None = None) -> Answer:
        """Feed an input to a task and collect the effects."""
        before = entry.row
        if left is None and given.epoch is not None and given.epoch < before.epoch:
            left = self._effects.find_left(entry.id, given.epoch)
        answer = feed(before, given, self.context.now_us, left)
        if not isinstance(answer, Moved):
            return answer
        self.moved += 1
        after = entry.row = answer.task
        if after.epoch == before.epoch:
            # A running attempt waits at its `yield`, or goes on: its state has not changed, and the journal has no row.
            entry.changed = True
            self.context.bells.update(effect.channel for effect in answer.effects if isinstance(effect, Ring))
            return answer
        now_us = self.context.now_us
        if not (entry.is_part and before.state in _READY and after.state in _READY):
            entry.since_us = now_us
        entry.changed = True
        entry.pending = 0
        opens = after.state is TaskState.MAPPED and before.state is TaskState.NONE
        if after.tries > before.tries or opens:
            entry.started_us = now_us
        entry.ended_us = None if after.outcome is None else now_us
        error = given.error if isinstance(given, (Failed, FileMissing, TriggerFailed)) else None
        if isinstance(given, TriggerEnded) and isinstance(given.ending, Failure):
            error = given.ending.error
        if isinstance(given, Clear) and entry.is_part and entry.plan.structure.is_generator:
            self._effects.emptied.add(entry.id)
        for effect in answer.effects:
            if isinstance(effect, RunCallback) and effect.error is not None:
                error = effect.error
            self._keep(entry, effect, before.trigger, given.origin if isinstance(given, Failed) else None)
        if after.state is TaskState.NONE or after.state is TaskState.RUNNING or after.outcome is TaskOutcome.SUCCESS:
            entry.error = None
        elif after.ending is not None:
            entry.error = after.ending.error
        elif error is not None:
            entry.error = error
        journal = JournalRow(entry.id, after.epoch, before.state.value, after.state.value, identify(given), by, error)
        self._effects.journal.append(journal)
        # A cleared task waits again; whether it can run depends on its upstream.
        if after.state is TaskState.NONE:
            self._doubtful[entry.id] = entry
        return answer

    def note_created(
        self,
        tasks: Collection[int],
        by: str,
        state: TaskState = TaskState.SCHEDULED,
        readiness: Readiness = Readiness.RUN,
    ) -> None:
        """Record elements of a mapped task that were created in a state, as their upstream decided."""
        before, after = TaskState.NONE.value, state.value
        given = identify(Ready(0, readiness))
        self._effects.journal += [JournalRow(task, 1, before, after, given, by, None) for task in tasks]
        self.moved += len(tasks)

    def find_triggerers(self, entries: Iterable[TaskEntry]) -> dict[int, int]:
        """Return the sessions that run the triggers of deferred tasks, by task."""
        deferred = [(entry.id, entry.row.trigger) for entry in entries if entry.row.trigger is not None]
        return find_triggerers(self.connection, deferred)

    def _keep(self, entry: TaskEntry, effect: Effect, stopped: int | None, origin: str | None) -> None:
        effects = self._effects
        match effect:
            case Ring(channel=channel):
                self.context.bells.add(channel)
            case TellSuccessors(before=before, after=after):
                self._tell(entry, before, after)
            case StoreXComs(values=values):
                effects.xcoms += [(entry.id, key, value) for key, value in values]
            case ClearXComs():
                effects.cleared.add(entry.id)
            case MakeTrigger(epoch=number, trigger=trigger):
                priority = entry.plan.structure.priority
                effects.made.append(MadeTrigger(entry.id, number, trigger, priority))
            case StopTrigger(reason=reason):
                assert stopped is not None
                effects.stopped.append((entry.id, stopped, reason))
            case DiscardEvents(reason=reason):
                effects.discarded[entry.id] = reason
            case RunCallback(callback=callback, error=error):
                structure = entry.plan.structure
                if callback.value in structure.callbacks:
                    name, queue = callback.value, structure.queue
                    effects.callbacks.append(
                        DueCallback(
                            entry.run.id, entry.id, entry.row.epoch, name, error, queue, entry.started_us, origin
                        )
                    )
            case OpenMap() | StopMap():
                self.maps.wake(entry.run.id, entry.task_id)
            case ResetMap():
                self.maps.reset.add(entry.id)
            case _:
                pass  # a worker learns which attempts to stop from its answer to `WorkerTurn.held`

    def _tell(self, entry: TaskEntry, before: Told, after: Told) -> None:
        run = entry.run
        if entry.map_index != UNMAPPED:
            # Run and successors count tasks; an element tells its map alone, and its unit if it is part of one.
            if entry.is_part:
                self._told.append(_Told(entry, before, after))
            elif not after.done:
                entry.skips = None
            return
        if entry.plan.structure.mapped_group:
            self.maps.wake(run.id, entry.plan.structure.mapped_group)
        elif entry.row.policy.is_map and entry.row.outcome is not None and entry.row.epoch > 1:
            # If it did not open in this life, the elements of its former life are removed.
            self.maps.wake(run.id, entry.task_id)
        self._told.append(_Told(entry, before, after))
        for name in entry.plan.feeds:
            self.maps.wake(run.id, name)
        if before.done != after.done:
            run.unfinished += before.done - after.done
            run.changed = True
        structure = entry.plan.structure
        # A task that was cleared while others of its map stay failed has not failed again.
        if (
            TaskOutcome.FAILED in after.kinds - before.kinds
            and run.plan.structure.fail_fast
            and not structure.is_teardown
            and run.stop is None
        ):
            run.stop, run.changed = "fail_fast", True

    def note_skips(self, entry: TaskEntry, names: Iterable[str], everything: bool) -> None:
        """Record which tasks an attempt skips, before its report is fed; unknown task names are ignored."""
        known = [] if everything else sorted(name for name in names if name in entry.run.plan.tasks)
        if entry.map_index != UNMAPPED and not entry.is_part:
            # An element does not skip what follows all elements. The maps that follow it element by element read this.
            skipped = [name for name in entry.plan.followers if everything or name in known]
            tasks = entry.run.plan.tasks
            kept = [name for name in skipped if not (everything and tasks[name].structure.is_teardown)]
            entry.skips = json.dumps(kept) if kept else None
            return
        if entry.is_part:
            # Nor does a unit: only what follows the task in its unit is skipped.
            inner = entry.run.plan.groups.get(entry.plan.structure.mapped_group, ())
            skipped = entry.run.plan.list_skipped(entry.task_id) if everything else known
            known, everything = sorted(name for name in skipped if name in inner), False
        if everything or known:
            entry.skips = ALL_DOWNSTREAM if everything else json.dumps(known)
            entry.tallied = True
            self._vote(entry, 1)

    def _vote(self, entry: TaskEntry, votes: int) -> None:
        names = self._list_skips(entry)
        self.load((entry.run.id, name, entry.map_index) for name in names)
        for name in names:
            other = self._named[entry.run.id, name, entry.map_index]
            other.skip_votes += votes
            other.tallied = True
            self._doubtful[other.id] = other

    def _list_skips(self, entry: TaskEntry) -> list[str]:
        if entry.skips == ALL_DOWNSTREAM:
            return entry.run.plan.list_skipped(entry.task_id)
        return list(json.loads(entry.skips or "[]"))

    def add_callback(self, callback: DueCallback) -> None:
        """Add a callback of a run."""
        self._effects.callbacks.append(callback)

    # -- following -------------------------------------------------------------------------------------------------

    def doubt(self, entries: Iterable[TaskEntry]) -> None:
        """Mark tasks that `settle` must decide if they wait."""
        self._doubtful.update((entry.id, entry) for entry in entries)

    def park_elements(self) -> None:
        """Have cleared elements wait for the windows of their maps; all other decisions are left to `settle`.

        Units are cleared with their tasks, so that the whole group has not ended either.
        """
        others, self._told = ([one for one in self._told if one.task.is_part is wanted] for wanted in (False, True))
        self._tell_successors()
        self._told = others
        for unit in [one for one in self._doubtful.values() if one.is_unit]:
            self._decide_unit(unit)
        for entry in [one for one in self._doubtful.values() if one.map_index != UNMAPPED and not one.is_part]:
            del self._doubtful[entry.id]
            if entry.row.state is TaskState.NONE:
                self._decide(entry)

    def settle(self) -> None:
        """Propagate outcomes to successors and decide them, wave after wave."""
        decided = 0
        while self._told or self._doubtful:
            self._tell_successors()
            doubtful, self._doubtful = self._doubtful, {}
            for entry in doubtful.values():
                if entry.is_unit:
                    self._decide_unit(entry)
                if entry.row.state is not TaskState.NONE:
                    continue
                if decided >= self.limit:
                    entry.pending, entry.tallied, self.left = 1, True, True
                    continue
                decided += self._decide(entry)

    def _tell_successors(self) -> None:
        told, self._told = self._told, []
        if not told:
            return
        self._lock_successors(told)
        for one in told:
            if not one.after.done and one.task.skips is not None:
                self._vote(one.task, -1)
                one.task.skips = None
            for name, kinds in one.task.successors:
                other = self._named[one.task.run.id, name, one.task.map_index]
                other.counts = move_counts(other.counts, kinds, one.before, one.after)
                other.tallied = True
                self._doubtful[other.id] = other
            if one.task.run.plan.by_past and one.task.map_index == UNMAPPED:
                self._wake_next(one.task)

    def _lock_successors(self, told: list[_Told]) -> None:
        wanted: dict[InstanceKey, None] = {}
        for one in told:
            run = one.task.run
            names = {(run.id, name, one.task.map_index): None for name, _ in one.task.successors}
            wanted |= names
            if (
                not one.after.kinds.isdisjoint((TaskOutcome.SKIPPED, TaskOutcome.UPSTREAM_FAILED))
                and not names.keys() <= self._named.keys()
            ):
                # Lock a long chain that ends with this task in one statement, not task by task.
                after = run.plan.list_downstream([one.task.task_id], self.limit)
                if one.task.map_index != UNMAPPED:
                    unit = run.plan.groups.get(one.task.plan.structure.mapped_group, ())
                    after = [name for name in after if name in unit]
                wanted |= {(run.id, name, one.task.map_index): None for name in after}
        self.load(wanted)

    def _wake_next(self, entry: TaskEntry) -> None:
        """Mark the tasks of the next run that waited for this task, so that the scheduler decides them again."""
        others = []
        for key in find_next_tasks(self.connection, entry):
            other = self._named.get(key)
            if other is None:
                others.append(key)
            elif other.row.state is TaskState.NONE:
                other.pending, other.tallied = 1, True
        mark_pending(self.connection, others)
        self.context.left = True
        self.context.bells.add(Channel.SCHEDULER)

    def _decide(self, entry: TaskEntry) -> int:
        run = entry.run
        if entry.map_index != UNMAPPED and not entry.is_part:
            # A cleared element waits until the window of its map has room for it.
            entry.pending, entry.tallied = 2, True
            return 0
        if run.state != "running":
            # Starting or resuming the run processes its pending tasks.
            entry.pending, entry.tallied = 1, True
            return 0
        if entry.pending:
            entry.pending, entry.tallied = 0, True
        # A run that is being stopped starts no tasks, except teardowns after a fail-fast stop.
        if run.stop is not None and not (run.stop == "fail_fast" and entry.plan.structure.is_teardown):
            return 0
        if entry.is_part and not self._is_unit_open(entry):
            return 0  # the window of the group decides when the unit starts
        upstream = entry.plan.build_upstream(entry.counts, inner=entry.is_part)
        readiness = Readiness.SKIP if entry.skip_votes else decide(entry.plan.rule, upstream)
        if readiness is Readiness.WAIT:
            return 0
        by_past = run.plan.by_past and not entry.is_part
        past = is_past_done(self.connection, entry) if readiness is Readiness.RUN and by_past else True
        if past is None:
            entry.pending, entry.tallied, self.context.skipped = 1, True, True
            self.context.bells.add(Channel.SCHEDULER)
        if not past:
            return 0
        self.give(entry, Ready(entry.row.epoch, readiness), "scheduler")
        return 1

    def _is_unit_open(self, entry: TaskEntry) -> bool:
        unit = self.find(entry.run.id, entry.plan.structure.mapped_group, entry.map_index)
        return unit is not None and unit.row.state is TaskState.MAPPED

    def _decide_unit(self, entry: TaskEntry) -> None:
        """Have a unit of a mapped group follow its tasks."""
        told = entry.plan.tell_unit(entry.counts)
        if told.done:
            if entry.row.state is TaskState.NONE:  # it waited for the window, and has nothing left to run
                self.give(entry, Ready(entry.row.epoch, Readiness.RUN), "scheduler")
            self.give(entry, MapTold(entry.row.epoch, told), "scheduler")
        elif entry.row.state in ENDED:
            self.give(entry, Clear(), "scheduler")

    # -- writing ---------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write all changes."""
        self.flush_rows()
        write_boards([self])

    @property
    def has_callbacks(self) -> bool:
        """Whether callbacks are left to write."""
        return bool(self._effects.callbacks)

    def flush_rows(self) -> None:
        """Write all changes except those of maps."""
        write_tasks(self.connection, self.tasks.values())
        effects, self._effects = self._effects, Effects()
        self.wrote_callbacks = self.wrote_callbacks or bool(effects.callbacks)
        write_effects(self.connection, effects, self.context)
        write_runs(self.connection, self.runs.values(), self.locked)


def write_boards(boards: Sequence[Board]) -> None:
    """Write the changes of maps, which say what has become of their elements; maps are locked in the order of all."""
    for board in boards:
        board.maps.collect(board.tasks.values())
    if write_maps(boards[0].connection, [board.maps for board in boards]):
        boards[0].context.bells.add(Channel.SCHEDULER)
