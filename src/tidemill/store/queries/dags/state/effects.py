"""Writes the effects of task transitions: journal, XComs, triggers, callbacks.

Invariants: trigger cursors are locked after the tasks, by ascending id. A stopped trigger gets a new token, so that its
later events are refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import (
    BigInteger,
    BindParameter,
    ColumnElement,
    Connection,
    Delete,
    Executable,
    Insert,
    Select,
    Update,
    and_,
    bindparam,
    case,
    cast,
    delete,
    func,
    insert,
    literal,
    literal_column,
    or_,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.tasks.dependencies import TaskOutcome
from tidemill.core.tasks.inputs import Channel, TriggerStopReason
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import map_item, task_callback, task_instance, task_journal, xcom
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, lock_cursors
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.records import TriggerState
from tidemill.store.statements import Statement
from tidemill.store.tables import trigger, trigger_cursor, trigger_stream

#: The name of the callbacks that call `on_kill` of triggers.
ON_KILL = "trigger_on_kill"
#: The journal stores the last characters of an error up to this number; the log has the full text.
_DETAIL_CHARACTERS = 20_000

_JOURNAL_COLUMNS = ("task", "epoch", "before", "after", "given", "said_by")
_JOURNAL = RowSet("journal", task=int, epoch=int, before=str, after=str, given=str, said_by=str)
_DETAILED_JOURNAL = RowSet("details", task=int, epoch=int, before=str, after=str, given=str, said_by=str, detail=str)
_XCOMS = RowSet("xcoms", task=int, key=str, value=str, created_us=int)
_MADE = RowSet(
    "made",
    classpath=str,
    kwargs=str,
    created_us=int,
    task_id=int,
    epoch=int,
    queue=str,
    priority=int,
    stream_key=str,
    starts=int,
)
_OF_TASKS = RowSet("of_tasks", task_id=int, epoch=int)
_STREAMS = RowSet("made_streams", task_id=int, epoch=int, feeds=int, acked=int)
_DISCARDED = RowSet("discarded", id=int, last=int, number=int, reason=str)
_STOPPED = RowSet("stopped", id=int, state=str, reason=str, changed_us=int)
_CALLBACKS = RowSet(
    "callbacks",
    run=int,
    task=int,
    epoch=int,
    name=str,
    cause=str,
    queue=str,
    started_us=int,
    origin=str,
    created_us=int,
)
_OUTCOMES = frozenset(outcome.value for outcome in TaskOutcome)
_STOP_STATES = {
    TriggerStopReason.DONE: TriggerState.FINISHED,
    TriggerStopReason.FAILED: TriggerState.FAILED,
    TriggerStopReason.TIMEOUT: TriggerState.CANCELLED,
    TriggerStopReason.USER: TriggerState.CANCELLED,
}


class JournalRow(NamedTuple):
    """A change of a task's state; `epoch` is the new epoch."""

    task: int
    epoch: int
    before: str
    after: str
    given: str
    by: str
    detail: str | None


class MadeTrigger(NamedTuple):
    """The trigger of a deferral; `trigger` is the result of `pack_trigger`."""

    task: int
    epoch: int
    trigger: str
    priority: int


class DueCallback(NamedTuple):
    """A due user callback; `task` is None for a callback of the whole run."""

    run: int
    task: int | None
    epoch: int
    name: str
    cause: str | None
    queue: str
    started_us: int | None = None
    origin: str | None = None


class PackedTrigger(msgspec.Struct, frozen=True, array_like=True):
    """The trigger of a deferral, packed into one text for the state machine; `starts`: as in the table `trigger`."""

    classpath: str
    kwargs: str
    queue: str
    stream_key: str | None
    starts: int | None = None
    streams: bool = False
    feeds: int = 0
    acked: bool = False


