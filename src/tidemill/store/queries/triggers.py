"""Triggers: register, claim, mark and list them.

Invariants: a name keeps its id, its counter of events and its token for ever; a token only rises; a report that
carries an old token changes nothing; rows are locked in the order of their ids, so that hosts cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Executable, Row, and_, case, func, literal, or_, select, true, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.trigger_life import CancelReason
from tidemill.store.batches import RowSet, dialect_of
from tidemill.store.records import Marked, Page, TriggerRecord, TriggerSpec, TriggerState
from tidemill.store.tables import trigger

#: Why a trigger was cancelled that goes on elsewhere, or later.
_GOES_ON = (CancelReason.SHUTDOWN, CancelReason.HAND_OVER)

_SPECS = RowSet("specs", name=str, classpath=str, kwargs=str, restart=str)
_NAMES = RowSet("names", name=str)
_IDS = RowSet("ids", id=int)
_MADE = RowSet("made", id=int, made=str)


def register_triggers(connection: Connection, specs: Sequence[TriggerSpec], now_us: int) -> list[TriggerRecord]:
    """Make sure that the store knows these triggers as they are given.

    A trigger that is known keeps its state, unless it is another one under the old name (its class or arguments
    differ) or was cancelled by a user: then it is registered anew. Its events and their numbers stay in any case.

    Args:
        connection: In a transaction.
        specs: No name twice.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        What is known of each now, in the same order.

    Raises:
        ValueError: A name is given twice.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"a name may be given once: {', '.join(map(repr, twice))}")
    if not specs:
        return []
    dialect = dialect_of(connection)
    rows = sorted((spec.name, spec.classpath, spec.kwargs, spec.restart) for spec in specs)
    connection.execute(_registration(dialect, now_us), _SPECS.parameters(dialect, rows))
    found = _by_names(connection, names)
    return [found[name] for name in names]


def _registration(dialect: str, now_us: int) -> Executable:
    given = _SPECS.source(dialect)
    columns = ["name", "classpath", "kwargs", "restart", "state", "created_us", "changed_us"]
    values = select(
        given.c.name,
        given.c.classpath,
        given.c.kwargs,
        given.c.restart,
        literal(TriggerState.REGISTERED.value).label("state"),
        literal(now_us).label("created_us"),
        literal(now_us).label("changed_us"),
    ).where(true())  # SQLite would take ON CONFLICT for the condition of a join
    insert = (postgresql if dialect == "postgresql" else sqlite).insert(trigger).from_select(columns, values)
    new = insert.excluded
    anew = or_(
        # One whose host stopped goes on.
        and_(
            trigger.c.state == TriggerState.CANCELLED.value,
            func.coalesce(trigger.c.reason, "").not_in([reason.value for reason in _GOES_ON]),
        ),
        trigger.c.classpath != new.classpath,
        trigger.c.kwargs != new.kwargs,
    )
    statement: Executable = insert.on_conflict_do_update(
        index_elements=[trigger.c.name],
        set_={
            "classpath": new.classpath,
            "kwargs": new.kwargs,
            "restart": new.restart,
            "state": case((anew, new.state), else_=trigger.c.state),
            "reason": case((anew, None), else_=trigger.c.reason),
            "error": case((anew, None), else_=trigger.c.error),
            "made": case((anew, None), else_=trigger.c.made),
            "changed_us": case((anew, new.changed_us), else_=trigger.c.changed_us),
        },
    )
    return statement


def find_triggers(connection: Connection, names: Collection[str]) -> list[TriggerRecord]:
    """Return the triggers of these names, as far as they are known, by id."""
    return sorted(_by_names(connection, names).values(), key=lambda record: record.id)


def _by_names(connection: Connection, names: Collection[str]) -> dict[str, TriggerRecord]:
    dialect = dialect_of(connection)
    given = _NAMES.source(dialect)
    statement = select(trigger).join(given, given.c.name == trigger.c.name)
    rows = connection.execute(statement, _NAMES.parameters(dialect, [(name,) for name in names]))
    return {row.name: _record(row) for row in rows}


def claim_triggers(connection: Connection, ids: Collection[int], owner: str, now_us: int) -> dict[int, int]:
    """Take triggers over and run them: from now on only the holder of the new token may store and report for them.

    Args:
        connection: In a transaction.
        ids: Which.
        owner: Who takes them, for people to read.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        The new token of each; an unknown id has none.
    """
    tokens = {row.id: row.token + 1 for row in lock_triggers(connection, ids)}
    dialect = dialect_of(connection)
    given = _IDS.source(dialect)
    statement = (
        update(trigger)
        .where(trigger.c.id.in_(select(given.c.id)))
        .values(
            token=trigger.c.token + 1,
            owner=owner,
            state=TriggerState.RUNNING.value,
            reason=None,
            changed_us=now_us,
        )
    )
    connection.execute(statement, _IDS.parameters(dialect, [(number,) for number in tokens]))
    return tokens


