"""Adds DAGs, runs, tasks and their data; sessions become services; triggers may belong to deferred tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_NUMBER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_TRIGGER_COLUMNS = (
    "id, name, classpath, kwargs, restart, state, reason, error, made, created_us, changed_us, list"  # as in 0002
)


def upgrade() -> None:
    """Create the tables for DAGs, and extend the tables of services and triggers."""
    _rename_sessions()
    if op.get_bind().dialect.name == "postgresql":
        op.alter_column("trigger", "name", nullable=True)
        for column in _build_task_columns():
            op.add_column("trigger", column)
    else:
        _rebuild_triggers()
    op.add_column("trigger_cursor", sa.Column("claim_request", sa.BigInteger()))
    _create_index("ix_trigger_task", "trigger", ["task_id"], "task_id IS NOT NULL")
    _create_index("ix_trigger_free", "trigger", ["priority", "id"], "task_id IS NOT NULL AND state = 'registered'")
    _create_index("ix_trigger_stream", "trigger", ["stream_key"], "stream_key IS NOT NULL AND state = 'running'")
    _create_dags()
    _create_runs()
    _create_tasks()
    _create_journal()
    _create_values()
    _create_settings()


def _create_index(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))


def _text(name: str, *, null: bool = False, key: bool = False) -> sa.Column[str]:
    return sa.Column(name, sa.Text(), nullable=null) if not key else sa.Column(name, sa.Text(), primary_key=True)


def _big(name: str, *, null: bool = False) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=null)


def _key(name: str) -> sa.Column[int]:
    return sa.Column(name, _NUMBER, primary_key=True, autoincrement=False)


def _rename_sessions() -> None:
    op.drop_index("ix_session_live", "session")
    op.rename_table("session", "service_session")
    op.add_column("service_session", sa.Column("queues", sa.Text(), nullable=False, server_default=sa.text("'[]'")))
    op.add_column(
        "service_session", sa.Column("capacity", sa.BigInteger(), nullable=False, server_default=sa.text("0"))
    )
    op.add_column("service_session", _big("events_request", null=True))
    op.add_column("service_session", _text("events_answer", null=True))
    _create_index("ix_service_session_live", "service_session", ["kind"], "ended_us IS NULL")


def _build_task_columns() -> list[sa.Column[object]]:
    return [
        sa.Column("task_id", _NUMBER),
        sa.Column("epoch", sa.BigInteger()),
        sa.Column("queue", sa.Text()),
        sa.Column("priority", sa.BigInteger()),
        sa.Column("stream_key", sa.Text()),
    ]


def _rebuild_triggers() -> None:
    """Copy the triggers out and back, because SQLite cannot drop a NOT NULL constraint.

    The foreign keys of other tables are checked at the commit, when the triggers exist again.
    """
    op.execute("PRAGMA defer_foreign_keys = ON")
    op.execute(f"CREATE TABLE trigger_0002 AS SELECT {_TRIGGER_COLUMNS} FROM trigger")  # noqa: S608 - constants
    op.drop_index("ix_trigger_list_state", "trigger")
    op.drop_table("trigger")
    op.create_table(
        "trigger",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("name", sa.Text(), unique=True),
        *[_text(name) for name in ("classpath", "kwargs", "restart", "state")],
        *[_text(name, null=True) for name in ("reason", "error", "made")],
        _big("created_us"),
        _big("changed_us"),
        _text("list", null=True),
        *_build_task_columns(),
    )
    op.execute(
        f"INSERT INTO trigger ({_TRIGGER_COLUMNS}) SELECT {_TRIGGER_COLUMNS} FROM trigger_0002 ORDER BY id"  # noqa: S608
    )
    op.drop_table("trigger_0002")
    op.create_index("ix_trigger_list_state", "trigger", ["list", "state"])


def _create_dags() -> None:
    op.create_table(
        "dag_file",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("path", sa.Text(), nullable=False, unique=True),
        _text("digest"),
        _text("modules"),
        _text("error", null=True),
        _big("present"),
        _big("parsed_us"),
    )
    op.create_table(
        "dag",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("dag_id", sa.Text(), nullable=False, unique=True),
        sa.Column("file_id", _NUMBER, sa.ForeignKey("dag_file.id"), nullable=False),
        sa.Column("version_id", _NUMBER, nullable=False),
        *[_big(name) for name in ("version", "active", "paused")],
        *[_big(name, null=True) for name in ("next_us", "last_us")],
        *[_big(name) for name in ("known_us", "max_active_runs")],
        *[_text(name) for name in ("schedule", "tags", "label")],
        *[_big(name) for name in ("created_us", "changed_us")],
    )
    op.create_index("ix_dag_file", "dag", ["file_id"])
    _create_index("ix_dag_due", "dag", ["next_us"], "next_us IS NOT NULL AND active = 1 AND paused = 0")
    op.create_table(
        "dag_version",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("dag", _NUMBER, sa.ForeignKey("dag.id"), nullable=False),
        _big("number"),
        _text("digest"),
        _text("structure"),
        _big("created_us"),
        sa.UniqueConstraint("dag", "number", name="uq_dag_version_number"),
    )


def _create_runs() -> None:
    op.create_table(
        "dag_run",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("dag", _NUMBER, sa.ForeignKey("dag.id"), nullable=False),
        sa.Column("version_id", _NUMBER, sa.ForeignKey("dag_version.id"), nullable=False),
        *[_text(name) for name in ("run_id", "kind", "state")],
        *[_text(name, null=True) for name in ("reason", "stop")],
        _big("unfinished"),
        *[_text(name) for name in ("conf", "created_by")],
        _text("request", null=True),
        *[_big(name, null=True) for name in ("logical_us", "interval_start_us", "interval_end_us")],
        _big("created_us"),
        *[_big(name, null=True) for name in ("started_us", "ended_us", "deadline_us")],
        sa.UniqueConstraint("dag", "run_id", name="uq_dag_run_name"),
        sa.UniqueConstraint("dag", "logical_us", name="uq_dag_run_logical"),
        sa.UniqueConstraint("dag", "request", name="uq_dag_run_request"),
    )
    _create_index("ix_dag_run_queued", "dag_run", ["dag", "id"], "state = 'queued'")
    _create_index("ix_dag_run_running", "dag_run", ["dag"], "state = 'running'")
    _create_index("ix_dag_run_stop", "dag_run", ["id"], "stop IS NOT NULL")
    _create_index("ix_dag_run_deadline", "dag_run", ["deadline_us"], "deadline_us IS NOT NULL AND state = 'running'")


def _create_tasks() -> None:
    op.create_table(
        "task_instance",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("run", _NUMBER, sa.ForeignKey("dag_run.id"), nullable=False),
        sa.Column("dag", _NUMBER, nullable=False),
        _text("task_id"),
        *[_big(name) for name in ("map_index", "number")],
        *[_text(name) for name in ("queue", "pool")],
        _big("pool_slots"),
        _text("state"),
        *[_big(name) for name in ("epoch", "tries", "tries_before", "max_tries")],
        sa.Column("session_id", _NUMBER),
        _big("lost"),
        *[_big(name, null=True) for name in ("deadline_us", "due_us", "next_due_us")],
        *[_text(name, null=True) for name in ("resume_method", "resume_kwargs", "resume_payload")],
        _text("tallies"),
        *[_big(name) for name in ("pending", "skip_votes")],
        _text("skips", null=True),
        *[_big(name) for name in ("rank", "since_us")],
        *[_big(name, null=True) for name in ("started_us", "ended_us", "claim_request")],
        _text("error", null=True),
        sa.UniqueConstraint("run", "task_id", "map_index", name="uq_task_instance_name"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # Leaves room on each page for the next version of its rows; a row changes about four times.
        op.execute("ALTER TABLE task_instance SET (fillfactor = 50)")
    waiting = ["rank", "since_us", "id"]
    _create_index("ix_task_scheduled", "task_instance", ["pool", *waiting], "state = 'scheduled'")
    _create_index("ix_task_queued", "task_instance", ["queue", *waiting], "state = 'queued'")
    _create_index("ix_task_slots", "task_instance", ["pool"], "state IN ('queued', 'running')")
    _create_index("ix_task_deferred", "task_instance", ["dag", "pool"], "state = 'deferred'")
    _create_index("ix_task_session", "task_instance", ["session_id"], "session_id IS NOT NULL")
    _create_index("ix_task_due", "task_instance", ["next_due_us"], "next_due_us IS NOT NULL")
    _create_index("ix_task_pending", "task_instance", ["run", "id"], "pending = 1")


def _create_journal() -> None:
    op.create_table(
        "task_journal",
        _key("task"),
        sa.Column("epoch", sa.BigInteger(), primary_key=True, autoincrement=False),
        *[_text(name) for name in ("before", "after", "given")],
        _big("at_us"),
        _text("said_by"),
        _text("detail", null=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "task_callback",
        sa.Column("id", _NUMBER, primary_key=True),
        sa.Column("run", _NUMBER, sa.ForeignKey("dag_run.id"), nullable=False),
        sa.Column("task", _NUMBER),
        _big("epoch"),
        _text("name"),
        _text("cause", null=True),
        *[_text(name) for name in ("queue", "state")],
        sa.Column("session_id", _NUMBER),
        _big("claim_request", null=True),
        _big("lost"),
        _text("error", null=True),
        _big("created_us"),
        _big("ended_us", null=True),
    )
    _create_index("ix_task_callback_due", "task_callback", ["queue", "id"], "state = 'due'")
    _create_index("ix_task_callback_session", "task_callback", ["session_id"], "session_id IS NOT NULL")


def _create_values() -> None:
    op.create_table("xcom", _key("task"), _text("key", key=True), _text("value"), _big("created_us"))
    op.create_table("task_state", _key("task"), _text("key", key=True), _text("value"), _big("changed_us"))
    op.create_table(
        "task_log",
        _key("task"),
        sa.Column("try_number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        _big("first_us"),
        sa.Column("data", sa.LargeBinary(), nullable=False),
        *[_big(name) for name in ("lines", "last")],
    )


def _create_settings() -> None:
    pools = op.create_table(
        "pool", _text("name", key=True), _big("slots"), _text("description"), _big("include_deferred")
    )
    default = {"name": "default_pool", "slots": 128, "description": "Default pool", "include_deferred": 0}
    op.bulk_insert(pools, [default])
    op.create_table("variable", _text("key", key=True), _text("value"), _text("description"), _big("changed_us"))
    op.create_table(
        "connection",
        _text("id", key=True),
        _text("kind"),
        _text("host", null=True),
        _big("port", null=True),
        *[_text(name, null=True) for name in ("schema", "login", "description")],
        _text("value"),
        _big("changed_us"),
    )