@dataclass(slots=True)
class Effects:
    """The pending writes besides the rows of tasks and runs.

    Attributes:
        journal: New rows of the journal.
        xcoms: New XComs, as task, key and value.
        cleared: The tasks whose XComs are removed.
        emptied: The tasks whose items are removed: generators that start over, and that no map is mapped over.
        made: New triggers.
        stopped: The tasks whose triggers stop, with the epoch and the reason.
        discarded: Why the undelivered events of tasks are discarded, by task.
        callbacks: Callbacks that are due.
    """

    journal: list[JournalRow] = field(default_factory=list)
    xcoms: list[tuple[int, str, str]] = field(default_factory=list)
    cleared: set[int] = field(default_factory=set)
    emptied: set[int] = field(default_factory=set)
    made: list[MadeTrigger] = field(default_factory=list)
    stopped: list[tuple[int, int, TriggerStopReason]] = field(default_factory=list)
    discarded: dict[int, str] = field(default_factory=dict)
    callbacks: list[DueCallback] = field(default_factory=list)

    def find_left(self, task: int, epoch: int) -> str | None:
        """Return the input with which a task left an epoch in this transaction, or None."""
        return next((row.given for row in self.journal if (row.task, row.epoch) == (task, epoch + 1)), None)


def pack_trigger(packed: PackedTrigger) -> str:
    """Pack a trigger into the text that the state machine passes on."""
    return msgspec.json.encode(packed).decode()


def write_effects(connection: Connection, effects: Effects, context: CallContext) -> None:
    """Write all effects."""
    if effects.stopped:
        stop_triggers(connection, effects.stopped, context.now_us)
    journal = effects.journal
    if effects.discarded:
        told = discard_events(connection, effects.discarded)
        journal = [_add_detail(row, told.get(row.task)) for row in journal]
    if journal:
        _write_journal(connection, journal, context.now_us)
    if effects.cleared:
        remove_xcoms(connection, effects.cleared)
    if effects.emptied:
        _item_delete.fetch(connection, IDS.build_parameters(find_dialect(connection), build_id_rows(effects.emptied)))
    if effects.xcoms:
        write_xcoms(connection, [row for row in effects.xcoms if row[0] not in effects.cleared], context.now_us)
    if effects.made:
        _make_triggers(connection, effects.made, context)
    if effects.callbacks:
        write_callbacks(connection, effects.callbacks, context.now_us)
        context.bells.add(Channel.WORKER)


def _write_journal(connection: Connection, journal: Sequence[JournalRow], now_us: int) -> None:
    detailed = any(row.detail is not None for row in journal)
    rows: list[tuple[int | str | None, ...]] = [row[:6] for row in journal]
    if detailed:
        rows = [(*row[:6], None if row.detail is None else _shorten(row.detail)) for row in journal]
    given = _DETAILED_JOURNAL if detailed else _JOURNAL
    values = given.build_parameters(find_dialect(connection), rows)
    _journal_insert.fetch(connection, values | {"now_us": now_us}, detailed)


def _add_detail(row: JournalRow, told: str | None) -> JournalRow:
    """Return a journal row that also names the events that its change discards."""
    if told is None or row.after not in _OUTCOMES:
        return row
    return row._replace(detail=told if row.detail is None else f"{row.detail}; {told}")


def _shorten(detail: str) -> str | None:
    return make_storable(detail[-_DETAIL_CHARACTERS:])


@Statement
def _journal_insert(dialect: str, detailed: bool) -> Insert:
    given = (_DETAILED_JOURNAL if detailed else _JOURNAL).build_source(dialect)
    names = [*_JOURNAL_COLUMNS, *(["detail"] if detailed else [])]
    at_us: BindParameter[int] = bindparam("now_us", type_=BigInteger())
    return insert(task_journal).from_select([*names, "at_us"], select(*[given.c[name] for name in names], at_us))


def remove_xcoms(connection: Connection, tasks: set[int]) -> None:
    """Remove all XComs of the given tasks."""
    dialect = find_dialect(connection)
    _xcom_delete.fetch(connection, IDS.build_parameters(dialect, build_id_rows(tasks)))


