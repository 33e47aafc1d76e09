"""Marks streams whose tasks can go on, and resumes those tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    Select,
    Update,
    and_,
    bindparam,
    exists,
    literal_column,
    select,
    update,
)

from tidemill.core.tasks.inputs import StreamReady
from tidemill.store.batches import find_dialect
from tidemill.store.calls.worker_calls import ClaimedStream
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_instance
from tidemill.store.queries.dags.items.backlog import lock_free
from tidemill.store.queries.dags.state.task_rows import TaskEntry
from tidemill.store.queries.dags.state.transition import Board
from tidemill.store.queries.dags.streams.rows import is_held, read_rows, read_streams
from tidemill.store.queries.isolation import work_on_runs
from tidemill.store.queries.triggers.cursors import IDS, SKIPPED, build_id_rows, lock_cursors
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger_stream

_STREAM, _TASK = trigger_stream.c, task_instance.c
_MOST = 500


def find_ready(connection: Connection, entries: Sequence[TaskEntry]) -> tuple[set[int], set[int]]:
    """Lock the cursors of the streams of tasks; return the tasks that can go on, and those that wait for a map.

    A task can go on if its stream has an event that was not handled, or has ended. If the backlog of a map over the
    task is full, the scheduler resumes it once there is room.
    """
    streams = read_streams(connection, entries)
    lock_cursors(connection, {one.trigger for one in streams.values()})
    return _sort_ready(connection, streams)


def _sort_ready(connection: Connection, streams: Mapping[int, ClaimedStream]) -> tuple[set[int], set[int]]:
    """Return the tasks that can go on, and those that wait for a map, whose streams are marked so."""
    ready = [one for one in read_rows(connection, {one.trigger for one in streams.values()}) if one.progress.ready]
    held = {one.trigger for one in ready if is_held(connection, one)}
    if held:
        _hold.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(held)))
    return {one.task for one in ready if one.trigger not in held}, {one.task for one in ready if one.trigger in held}


@Statement
def _hold(dialect: str) -> Update:
    return update(trigger_stream).where(_STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))).values(ready=2)


def has_marked(mark: str, of_tasks: Sequence[ColumnElement[bool]]) -> ColumnElement[bool]:
    """Build the condition that a stream is marked. `of_tasks`: conditions on its task."""
    marked = _STREAM.ready == literal_column(mark)
    if not of_tasks:
        return exists().where(marked)
    return exists(select(_STREAM.trigger_id).join(task_instance, _TASK.id == _STREAM.task).where(marked, *of_tasks))


def release_streams(connection: Connection, context: CallContext, skip: Collection[int] = ()) -> int:
    """Mark streams whose tasks wait for a map that has room now, so that they are resumed; return their number."""
    given: dict[str, Any] = {"most": _MOST}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    rows = _held.fetch(connection, given, bool(skip))

    def release(found: list[int]) -> int:
        free = [one.trigger for one in read_rows(connection, found) if not is_held(connection, one)]
        if free:
            _release.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(free)))
        return len(free)

    return work_on_runs(connection, context, [(run, number) for number, run in rows], release)


@Statement
def _held(dialect: str, skips: bool) -> Select[Any]:
    wanted = [_STREAM.ready == literal_column("2")]
    if skips:
        wanted.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    return (
        select(_STREAM.trigger_id, _TASK.run)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(and_(*wanted))
        .order_by(_STREAM.trigger_id)
        .limit(bindparam("most"))
        .with_for_update(of=trigger_stream, skip_locked=True)
    )


@Statement
def _release(dialect: str) -> Update:
    mine = _STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))
    return update(trigger_stream).where(and_(mine, _STREAM.ready == literal_column("2"))).values(ready=1)


def resume_streams(
    connection: Connection, context: CallContext, by: str, limit: int, skip: Collection[int] = ()
) -> int:
    """Resume tasks that wait for events that have arrived; return the number of marks that were found.

    It waits for nothing that another transaction has locked: those marks stay for the next turn. A mark is removed only
    under its lock and that of its task, so one that is made meanwhile is not lost.
    """
    given: dict[str, Any] = {"most": limit}
    if skip:
        given |= SKIPPED.build_parameters(find_dialect(connection), build_id_rows(skip))
    rows = _ready.fetch(connection, given, bool(skip))

    def resume(found: list[tuple[int, int]]) -> int:
        dialect = find_dialect(connection)
        board = Board(connection, context)
        locked = lock_free.fetch(connection, IDS.build_parameters(dialect, build_id_rows([task for _, task in found])))
        taken = board.take(locked)
        # A mark may be older than the wait of its task; the others were resumed or have ended in the meantime.
        ready, held = _sort_ready(connection, read_streams(connection, taken))
        for entry in taken:
            if entry.id in ready:
                board.give(entry, StreamReady(entry.row.epoch), by)
        board.flush()
        done = [number for number, task in found if task in board.tasks and task not in held]
        _unmark.fetch(connection, IDS.build_parameters(dialect, build_id_rows(done)))
        return len(done)

    return work_on_runs(connection, context, [(run, (number, task)) for number, task, run in rows], resume)


@Statement
def _ready(dialect: str, skips: bool) -> Select[Any]:
    wanted = [_STREAM.ready == literal_column("1")]
    if skips:
        wanted.append(_TASK.run.not_in(select(SKIPPED.build_source(dialect).c.id)))
    return (
        select(_STREAM.trigger_id, _STREAM.task, _TASK.run)
        .join(task_instance, _TASK.id == _STREAM.task)
        .where(and_(*wanted))
        .order_by(_STREAM.trigger_id)
        .limit(bindparam("most"))
        .with_for_update(of=trigger_stream, skip_locked=True)
    )


@Statement
def _unmark(dialect: str) -> Update:
    return update(trigger_stream).where(_STREAM.trigger_id.in_(select(IDS.build_source(dialect).c.id))).values(ready=0)
