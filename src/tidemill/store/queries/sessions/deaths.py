"""Counts the deaths of triggers: losses of sessions that ran them; `core.triggers.lost_hosts` says what follows.

Invariants: a death is counted in the transaction that releases the trigger from the lost session, so that no service
claims it before. Triggers that were only reserved, and those of sessions that stopped in order, have no death.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Connection, and_, case, delete, exists, literal_column, or_, select, text, true, update
from sqlalchemy.dialects import postgresql, sqlite

from tidemill.core.triggers.lost_hosts import FORGET_US, SUSPECT_LOSSES, LostTrial, find_alone
from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.calls.trigger_calls import ClearDeaths
from tidemill.store.context import CallContext
from tidemill.store.queries.triggers.cursors import IDS, build_id_rows
from tidemill.store.tables import trigger, trigger_death

_DEATH = trigger_death.c
_COUNTED = RowSet("counted", id=int, alone=int, lived_us=int, at_us=int)


class LostSession(NamedTuple):
    """A session whose loss counts as a death.

    `trial`: whether it only ran suspects; `began_us`, `beat_us`: when it began, and when it was last alive.
    """

    id: int
    parent: int | None
    trial: bool
    began_us: int
    beat_us: int


class HeldTrigger(NamedTuple):
    """A trigger that a session owns since a time. `claim_request`: None if it is only reserved for the session."""

    id: int
    session: int
    claim_request: int | None
    since_us: int


def count_deaths(
    connection: Connection, sessions: Sequence[LostSession], held: Sequence[HeldTrigger], now_us: int
) -> None:
    """Count a death for the triggers that lost sessions ran."""
    lost = {one.id: one for one in sessions}
    running = [one for one in held if one.session in lost and one.claim_request is not None]
    if not running:
        return
    trials = [
        LostTrial(one.parent, [each.id for each in running if each.session == one.id]) for one in sessions if one.trial
    ]
    alone = find_alone(trials)
    rows = [(one.id, int(one.id in alone), _count_lived(one, lost[one.session]), now_us) for one in running]
    dialect = find_dialect(connection)
    given = _COUNTED.build_source(dialect)
    # SQLite needs the WHERE clause; without it, it parses ON CONFLICT as a join condition.
    values = select(given.c.id, 1, given.c.alone, given.c.lived_us, given.c.at_us).where(true())
    columns = ["trigger_id", "deaths", "alone", "lived_us", "at_us"]
    insertion: Any = (postgresql.insert if dialect == "postgresql" else sqlite.insert)(trigger_death)
    insertion = insertion.from_select(columns, values)
    new = insertion.excluded
    is_old = _DEATH.at_us < now_us - FORGET_US
    counted = {
        "deaths": case((is_old, 1), else_=_DEATH.deaths + 1),
        "alone": case((is_old, new.alone), else_=_DEATH.alone + new.alone),
        # Another trigger may have ended it earlier than this one would have: the trial must last long enough.
        "lived_us": case((or_(is_old, _DEATH.lived_us < new.lived_us), new.lived_us), else_=_DEATH.lived_us),
        "at_us": new.at_us,
    }
    statement = insertion.on_conflict_do_update(index_elements=["trigger_id"], set_=counted)
    connection.execute(statement, _COUNTED.build_parameters(dialect, sorted(rows)))


def _count_lived(one: HeldTrigger, session: LostSession) -> int:
    """Return how long a lost session had run a trigger."""
    return max(0, session.beat_us - max(session.began_us, one.since_us))


def forget_deaths(connection: Connection, now_us: int) -> None:
    """Forget deaths that are too old to count, and those of suspects that have ended."""
    connection.execute(delete(trigger_death).where(_DEATH.at_us < now_us - FORGET_US))
    # Each claim and each look for trials reads the suspects. Literals, so that the partial index of suspects applies.
    alive = and_(trigger.c.id == _DEATH.trigger_id, text("trigger.state IN ('registered', 'running')"))
    is_suspect = _DEATH.deaths >= literal_column(str(SUSPECT_LOSSES))
    connection.execute(delete(trigger_death).where(and_(is_suspect, ~exists(select(trigger.c.id).where(alive)))))


def clear_deaths(connection: Connection, request: ClearDeaths, context: CallContext) -> int:
    """Set the number of deaths of triggers; see `ClearDeaths`."""
    dialect = find_dialect(connection)
    given = IDS.build_parameters(dialect, build_id_rows(request.triggers))
    wanted = and_(_DEATH.trigger_id.in_(select(IDS.build_source(dialect).c.id)), _DEATH.deaths >= request.deaths)
    if not request.deaths:
        return connection.execute(delete(trigger_death).where(wanted), given).rowcount
    new = {"deaths": request.deaths, "alone": 0}
    return connection.execute(update(trigger_death).where(wanted).values(new), given).rowcount