@Statement
def _item_delete(dialect: str) -> Delete:
    return delete(map_item).where(map_item.c.task.in_(select(IDS.build_source(dialect).c.id)))


@Statement
def _xcom_delete(dialect: str) -> Delete:
    return delete(xcom).where(xcom.c.task.in_(select(IDS.build_source(dialect).c.id)))


def write_xcoms(connection: Connection, values: Sequence[tuple[int, str, str]], now_us: int) -> None:
    """Store XComs, given as task, key and value; the last value of a key wins."""
    last = {(task, key): value for task, key, value in values}
    if not last:
        return
    dialect = find_dialect(connection)
    rows = [(task, key, value, now_us) for (task, key), value in sorted(last.items())]
    _xcom_insert.fetch(connection, _XCOMS.build_parameters(dialect, rows))


@Statement
def _xcom_insert(dialect: str) -> Executable:
    given = _XCOMS.build_source(dialect)
    names = ["task", "key", "value", "created_us"]
    # SQLite needs the WHERE clause; without it, it parses ON CONFLICT as a join condition.
    rows = select(*[given.c[name] for name in names]).where(literal(1) == 1)
    statement = _insert(dialect)(xcom).from_select(names, rows)
    new = {name: statement.excluded[name] for name in ("value", "created_us")}
    return statement.on_conflict_do_update(index_elements=["task", "key"], set_=new)  # type: ignore[no-any-return]


def _make_triggers(connection: Connection, made: Sequence[MadeTrigger], context: CallContext) -> None:
    rows, streams = [], []
    for one in made:
        packed = msgspec.json.decode(one.trigger, type=PackedTrigger)
        if packed.streams:
            streams.append((one.task, one.epoch, packed.feeds, int(packed.acked)))
        kwargs = context.cipher.encrypt(packed.kwargs)
        what = (packed.classpath, kwargs, context.now_us, one.task, one.epoch, packed.queue, one.priority)
        rows.append((*what, packed.stream_key, packed.starts))
    dialect = find_dialect(connection)
    _trigger_insert.fetch(connection, _MADE.build_parameters(dialect, rows))
    keys = _OF_TASKS.build_parameters(dialect, [(one.task, one.epoch) for one in made])
    _cursor_insert.fetch(connection, keys)
    if streams:
        _stream_insert.fetch(connection, _STREAMS.build_parameters(dialect, streams))


@Statement
def _trigger_insert(dialect: str) -> Insert:
    given = _MADE.build_source(dialect)
    copied = ["classpath", "kwargs", "created_us", "task_id", "epoch", "queue", "priority", "stream_key", "starts"]
    values = select(
        *[given.c[name] for name in copied],
        literal("never").label("restart"),
        literal(TriggerState.REGISTERED.value).label("state"),
        given.c.created_us.label("changed_us"),
    ).order_by(given.c.position)
    return insert(trigger).from_select([*copied, "restart", "state", "changed_us"], values)


@Statement
def _of_tasks(dialect: str) -> Select[Any]:
    return _build_of_tasks(dialect)


def _build_of_tasks(dialect: str) -> Select[Any]:
    given = _OF_TASKS.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task_id, trigger.c.epoch == given.c.epoch)
    return select(trigger.c.id, trigger.c.task_id).join(given, same)


@Statement
def _cursor_insert(dialect: str) -> Insert:
    found = _build_of_tasks(dialect).subquery()
    values = select(found.c.id, literal(0).label("token"), literal(0).label("next_index")).order_by(found.c.id)
    return insert(trigger_cursor).from_select(["trigger_id", "token", "next_index"], values)


