"""Registers, claims, reports and lists triggers.

Invariants: a name keeps its id, event counter and token forever. Tokens only increase. A report with a stale token
changes nothing. Transactions lock the cursors of triggers before their wide rows (`queries.triggers.cursors`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from sqlalchemy import Connection, Executable, Row, Update, and_, case, exists, func, literal, or_, select, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.triggers.lifecycle import CancelReason
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows, build_lock_statement, lock_cursors
from tidemill.store.queries.triggers.sessions import is_session_live
from tidemill.store.records import Page, TriggerRecord, TriggerReport, TriggerReportOutcome, TriggerSpec, TriggerState
from tidemill.store.tables import service_session, trigger, trigger_cursor

#: The reasons of cancelled triggers that continue later or in another process.
_GOES_ON = (CancelReason.SHUTDOWN, CancelReason.HAND_OVER)

_SPECS = RowSet("specs", name=str, classpath=str, kwargs=str, restart=str)
_NAMES = RowSet("names", name=str)
_MADE = RowSet("made", id=int, made=str)
_REPORTS = RowSet("reports", id=int, state=str, reason=str, error=str, changed_us=int)

#: The number of triggers per registration statement in SQLite, which keeps the text of a statement's last parameters in
#: memory.
_PART = 2_500
_NO_SPECS: Mapping[str, TriggerSpec] = {}

_RECORDS = (
    select(trigger, trigger_cursor.c.token, trigger_cursor.c.next_index, service_session.c.host, service_session.c.pid)
    .join(trigger_cursor, trigger_cursor.c.trigger_id == trigger.c.id)
    .outerjoin(
        service_session, and_(service_session.c.id == trigger_cursor.c.session_id, service_session.c.ended_us.is_(None))
    )
)


def register_triggers(
    connection: Connection, specs: Sequence[TriggerSpec], list: str, now_us: int
) -> list[TriggerRecord]:
    """Register triggers.

    A known trigger keeps its state, unless a user cancelled it, or its class or arguments differ and it is a new
    trigger under an old name; then it starts over. Its events and their indexes stay in any case. A transaction that
    does other work with triggers must call this first.

    Args:
        connection: A connection inside a transaction.
        specs: The triggers, with unique names.
        list: The list that they belong to from now on.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        The record of each trigger, in the same order.

    Raises:
        ValueError: A name occurs twice.
    """
    names = [spec.name for spec in specs]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"duplicate trigger names: {', '.join(map(repr, twice))}")
    if not specs:
        return []
    # SQLite has no row locks, so the order across parts does not matter.
    size = len(specs) if find_dialect(connection) == "postgresql" else _PART
    parts = (specs[first : first + size] for first in range(0, len(specs), size))
    return [record for part in parts for record in _register_part(connection, part, list, now_us)]


def _register_part(
    connection: Connection, specs: Sequence[TriggerSpec], list: str, now_us: int
) -> Iterable[TriggerRecord]:
    names = [spec.name for spec in specs]
    dialect = find_dialect(connection)
    rows = sorted((spec.name, spec.classpath, spec.kwargs, spec.restart) for spec in specs)
    given = _SPECS.build_parameters(dialect, rows)
    # Insert new names first, in sorted order, before any trigger is locked: here other transactions wait only for a
    # commit.
    connection.execute(_build_insert(dialect, now_us), given)
    name_rows = _NAMES.build_parameters(dialect, [(name,) for name in names])
    connection.execute(_build_cursor_insert(dialect), name_rows)
    known = select(trigger.c.id).where(trigger.c.name.in_(select(_NAMES.build_source(dialect).c.name)))
    connection.execute(build_lock_statement(known), name_rows)
    connection.execute(_build_registration(dialect, list, now_us), given)
    found = _find_by_names(connection, names, {spec.name: spec for spec in specs})
    return (found[name] for name in names)


def _build_insert(dialect: str, now_us: int) -> Executable:
    given = _SPECS.build_source(dialect)
    columns = ["name", "classpath", "kwargs", "restart", "state", "created_us", "changed_us"]
    values = (
        select(
            given.c.name,
            given.c.classpath,
            given.c.kwargs,
            given.c.restart,
            literal(TriggerState.REGISTERED.value).label("state"),
            literal(now_us).label("created_us"),
            literal(now_us).label("changed_us"),
        )
        # Without this condition a known name would use up an id each time.
        .where(~exists().where(trigger.c.name == given.c.name))
        .order_by(given.c.position)
    )
    return _insert(dialect)(trigger).from_select(columns, values).on_conflict_do_nothing()  # type: ignore[no-any-return]


def _build_cursor_insert(dialect: str) -> Executable:
    missing = (
        select(trigger.c.id, literal(0).label("token"), literal(0).label("next_index"))
        .where(trigger.c.name.in_(select(_NAMES.build_source(dialect).c.name)))
        .where(~exists().where(trigger_cursor.c.trigger_id == trigger.c.id))
        .order_by(trigger.c.id)
    )
    insert = _insert(dialect)(trigger_cursor).from_select(["trigger_id", "token", "next_index"], missing)
    return insert.on_conflict_do_nothing()  # type: ignore[no-any-return]


def _build_registration(dialect: str, list: str, now_us: int) -> Executable:
    given = _SPECS.build_source(dialect)
    starts_over = or_(
        # A trigger whose host stopped continues instead.
        and_(
            trigger.c.state == TriggerState.CANCELLED.value,
            func.coalesce(trigger.c.reason, "").not_in([reason.value for reason in _GOES_ON]),
        ),
        trigger.c.classpath != given.c.classpath,
        trigger.c.kwargs != given.c.kwargs,
    )
    return (
        update(trigger)
        .where(trigger.c.name == given.c.name)
        .values(
            list=list,
            classpath=given.c.classpath,
            kwargs=given.c.kwargs,
            restart=given.c.restart,
            state=case((starts_over, TriggerState.REGISTERED.value), else_=trigger.c.state),
            reason=case((starts_over, None), else_=trigger.c.reason),
            error=case((starts_over, None), else_=trigger.c.error),
            made=case((starts_over, None), else_=trigger.c.made),
            changed_us=case((starts_over, now_us), else_=trigger.c.changed_us),
        )
    )


def find_triggers(connection: Connection, names: Collection[str]) -> list[TriggerRecord]:
    """Return the known triggers among these names, by id."""
    return sorted(_find_by_names(connection, names).values(), key=lambda record: record.id)


def _find_by_names(
    connection: Connection, names: Collection[str], specs: Mapping[str, TriggerSpec] = _NO_SPECS
) -> dict[str, TriggerRecord]:
    """Return the known triggers among these names; `specs`: their definitions, if known, which the records share."""
    dialect = find_dialect(connection)
    statement = _RECORDS.where(trigger.c.name.in_(select(_NAMES.build_source(dialect).c.name)))
    rows = connection.execute(statement, _NAMES.build_parameters(dialect, [(name,) for name in names]))
    return {row.name: _read_record(row, specs.get(row.name)) for row in rows}


def claim_triggers(connection: Connection, ids: Collection[int], session_id: int, now_us: int) -> dict[int, int]:
    """Claim triggers for a session: from now on only the holder of the new token may store events and report states.

    Args:
        connection: A connection inside a transaction.
        ids: The triggers.
        session_id: The session that claims them.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        The new token of each known trigger; empty if the session has ended, because an ended session cannot claim.
    """
    if not is_session_live(connection, session_id):
        return {}
    tokens = {number: counter.token + 1 for number, counter in lock_cursors(connection, ids).items()}
    dialect = find_dialect(connection)
    wanted, given = select(IDS.build_source(dialect).c.id), IDS.build_parameters(dialect, build_id_rows(tokens))
    claimed = (
        update(trigger_cursor)
        .where(trigger_cursor.c.trigger_id.in_(wanted))
        .values(token=trigger_cursor.c.token + 1, session_id=session_id)
    )
    connection.execute(claimed, given)
    running = TriggerState.RUNNING.value
    # The wide row of a trigger that is already running needs no update.
    turned = (
        update(trigger)
        .where(and_(trigger.c.id.in_(wanted), or_(trigger.c.state != running, trigger.c.reason.is_not(None))))
        .values(state=running, reason=None, changed_us=now_us)
    )
    connection.execute(turned, given)
    return tokens


def cancel_unlisted(connection: Connection, list: str, names: Collection[str], now_us: int) -> list[str]:
    """Cancel the active triggers of a list that are no longer in the list.

    Args:
        connection: A connection inside a transaction.
        list: The list that they belong to.
        names: The triggers that are still in the list.
        now_us: The time, in UTC microseconds since the epoch.

    Returns:
        The names of the cancelled triggers, sorted.
    """
    dialect = find_dialect(connection)
    listed = select(_NAMES.build_source(dialect).c.name)
    goes_on = [reason.value for reason in _GOES_ON]
    gone = and_(
        trigger.c.list == list,
        or_(
            trigger.c.state == TriggerState.RUNNING.value,
            and_(trigger.c.state == TriggerState.CANCELLED.value, trigger.c.reason.in_(goes_on)),
        ),
    )
    unlisted = select(trigger.c.id).where(and_(gone, trigger.c.name.not_in(listed)))
    found = connection.execute(unlisted, _NAMES.build_parameters(dialect, [(name,) for name in names])).scalars()
    ids = IDS.build_parameters(dialect, build_id_rows(lock_cursors(connection, found.all())))
    wanted = select(IDS.build_source(dialect).c.id)
    statement = (
        update(trigger)
        # Check again, because the triggers were not locked when they were found.
        .where(and_(trigger.c.id.in_(wanted), gone))
        .values(state=TriggerState.CANCELLED.value, reason=CancelReason.USER.value, changed_us=now_us)
        .returning(trigger.c.name)
    )
    return sorted(row.name for row in connection.execute(statement, ids))


def release_names(connection: Connection, list: str, names: Collection[str]) -> None:
    """Release triggers that a list no longer has, so that other lists can use their names.

    Args:
        connection: A connection inside a transaction.
        list: The list that they belong to.
        names: The triggers that are still in the list.
    """
    dialect = find_dialect(connection)
    unlisted = trigger.c.name.not_in(select(_NAMES.build_source(dialect).c.name))
    given = _NAMES.build_parameters(dialect, [(name,) for name in names])
    found = connection.execute(select(trigger.c.id).where(and_(trigger.c.list == list, unlisted)), given).scalars()
    ids = IDS.build_parameters(dialect, build_id_rows(lock_cursors(connection, found.all())))
    wanted = and_(trigger.c.id.in_(select(IDS.build_source(dialect).c.id)), trigger.c.list == list)
    connection.execute(update(trigger).where(wanted).values(list=None), ids)


def store_serialized(connection: Connection, serialized: Mapping[int, str]) -> None:
    """Store the texts from which triggers are re-created after a failure, by id; see `TriggerRecord.serialized`."""
    lock_cursors(connection, serialized)
    dialect = find_dialect(connection)
    connection.execute(_build_made_update(dialect), _MADE.build_parameters(dialect, sorted(serialized.items())))


@cache
def _build_made_update(dialect: str) -> Update:
    given = _MADE.build_source(dialect)
    return update(trigger).where(trigger.c.id == given.c.id).values(made=given.c.made)


def report_triggers(connection: Connection, reports: Sequence[TriggerReport]) -> dict[int, TriggerReportOutcome]:
    """Store the states of triggers.

    Args:
        connection: A connection inside a transaction.
        reports: The reports, in order; per trigger, the last report with the current token counts.

    Returns:
        The outcome per trigger id; repeating a report is accepted.
    """
    counters = lock_cursors(connection, {report.trigger_id for report in reports})
    outcomes: dict[int, TriggerReportOutcome] = {}
    last: dict[int, TriggerReport] = {}
    for report in reports:
        number = report.trigger_id
        counter = counters.get(number)
        if counter is not None and counter.token == report.token:
            last[number] = report
            outcomes[number] = TriggerReportOutcome.MARKED
        else:
            outcomes.setdefault(
                number, TriggerReportOutcome.UNKNOWN if counter is None else TriggerReportOutcome.FENCED
            )
    if last:
        dialect = find_dialect(connection)
        rows = [
            (number, one.state.value, make_storable(one.reason), make_storable(one.error), one.now_us)
            for number, one in sorted(last.items())
        ]
        connection.execute(_build_report_update(dialect), _REPORTS.build_parameters(dialect, rows))
    return outcomes


@cache
def _build_report_update(dialect: str) -> Update:
    given = _REPORTS.build_source(dialect)
    names = ("state", "reason", "error", "changed_us")
    return update(trigger).where(trigger.c.id == given.c.id).values({name: given.c[name] for name in names})


def list_triggers(
    connection: Connection, *, states: Collection[TriggerState] = (), after: int | None = None, limit: int = 100
) -> Page[TriggerRecord]:
    """Return triggers by id.

    Args:
        connection: A connection inside any transaction.
        states: Only triggers in one of these states; empty: all.
        after: Start after this id (`Page.next`).
        limit: The maximum number of triggers.
    """
    statement = _RECORDS.order_by(trigger.c.id).limit(limit + 1)
    if after is not None:
        statement = statement.where(trigger.c.id > after)
    if states:
        statement = statement.where(trigger.c.state.in_([state.value for state in states]))
    rows = [_read_record(row) for row in connection.execute(statement)]
    return Page(rows[:limit], rows[limit - 1].id if len(rows) > limit else None)


def count_triggers(connection: Connection) -> dict[TriggerState, int]:
    """Return the number of triggers per state."""
    statement = select(trigger.c.state, func.count()).group_by(trigger.c.state)
    return {TriggerState(state): count for state, count in connection.execute(statement)}


def make_storable(text: str | None) -> str | None:
    r"""Replace characters that databases reject: NUL characters and lone surrogates.

    Example:
        >>> make_storable("a\0b")
        'a�b'
    """
    if text is None or (text.isascii() and "\0" not in text):
        return text
    return text.encode("utf-8", "replace").decode().replace("\0", "\ufffd")


def name_trigger(number: int, name: str | None) -> str:
    """Return the display name of a trigger; a deferred task's trigger has no name of its own."""
    return f"#{number}" if name is None else name


def _read_record(row: Row[Any], spec: TriggerSpec | None = None) -> TriggerRecord:
    if spec is None:
        spec = TriggerSpec(name_trigger(row.id, row.name), row.classpath, row.kwargs, row.restart)
    state = TriggerState(row.state)
    return TriggerRecord(
        row.id,
        spec,
        state,
        row.reason,
        row.error,
        row.list,
        None if row.host is None else f"{row.host}, process {row.pid}",
        row.made,
        row.token,
        row.next_index,
        row.created_us,
        row.changed_us,
    )


def _insert(dialect: str) -> Any:
    return postgresql.insert if dialect == "postgresql" else sqlite.insert
