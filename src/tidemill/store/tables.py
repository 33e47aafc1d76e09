"""The tables in SQLAlchemy Core; `migrations` creates the same tables.

Invariants: times are UTC microseconds since the epoch, because SQLite has no time zones. JSON is stored as text, so
that it is read back exactly as written and no database rejects it under its own JSON rules.
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
HEAD = "0024"
#: Not alembic's default name, because another program that uses alembic may share the database.
VERSION_TABLE = "tidemill_version"

metadata = MetaData()

#: An id assigned by the database.
Id = BigInteger().with_variant(Integer, "sqlite")

#: One row per service session, that is, per start of a service. `beat` increases with each heartbeat; a session whose
#: `ended_us` is set stays ended. `parent`: the session of the process that supervises the service. `list`, `lock` and
#: `digest` are set by hosts of trigger lists; `events_request` and `events_answer` hold the last `StoreEvents` call and
#: its answer. `request`: the `BeginSession` call that began it. `stopping`: 1 once the service stops in order. `lost`:
#: 1 if it ended without stopping, which counts as a death of its triggers. `trial`: 1 if it only runs suspects. `held`:
#: how many triggers it ran at its last heartbeat or claim.
service_session = Table(
    "service_session",
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
    Column("parent", Id),
    Column("version", Text, nullable=False, server_default=text("''")),
    Column("request", Text),
    Column("stopping", BigInteger, nullable=False, server_default=text("0")),
    Column("lost", BigInteger, nullable=False, server_default=text("0")),
    Column("trial", BigInteger, nullable=False, server_default=text("0")),
    Column("held", BigInteger, nullable=False, server_default=text("0")),
    # Ids are never reused: a new session must not inherit the claims of a dead one.
    sqlite_autoincrement=True,
)

Index(
    "ix_service_session_live",
    service_session.c.id,
    postgresql_where=service_session.c.ended_us.is_(None),
    sqlite_where=service_session.c.ended_us.is_(None),
)
Index(
    "ix_service_session_request",
    service_session.c.request,
    unique=True,
    postgresql_where=service_session.c.request.is_not(None),
    sqlite_where=service_session.c.request.is_not(None),
)

#: One row per trigger list: the session that runs it.
trigger_list = Table(
    "trigger_list",
    metadata,
    Column("name", Text, primary_key=True),
    Column("session_id", Id, ForeignKey("service_session.id")),
)

#: The upstreams that only one live list may read, with the session that reads them.
list_claim = Table(
    "list_claim",
    metadata,
    Column("claim", Text, primary_key=True),
    Column("session_id", Id, ForeignKey("service_session.id"), primary_key=True, autoincrement=False),
)

Index("ix_list_claim_session", list_claim.c.session_id)

#: One row per trigger that was ever registered: by a list under its stable name, or by a deferred task without a name.
#: The row is wide and written only when the state changes. `epoch`: the epoch of the deferred task, which the first
#: event resumes; `stream_key`: triggers with the same key run in the same service.
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
    #: For a trigger that starts its task: 1 if texts in its arguments are templates, else 0.
    Column("starts", BigInteger),
)

Index("ix_trigger_list_state", trigger.c.list, trigger.c.state)

for _name, _columns, _where in (
    ("ix_trigger_task", (trigger.c.task_id,), "task_id IS NOT NULL"),
    ("ix_trigger_free", (trigger.c.priority, trigger.c.id), "task_id IS NOT NULL AND state = 'registered'"),
    ("ix_trigger_stream", (trigger.c.stream_key,), "stream_key IS NOT NULL AND state = 'running'"),
    ("ix_trigger_stream_waiting", (trigger.c.stream_key,), "stream_key IS NOT NULL AND state = 'registered'"),
):
    Index(_name, *_columns, postgresql_where=text(_where), sqlite_where=text(_where))

#: One narrow row per trigger: the claim that may store its events, and the index of its next event. Transactions lock
#: it before any other row of the trigger and update it with every batch of events. `moved_us`: when a triggerer last
#: handed it over to another one.
trigger_cursor = Table(
    "trigger_cursor",
    metadata,
    Column("trigger_id", Id, ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
    Column("token", BigInteger, nullable=False, server_default=text("0")),
    Column("next_index", BigInteger, nullable=False, server_default=text("0")),
    Column("session_id", Id),
    Column("claim_request", BigInteger),
    Column("moved_us", BigInteger),
)

#: Covers the query that a session runs with each heartbeat.
Index("ix_trigger_cursor_session", trigger_cursor.c.session_id, trigger_cursor.c.token)

#: One row per trigger that ran in a session that was lost; see `core.triggers.lost_hosts`. `alone`: how many of these
#: deaths were of trials in which it was alone; `lived_us`: how long one of these sessions had run it at most; `at_us`:
#: when the last one died.
trigger_death = Table(
    "trigger_death",
    metadata,
    Column("trigger_id", Id, primary_key=True, autoincrement=False),
    Column("deaths", BigInteger, nullable=False),
    Column("alone", BigInteger, nullable=False, server_default=text("0")),
    Column("lived_us", BigInteger, nullable=False),
    Column("at_us", BigInteger, nullable=False),
)
Index("ix_trigger_death_at", trigger_death.c.at_us)
Index(
    "ix_trigger_death_suspect",
    trigger_death.c.at_us,
    sqlite_where=text("deaths >= 2"),
    postgresql_where=text("deaths >= 2"),
)

#: One row per trigger of a task that streams its events into attempts. `handled`: the number of events that were
#: handled; `kept`: the number of batches that attempts have kept; `ended_us`, `error`: its end; `ready`: 1 if its task
#: waits and the scheduler has to resume it, 2 if it has to do that once a map over the task has room; `room_at`: the
#: number of undelivered events at which its trigger goes on, if it waits; `held`: 1 if the backlog of a map over the
#: task was full when the last elements were emitted; `ends_at`, `ending`: the index and content of the event that ends
#: the task; `feeds`: 1 if its events are elements of maps and no attempt takes them, 2 if it may also have none;
#: `acked`: 1 if its events were acknowledged upstream, so only the store can deliver them again; `carried`: the number
#: of such events of earlier streams of the task that are delivered first; `discarded`, `discarded_for`: how many events
#: were never handled although they count as handled, and why; `final`: 1 if what the task emitted at the end of the
#: stream is stored.
trigger_stream = Table(
    "trigger_stream",
    metadata,
    Column("trigger_id", Id, ForeignKey("trigger_cursor.trigger_id"), primary_key=True, autoincrement=False),
    Column("task", Id, nullable=False),
    Column("handled", BigInteger, nullable=False, server_default=text("0")),
    Column("kept", BigInteger, nullable=False, server_default=text("0")),
    Column("ready", BigInteger, nullable=False, server_default=text("0")),
    Column("ended_us", BigInteger),
    Column("error", Text),
    Column("checkpoint", Text),
    Column("room_at", BigInteger),
    Column("held", BigInteger, nullable=False, server_default=text("0")),
    Column("ends_at", BigInteger),
    Column("ending", Text),
    Column("feeds", BigInteger, nullable=False, server_default=text("0")),
    Column("acked", BigInteger, nullable=False, server_default=text("0")),
    Column("carried", BigInteger, nullable=False, server_default=text("0")),
    Column("discarded", BigInteger, nullable=False, server_default=text("0")),
    Column("discarded_for", Text),
    Column("final", BigInteger, nullable=False, server_default=text("0")),
)
Index(
    "ix_trigger_stream_ready",
    trigger_stream.c.trigger_id,
    postgresql_where=text("ready = 1"),
    sqlite_where=text("ready = 1"),
)
Index(
    "ix_trigger_stream_held",
    trigger_stream.c.trigger_id,
    postgresql_where=text("ready = 2"),
    sqlite_where=text("ready = 2"),
)
Index("ix_trigger_stream_task", trigger_stream.c.task)

#: One row per event. `id` orders all events of a store, `sequence_index` the events of one trigger.
trigger_event = Table(
    "trigger_event",
    metadata,
    Column("id", Id, primary_key=True),
    # References the cursor's row, which is locked already; a reference to `trigger` would also lock the wide row.
    Column("trigger_id", Id, ForeignKey("trigger_cursor.trigger_id"), nullable=False),
    Column("sequence_index", BigInteger, nullable=False),
    Column("identity", Text),
    Column("payload", Text, nullable=False),
    Column("created_us", BigInteger, nullable=False),
    UniqueConstraint("trigger_id", "sequence_index", name="uq_trigger_event_sequence"),
    # Ids of events removed by retention are not reused, because keyset pages continue after them.
    sqlite_autoincrement=True,
)

Index("ix_trigger_event_created", trigger_event.c.created_us)

#: One row per identity of an event; kept as long as repeated events must be recognised, which may be longer than the
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

#: At most one row, with the id 1: a text that every service must be able to decrypt.
key_check = Table(
    "key_check",
    metadata,
    Column("id", BigInteger, primary_key=True, autoincrement=False),
    Column("value", Text, nullable=False),
)