@Statement
def _stream_insert(dialect: str) -> Insert:
    given = _STREAMS.build_source(dialect)
    same = and_(trigger.c.task_id == given.c.task_id, trigger.c.epoch == given.c.epoch)
    found = select(trigger.c.id, trigger.c.task_id, given.c.feeds, given.c.acked).join(given, same).subquery()
    earlier = trigger_stream.alias("earlier")
    # A checkpoint stays over deferrals and tries, until the task is cleared.
    last = select(earlier.c.checkpoint).where(earlier.c.task == found.c.task_id).order_by(earlier.c.trigger_id.desc())
    checkpoint = last.limit(literal_column("1")).scalar_subquery().label("checkpoint")
    carried = count_carried(found.c.task_id, found.c.id).label("carried")
    rows = select(found.c.id, found.c.task_id, found.c.feeds, found.c.acked, checkpoint, carried).subquery()
    # Events of an earlier stream that are still undelivered resume the task at once.
    # Whether the maps over it have room is looked up then.
    ready = case((rows.c.carried > literal_column("0"), literal_column("1")), else_=literal_column("0"))
    values = select(*rows.c, ready.label("ready"), ready.label("held")).order_by(rows.c.id)
    columns = ["trigger_id", "task", "feeds", "acked", "checkpoint", "carried", "ready", "held"]
    return insert(trigger_stream).from_select(columns, values)


def count_carried(task: ColumnElement[int], before: ColumnElement[int]) -> ColumnElement[int]:
    """Build the number of undelivered events of the acknowledged streams of a task before a trigger."""
    stream, cursor = trigger_stream.alias("older"), trigger_cursor.alias("older_cursor")
    last = func.coalesce(stream.c.ends_at, cursor.c.next_index)
    mine = and_(stream.c.task == task, stream.c.trigger_id < before, stream.c.acked == literal_column("1"))
    counted = select(cast(func.coalesce(func.sum(last - stream.c.handled), literal_column("0")), BigInteger))
    counted = counted.join(cursor, cursor.c.trigger_id == stream.c.trigger_id)
    return counted.where(and_(mine, last > stream.c.handled)).scalar_subquery()


def discard_events(connection: Connection, reasons: Mapping[int, str]) -> dict[int, str]:
    """Count the undelivered events of tasks as handled, and store that they were discarded.

    These are the events of the latest stream of a task, which has been stopped, and those of earlier ones that would be
    delivered in another try.

    Args:
        connection: A connection inside a transaction.
        reasons: Why, by task.

    Returns:
        Which events were discarded, by task, for users.
    """
    dialect = find_dialect(connection)
    rows = _undelivered.fetch(connection, IDS.build_parameters(dialect, build_id_rows(reasons)))
    if not rows:
        return {}
    given = [(number, last, last - handled, reasons[task]) for number, task, handled, last in rows]
    _discard.fetch(connection, _DISCARDED.build_parameters(dialect, given))
    told: dict[int, str] = {}
    for number, task, handled, last in rows:
        said = f"{last - handled:,} undelivered events of trigger run {number} were discarded ({handled} to {last - 1})"
        told[task] = f"{told[task]}; {said}" if task in told else said
    return told


@Statement
def _undelivered(dialect: str) -> Select[Any]:
    stream, newer = trigger_stream.c, trigger_stream.alias("newer")
    last = func.coalesce(stream.ends_at, trigger_cursor.c.next_index)
    latest = select(func.max(newer.c.trigger_id)).where(newer.c.task == stream.task).scalar_subquery()
    mine = stream.task.in_(select(IDS.build_source(dialect).c.id))
    wanted = or_(stream.acked == literal_column("1"), stream.trigger_id == latest)
    return (
        select(stream.trigger_id, stream.task, stream.handled, last)
        .join(trigger_cursor, trigger_cursor.c.trigger_id == stream.trigger_id)
        .where(and_(mine, wanted, last > stream.handled))
        .order_by(stream.trigger_id)
    )


@Statement
def _discard(dialect: str) -> Update:
    given, stream = _DISCARDED.build_source(dialect), trigger_stream.c
    new = {"handled": given.c.last, "discarded": stream.discarded + given.c.number, "discarded_for": given.c.reason}
    return update(trigger_stream).where(stream.trigger_id == given.c.id).values(new)


