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
HEAD = "0008"
#: Not alembic's default name: the database may be shared with another program that uses alembic.
VERSION_TABLE = "tidemill_version"

metadata = MetaData()

#: A number that the database gives.
Id = BigInteger().with_variant(Integer, "sqlite")

#: One row per start of a service: a session, whose number is never used again. `beat` rises while it is alive; once
#: `ended_us` is set, it stays dead. `list`, `lock` and `digest` are those of hosts that run a list of triggers;
#: `events_request` and `events_answer` are what `StoreEvents` said last.
service = Table(
    "service",
    metadata,
    Column("id", Id, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("host", Text, nullable=False),
    Column("boot_id", Text, nullable=False),
    Column("pid", BigInteger, nullable=False),
    Column("list", Text, nullable=False),
    Column("lock", Text, nullable=False),
    Column("digest", Text, nullable=False),
    Column("queues", Text, nullable=False, server_default=text("'[]'")),
    Column("capacity", BigInteger, nullable=False, server_default=text("0")),
    Column("events_request", BigInteger),
    Column("events_answer", Text),
    Column("beat", BigInteger, nullable=False, server_default=text("0")),
    Column("started_us", BigInteger, nullable=False),
    Column("beat_us", BigInteger, nullable=False),
    Column("ended_us", BigInteger),
    Column("ended_by", Id),
    # Ids are never reused: what a dead session held must not become another session's.
    sqlite_autoincrement=True,
)

Index(
    "ix_service_live",
    service.c.id,
    postgresql_where=service.c.ended_us.is_(None),
    sqlite_where=service.c.ended_us.is_(None),
)

#: One row per list of triggers: the session that runs it.
trigger_list = Table(
    "trigger_list",
    metadata,
    Column("name", Text, primary_key=True),
    Column("session_id", Id, ForeignKey("service.id")),
)

#: The upstreams that only one live list may read, by the session that reads them.
list_claim = Table(
    "list_claim",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("session_id", Id, ForeignKey("service.id"), primary_key=True, autoincrement=False),
)

Index("ix_list_claim_session", list_claim.c.session_id)

#: One row per trigger that was ever registered, by its stable name, or made by a deferred task, which gives it no name.
#: Wide, and written only when its state changes. `epoch`: that of the task, in whose name its first event speaks;
#: `stream_key`: all triggers with the same one are run by the same service.
trigger = Table(
    "trigger",
    metadata,
    Column("id", Id, primary_key=True),
    Column("name", Text, unique=True),
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
    Column("task_id", Id),
    Column("epoch", BigInteger),
    Column("queue", Text),
    Column("priority", BigInteger),
    Column("stream_key", Text),
)

Index("ix_trigger_list_state", trigger.c.list, trigger.c.state)

for _name, _columns, _where in (
    ("ix_trigger_task", (trigger.c.task_id,), "task_id IS NOT NULL"),
    ("ix_trigger_free", (trigger.c.priority, trigger.c.id), "task_id IS NOT NULL AND state = 'registered'"),
    ("ix_trigger_stream", (trigger.c.stream_key,), "stream_key IS NOT NULL AND state = 'running'"),
):
    Index(_name, *_columns, postgresql_where=text(_where), sqlite_where=text(_where))

#: One narrow row per trigger: which claim may store events for it, and the number of its next event. It is locked
#: before any other row of the trigger, and written with every batch of events.
trigger_cursor = Table(
    "trigger_cursor",
    metadata,
    Column("trigger_id", Id, ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    Column("next_index", BigInteger, nullable=False, server_default=text("0")),
    Column("session_id", Id),
    Column("claim_request", BigInteger),
)

#: Covers the query that a session makes with each beat.
Index("ix_trigger_cursor_session", trigger_cursor.c.session_id, trigger_cursor.c.token)

#: One row per event that a trigger fired. `id` orders all events of a store, `sequence_index` those of a trigger.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", Id, primary_key=True),
    # Refers to the cursor's row, which is locked already; a reference to `trigger` would lock the wide row as well.
    Column("trigger_id", Id, ForeignKey("trigger_cursor.trigger_id"), nullable=False),
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
    Column("trigger_id", Id, primary_key=True, autoincrement=False),
    Column("identity", Text, primary_key=True),
    Column("sequence_index", BigInteger, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    sqlite_with_rowid=False,
)

Index("ix_trigger_identity_created", trigger_identity.c.created_us)