def lock_triggers(connection: Connection, ids: Collection[int]) -> Sequence[Row[int, int, int]]:
    """Return id, token and next_index of the triggers that exist; nobody changes them before the transaction ends."""
    dialect = dialect_of(connection)
    given = _IDS.source(dialect)
    statement = (
        select(trigger.c.id, trigger.c.token, trigger.c.next_index)
        .where(trigger.c.id.in_(select(given.c.id)))
        .order_by(trigger.c.id)
        # Without effect on SQLite, where the whole transaction is the only one that writes.
        .with_for_update(of=trigger, key_share=True)
    )
    return connection.execute(statement, _IDS.parameters(dialect, [(number,) for number in set(ids)])).all()


def cancel_unlisted(connection: Connection, owner: str, names: Collection[str], now_us: int) -> list[str]:
    """Cancel what an owner would run, and is not to run any more.

    Args:
        connection: In a transaction.
        owner: Whose triggers are looked at.
        names: Those that it is to run.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        The names of those that are cancelled by this, sorted.
    """
    dialect = dialect_of(connection)
    given = _NAMES.source(dialect)
    waiting = or_(
        trigger.c.state == TriggerState.RUNNING.value,
        and_(
            trigger.c.state == TriggerState.CANCELLED.value,
            trigger.c.reason.in_([reason.value for reason in _GOES_ON]),
        ),
    )
    statement = (
        update(trigger)
        .where(and_(trigger.c.owner == owner, waiting, trigger.c.name.not_in(select(given.c.name))))
        .values(state=TriggerState.CANCELLED.value, reason=CancelReason.USER.value, changed_us=now_us)
        .returning(trigger.c.name)
    )
    found = connection.execute(statement, _NAMES.parameters(dialect, [(name,) for name in names]))
    return sorted(row.name for row in found)


def note_made(connection: Connection, made: Mapping[int, str]) -> None:
    """Keep what triggers are made of again, by their ids; see `TriggerRecord.made`."""
    dialect = dialect_of(connection)
    given = _MADE.source(dialect)
    statement = update(trigger).where(trigger.c.id == given.c.id).values(made=given.c.made)
    connection.execute(statement, _MADE.parameters(dialect, list(made.items())))


def mark_trigger(
    connection: Connection,
    trigger_id: int,
    token: int,
    state: TriggerState,
    now_us: int,
    *,
    reason: str | None = None,
    error: str | None = None,
) -> Marked:
    """Report the state of a trigger.

    Args:
        connection: In a transaction.
        trigger_id: Which.
        token: That of the claim under which it runs.
        state: Its new state.
        now_us: The time, in UTC microseconds since the epoch.
        reason: Why it was cancelled.
        error: The traceback it failed with.

    Returns:
        Whether the report was taken; saying the same again is taken too.
    """
    statement = (
        update(trigger)
        .where(and_(trigger.c.id == trigger_id, trigger.c.token == token))
        .values(state=state.value, reason=storable(reason), error=storable(error), changed_us=now_us)
    )
    if connection.execute(statement).rowcount:
        return Marked.MARKED
    known = connection.execute(select(trigger.c.id).where(trigger.c.id == trigger_id)).first()
    return Marked.UNKNOWN if known is None else Marked.FENCED


def list_triggers(
    connection: Connection, *, states: Collection[TriggerState] = (), after: int | None = None, limit: int = 100
) -> Page[TriggerRecord]:
    """Return triggers by id.

    Args:
        connection: Any.
        states: Only those in one of these; none: all.
        after: Begin behind this id (`Page.next`).
        limit: At most so many.
    """
    statement = select(trigger).order_by(trigger.c.id).limit(limit + 1)
    if after is not None:
        statement = statement.where(trigger.c.id > after)
    if states:
        statement = statement.where(trigger.c.state.in_([state.value for state in states]))
    rows = [_record(row) for row in connection.execute(statement)]
    return Page(rows[:limit], rows[limit - 1].id if len(rows) > limit else None)


def count_triggers(connection: Connection) -> dict[TriggerState, int]:
    """Return how many triggers are in each state that any is in."""
    statement = select(trigger.c.state, func.count()).group_by(trigger.c.state)
    return {TriggerState(state): count for state, count in connection.execute(statement)}


def storable(text: str | None) -> str | None:
    """Return a text without what no database takes: NUL characters and lone surrogates.

    Example:
        >>> storable("a\0b")
        'a\\ufffdb'
    """
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def _record(row: Row[Any]) -> TriggerRecord:
    spec = TriggerSpec(row.name, row.classpath, row.kwargs, row.restart)
    state = TriggerState(row.state)
    return TriggerRecord(
        row.id,
        spec,
        state,
        row.reason,
        row.error,
        row.owner,
        row.made,
        row.token,
        row.next_index,
        row.created_us,
        row.changed_us,
    )