def stop_triggers(connection: Connection, stopped: Sequence[tuple[int, int, TriggerStopReason]], now_us: int) -> None:
    """Stop triggers, given as task and epoch of the deferral, so that their events are no longer stored."""
    dialect = find_dialect(connection)
    reasons = {task: reason for task, _, reason in stopped}
    keys = _OF_TASKS.build_parameters(dialect, [(task, epoch) for task, epoch, _ in stopped])
    found: dict[int, int] = dict(_of_tasks.fetch(connection, keys))
    lock_cursors(connection, found)
    killed = [number for number, task in found.items() if reasons[task] is TriggerStopReason.USER]
    if killed:
        given = IDS.build_parameters(dialect, build_id_rows(killed))
        _kill_insert.fetch(connection, given | {"now_us": now_us})
    _token_update.fetch(connection, IDS.build_parameters(dialect, build_id_rows(found)))
    rows = []
    for number, task in sorted(found.items()):
        rows.append((number, _STOP_STATES[reasons[task]].value, reasons[task].value, now_us))
    _stop_update.fetch(connection, _STOPPED.build_parameters(dialect, rows))


@Statement
def _kill_insert(dialect: str) -> Insert:
    """Have `on_kill` called for triggers that have run: by the session that runs them, or by any other one."""
    wanted = trigger.c.id.in_(select(IDS.build_source(dialect).c.id))
    # A trigger that is only reserved for a session waits for its trial.
    owner = case((trigger_cursor.c.claim_request.is_not(None), trigger_cursor.c.session_id))
    now_us = bindparam("now_us", type_=BigInteger())
    values: dict[str, ColumnElement[Any]] = {
        "run": task_instance.c.run,
        "task": trigger.c.task_id,
        "epoch": trigger.c.epoch,
        "name": literal(ON_KILL),
        "queue": trigger.c.queue,
        "state": case((owner.is_(None), "kill"), else_="running"),
        "session_id": owner,
        "lost": literal(0),
        "created_us": now_us,
    }
    found = (
        select(*[value.label(name) for name, value in values.items()])
        .join(trigger_cursor, trigger_cursor.c.trigger_id == trigger.c.id)
        .join(task_instance, task_instance.c.id == trigger.c.task_id)
        .where(and_(wanted, trigger_cursor.c.token > 0, text("trigger.state IN ('registered', 'running')")))
        .order_by(trigger.c.id)
    )
    return insert(task_callback).from_select(list(values), found)


@Statement
def _token_update(dialect: str) -> Update:
    wanted = select(IDS.build_source(dialect).c.id)
    new = {"token": trigger_cursor.c.token + 1, "session_id": None, "claim_request": None}
    return update(trigger_cursor).where(trigger_cursor.c.trigger_id.in_(wanted)).values(new)


@Statement
def _stop_update(dialect: str) -> Update:
    given = _STOPPED.build_source(dialect)
    names = ("state", "reason", "changed_us")
    return update(trigger).where(trigger.c.id == given.c.id).values({name: given.c[name] for name in names})


def write_callbacks(connection: Connection, callbacks: Sequence[DueCallback], now_us: int) -> None:
    """Store due callbacks."""
    rows = [(*one._replace(cause=make_storable(one.cause)), now_us) for one in callbacks]
    dialect = find_dialect(connection)
    _callback_insert.fetch(connection, _CALLBACKS.build_parameters(dialect, rows))


@Statement
def _callback_insert(dialect: str) -> Insert:
    given = _CALLBACKS.build_source(dialect)
    copied = [*DueCallback._fields, "created_us"]
    values = select(*[given.c[name] for name in copied], literal("due").label("state"), literal(0).label("lost"))
    return insert(task_callback).from_select([*copied, "state", "lost"], values.order_by(given.c.position))


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
