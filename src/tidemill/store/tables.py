"""The tables, as SQLAlchemy Core describes them; `migrations` creates the same tables.

Invariants: times are UTC microseconds since the epoch (SQLite has no time zones); JSON is stored as text, so that it is
read exactly as it was written, and is not refused by a database with other rules for JSON.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)

#: The revision that this program reads and writes; the last one in `migrations/versions`.
HEAD = "0002"
#: Not alembic's default name: the database may be shared with another program that uses alembic.
VERSION_TABLE = "tidemill_version"

metadata = MetaData()

_Id = BigInteger().with_variant(Integer, "sqlite")

#: One row per start of a trigger host. `beat` rises while it is alive; once `ended_us` is set, the session stays dead.
session = Table(
    "session",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("list", Text, nullable=False),
    Column("lock", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("beat", BigInteger, nullable=False, server_default=text("0")),
    Column("started_us", BigInteger, nullable=False),
    Column("beat_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger),
    Column("ended_by", _Id),
    # Ids are never reused: what a dead session held must not become another session's.
    sqlite_autoincrement=True,
)

Index(
    "ix_session_live",
    session.c.kind,
    postgresql_where=session.c.ended_us.is_(None),
    sqlite_where=session.c.ended_us.is_(None),
)

#: One row per list of triggers: the session that runs it.
trigger_list = Table(
    "trigger_list",
    metadata,
    Column("name", Text, primary_key=True),
    Column("session_id", _Id, ForeignKey("session.id")),
)

#: The upstreams that only one live list may read, by the session that reads them.
list_claim = Table(
    "list_claim",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("session_id", _Id, ForeignKey("session.id"), primary_key=True, autoincrement=False),
)

Index("ix_list_claim_session", list_claim.c.session_id)

#: One row per trigger that was ever registered, by its stable name. Wide, and written only when its state changes.
trigger = Table(
    "trigger",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("classpath", Text, nullable=False),
    Column("kwargs", Text, nullable=False),
    Column("restart", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("reason", Text),
    Column("error", Text),
    Column("made", Text),
    Column("created_us", BigInteger, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
    Column("list", Text),
)

Index("ix_trigger_list_state", trigger.c.list, trigger.c.state)

#: One narrow row per trigger: which claim may store events for it, and the number of its next event. It is locked
#: before any other row of the trigger, and written with every batch of events.
trigger_cursor = Table(
    "trigger_cursor",
    metadata,
    Column("trigger_id", _Id, ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    Column("next_index", BigInteger, nullable=False, server_default=text("0")),
    Column("session_id", _Id),
)

#: Covers the query that a session makes with each beat.
Index("ix_trigger_cursor_session", trigger_cursor.c.session_id, trigger_cursor.c.token)

#: One row per event that a trigger fired. `id` orders all events of a store, `sequence_index` those of a trigger.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", _Id, primary_key=True),
    # Refers to the cursor's row, which is locked already; a reference to `trigger` would lock the wide row as well.
    Column("trigger_id", _Id, ForeignKey("trigger_cursor.trigger_id"), nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("identity", Text),
    Column("payload", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("trigger_id", "sequence_index", name="uq_trigger_event_sequence"),
    # Ids of events that retention has removed are not reused: pages continue after them.
    sqlite_autoincrement=True,
)

Index("ix_trigger_event_created", trigger_event.c.created_us)

#: One row per identity of an event; kept for as long as repetitions are to be recognised, which may be longer than the
#: event itself.
trigger_identity = Table(
    "trigger_identity",
    metadata,
    Column("trigger_id", _Id, primary_key=True, autoincrement=False),
    Column("identity", Text, primary_key=True),
    Column("sequence_index", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

Index("ix_trigger_identity_created", trigger_identity.c.created_us)
