"""Replays the journals of tasks through the machine: the row that it reaches must be the stored one.

A journal names the kind of each input, but not all of its fields: every input that the name stands for is tried, and
those that do not lead to the recorded state are dropped.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import Connection, select

from tidemill.core.tasks.attempt import Moved, feed
from tidemill.core.tasks.dependencies import Readiness, TaskOutcome, Told
from tidemill.core.tasks.endings import Failure, Skip, Success
from tidemill.core.tasks.inputs import (
    Admit,
    Cancel,
    Claim,
    CleanedUp,
    Clear,
    Deferred,
    Due,
    Ended,
    Failed,
    FileMissing,
    Input,
    Lost,
    MapTold,
    Mark,
    Ready,
    Remove,
    Returned,
    Skipped,
    StartInTrigger,
    StreamIdle,
    StreamReady,
    Succeeded,
    TriggerEnded,
    TriggerFailed,
    TriggerFired,
    name_input,
)
from tidemill.core.tasks.task_row import TaskRow
from tidemill.store.dag_tables import task_instance, task_journal
from tidemill.store.queries.dags.state.task_rows import COLUMNS, TaskEntry, read_runs


@dataclass(frozen=True, slots=True)
class JournalLine:
    """A change in the journal of a task."""

    epoch: int
    before: str
    after: str
    given: str
    at_us: int

    @property
    def kind(self) -> str:
        """The name of the input."""
        return self.given.partition(" ")[0]


@dataclass(frozen=True, slots=True)
class StoredLife:
    """A task instance as it is stored, with its journal; `first`: its row when it was created."""

    run: int
    task_id: str
    map_index: int
    first: TaskRow
    row: TaskRow
    journal: tuple[JournalLine, ...]

    @property
    def name(self) -> str:
        """Its name for messages."""
        return f"{self.run} {self.task_id}[{self.map_index}]"


def read_lives(connection: Connection, runs: Collection[int]) -> list[StoredLife]:
    """Return all task instances of runs."""
    columns = task_journal.c
    rows = connection.execute(select(*COLUMNS).where(task_instance.c.run.in_(runs))).all()
    plans, unreadable = read_runs(connection, list(runs))
    assert not unreadable
    mine = select(task_instance.c.id).where(task_instance.c.run.in_(runs))
    wanted = (columns.task, columns.epoch, columns.before, columns.after, columns.given, columns.at_us)
    journals: dict[int, list[JournalLine]] = defaultdict(list)
    for task, *line in connection.execute(select(*wanted).where(columns.task.in_(mine)).order_by(*wanted[:2])):
        journals[task].append(JournalLine(*line))
    return [_build_life(entry, journals[entry.id]) for entry in (TaskEntry(row, plans[row[1]]) for row in rows)]


def _build_life(entry: TaskEntry, journal: Iterable[JournalLine]) -> StoredLife:
    first = TaskRow(entry.row.policy, max_tries=entry.plan.policy.retries + 1)
    return StoredLife(entry.run.id, entry.task_id, entry.map_index, first, entry.row, tuple(journal))


def check_replay(life: StoredLife) -> None:
    """Fail unless the journal, fed to the machine, leads to the stored row."""
    rows = {life.first}
    for line in life.journal:
        rows = {after for row in rows for after in _replay(row, line)}
        assert rows, f"{life.name}: no input {line.given!r} leads to {line.after} in epoch {line.epoch}: {life.journal}"
    assert life.row._replace(told=None) in {row._replace(told=None) for row in rows}, f"{life.name}: {life.row}, {rows}"


def _replay(row: TaskRow, line: JournalLine) -> Iterator[TaskRow]:
    if row.state.value != line.before:
        return
    for given in _INPUTS[line.kind]:
        one = given if given.epoch is None else replace(given, epoch=row.epoch)
        answer = feed(row, one, line.at_us)
        if isinstance(answer, Moved) and (answer.task.epoch, answer.task.state.value) == (line.epoch, line.after):
            yield answer.task


def _list_inputs() -> Iterator[Input]:
    starts: Sequence[StartInTrigger | None] = (None, StartInTrigger("", "resume"), StartInTrigger("", streams=True))
    yield from (Ready(0, one) for one in (Readiness.RUN, Readiness.SKIP, Readiness.FAIL))
    yield from (Admit(0, one) for one in starts)
    yield from (Claim(0, 1), Succeeded(0), Skipped(0), Due(0), Lost(0), Returned(0), Ended(0), CleanedUp(0))
    yield from (Failed(0, "it failed", may_retry=one) for one in (True, False))
    yield from (Deferred(0, "", "resume", streams=one) for one in (True, False))
    yield from (StreamIdle(0), StreamIdle(0, ready=True), StreamIdle(0, pause_us=0), StreamReady(0))
    yield from (TriggerFired(0, ""), TriggerFailed(0, "it failed"), FileMissing(0, "there is no file"))
    yield from (TriggerEnded(0, one) for one in (Success(), Failure("it failed"), Skip()))
    for size, done in itertools.product(range(len(TaskOutcome) + 1), (True, False)):
        yield from (MapTold(0, Told(frozenset(some), done)) for some in itertools.combinations(TaskOutcome, size))
    for triggerer in (None, 1):
        yield from (Clear(triggerer=triggerer), Cancel(triggerer=triggerer), Remove(triggerer=triggerer))
        yield from (Mark(one, triggerer=triggerer) for one in TaskOutcome)


_INPUTS: dict[str, list[Input]] = defaultdict(list)
for _given in _list_inputs():
    _INPUTS[name_input(_given)].append(_given)
