"""The tables, as SQLAlchemy Core describes them; what they hold is made by `migrations`, in the same words.

Invariants: times are UTC microseconds since the epoch (SQLite has no time zones); JSON is text, so that it comes back
as it was given, and no database's idea of JSON refuses it.
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
HEAD = "0001"
#: Not alembic's own name: the database may be shared with another program that uses alembic.
VERSION_TABLE = "tidemill_version"

metadata = MetaData()

_Id = BigInteger().with_variant(Integer, "sqlite")

#: One row per trigger that was ever registered, by its stable name.
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
    Column("owner", Text),
    Column("made", Text),
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    Column("next_index", BigInteger, nullable=False, server_default=text("0")),
    Column("created_us", BigInteger, nullable=False),
    Column("changed_us", BigInteger, nullable=False),
)

#: One row per event that a trigger fired. `id` orders all events of a store, `sequence_index` those of a trigger.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", _Id, primary_key=True),
    Column("trigger_id", _Id, ForeignKey("trigger.id"), nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("identity", Text),
    Column("payload", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("trigger_id", "sequence_index", name="uq_trigger_event_sequence"),
)

Index(
    "uq_trigger_event_identity",
    trigger_event.c.trigger_id,
    trigger_event.c.identity,
    unique=True,
    postgresql_where=trigger_event.c.identity.is_not(None),
    sqlite_where=trigger_event.c.identity.is_not(None),
)
