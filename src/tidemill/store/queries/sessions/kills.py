"""Has `on_kill` of a trigger called that a user stopped: by its triggerer, or by another one once that is gone.

Theory of operation. Stopping a trigger that has run stores a row in `task_callback`. It belongs to the session that
runs the trigger, which calls `on_kill` and says so when it releases the trigger. If no session runs it, or that session
ends before it has said so, any triggerer claims the row, and calls `on_kill` of a new instance. If a process dies while
it has the row, `on_kill` may have killed it: then it is called in a process of its own, and not for ever
(`core.triggers.lost_hosts.choose_kills`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import ColumnElement, Connection, Select, and_, literal_column, select, tuple_, update

from tidemill.core.tasks.inputs import Channel
from tidemill.core.triggers.lost_hosts import choose_kills
from tidemill.store.batches import find_dialect
from tidemill.store.calls.trigger_calls import ClaimTriggers, KillCalled
from tidemill.store.context import CallContext
from tidemill.store.dag_tables import task_callback
from tidemill.store.queries.dags.state.effects import ON_KILL
from tidemill.store.queries.sessions.services import check_session
from tidemill.store.queries.sessions.unreadable_triggers import find_unreadable
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.queries.triggers.triggers import make_storable
from tidemill.store.tables import trigger

_CALLBACK = task_callback.c
#: The number of kills per claim.
_KILLS = 100
#: The same for a process that makes only such calls.
_TRIAL_KILLS = 1_000
#: How often a claim looks for others in place of those that cannot be decrypted.
_LOOKS = 20


def claim_kills(
    connection: Connection, request: ClaimTriggers, context: CallContext, *, is_trial: bool
) -> dict[int, int]:
    """Claim stopped triggers whose `on_kill` must be called; return their callbacks by trigger.

    Those whose arguments cannot be decrypted stay for a triggerer that has their key.

    Args:
        connection: A connection inside a transaction.
        request: The claim.
        context: The transaction's context.
        is_trial: Whether the session only calls `on_kill` of triggers that may kill it; others leave these alone.
    """
    mine = and_(_CALLBACK.session_id == request.session, _CALLBACK.claim_request == request.request)
    running = and_(_CALLBACK.name == ON_KILL, _CALLBACK.state == "running")
    again = and_(mine, running)
    calling = select(_CALLBACK.id).where(and_(_CALLBACK.session_id == request.session, running)).limit(1)
    found: tuple[int, ...] = ()
    # A process makes the calls of one choice: those of another one would be lost with it.
    if not is_trial:
        found = tuple(_lock_readable(connection, request, context, is_trial=False))
    elif connection.execute(calling).first() is None:
        found = choose_kills(_lock_readable(connection, request, context, is_trial=True))
    if found:
        new = {"state": "running", "session_id": request.session, "claim_request": request.request}
        connection.execute(update(task_callback).where(_CALLBACK.id.in_(found)).values(new))
    statement: Select[Any] = (
        select(trigger.c.id, _CALLBACK.id)
        .join(trigger, and_(trigger.c.task_id == _CALLBACK.task, trigger.c.epoch == _CALLBACK.epoch))
        .where(again)
    )
    return {row[0]: row[1] for row in connection.execute(statement)}


def _build_due(queues: Collection[str], *, is_trial: bool) -> ColumnElement[bool]:
    # A literal, so that the partial index applies.
    due = [_CALLBACK.state == literal_column("'kill'"), _CALLBACK.lost > 0 if is_trial else _CALLBACK.lost == 0]
    if queues:
        due.append(_CALLBACK.queue.in_(queues))
    return and_(*due)


def has_fatal_kills(connection: Connection, queues: Collection[str], context: CallContext) -> bool:
    """Return whether this host can call `on_kill` of a trigger that may kill the process that calls it."""
    rows = connection.execute(_select_due(queues, is_trial=True).limit(_TRIAL_KILLS)).all()
    # Otherwise a process would be started again and again that finds nothing to call.
    return len(rows) == _TRIAL_KILLS or len(find_unreadable(rows, context)) < len(rows)


def _select_due(queues: Collection[str], *, is_trial: bool) -> Select[Any]:
    return (
        select(trigger.c.id, trigger.c.kwargs, _CALLBACK.id.label("callback"), _CALLBACK.lost)
        .join(trigger, and_(trigger.c.task_id == _CALLBACK.task, trigger.c.epoch == _CALLBACK.epoch))
        .where(_build_due(queues, is_trial=is_trial))
        .order_by(_CALLBACK.queue, _CALLBACK.id)
    )


def _lock_readable(
    connection: Connection, request: ClaimTriggers, context: CallContext, *, is_trial: bool
) -> dict[int, int]:
    """Lock the kills that wait and whose arguments can be decrypted, up to the number of a claim.

    Returns:
        How many processes were lost during each.
    """
    most = _TRIAL_KILLS if is_trial else _KILLS
    due = _select_due(request.queues, is_trial=is_trial)
    statement = due.with_for_update(of=task_callback, skip_locked=True)
    found: dict[int, int] = {}
    skip: list[int] = []
    for _ in range(_LOOKS):
        free = statement.where(_CALLBACK.id.not_in(skip)) if skip else statement
        rows = connection.execute(free.limit(most - len(found))).all()
        unreadable = set(find_unreadable(rows, context))
        found |= {row.callback: row.lost for row in rows if row.id not in unreadable}
        if not unreadable or len(found) >= most:
            break
        skip += [row.callback for row in rows]
    return found


def settle_kills(
    connection: Connection, session: int, triggers: Collection[int], killed: Collection[int], context: CallContext
) -> None:
    """Record which stopped triggers need no `on_kill` any more; other sessions call it for the rest."""
    dialect = find_dialect(connection)
    for numbers, state in (
        ([one for one in triggers if one in killed], "done"),
        ([one for one in triggers if one not in killed], "kill"),
    ):
        if not numbers:
            continue
        given = IDS.build_parameters(dialect, build_id_rows(numbers))
        named: Select[int | None, int | None] = select(trigger.c.task_id, trigger.c.epoch).where(
            trigger.c.id.in_(select(IDS.build_source(dialect).c.id))
        )
        mine = and_(
            _CALLBACK.session_id == session,
            _CALLBACK.state == "running",
            _CALLBACK.name == ON_KILL,
            tuple_(_CALLBACK.task, _CALLBACK.epoch).in_(named),
        )
        new = {
            "state": state,
            "session_id": None,
            "claim_request": None,
            "ended_us": context.now_us if state == "done" else None,
        }
        if connection.execute(update(task_callback).where(mine).values(new), given).rowcount and state == "kill":
            context.bells.add(Channel.TRIGGERER)


def note_kill(connection: Connection, request: KillCalled, context: CallContext) -> bool:
    """Record that `on_kill` was called; see `KillCalled`."""
    check_session(connection, request.session)
    mine = and_(_CALLBACK.id == request.kill, _CALLBACK.session_id == request.session, _CALLBACK.state == "running")
    new = {
        "state": "done" if request.error is None else "failed",
        "error": make_storable(request.error),
        "ended_us": context.now_us,
        "session_id": None,
    }
    return connection.execute(update(task_callback).where(mine).values(new)).rowcount > 0
