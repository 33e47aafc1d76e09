"""Adds the deaths of triggers, how sessions end, shares of claims, and calls of `on_kill` by other triggerers."""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COUNTS = ("stopping", "lost", "trial", "held")


def upgrade() -> None:
    op.add_column("service_session", sa.Column("request", sa.Text()))
    for name in _COUNTS:
        op.add_column("service_session", sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    where = sa.text("request IS NOT NULL")
    op.create_index(
        "ix_service_session_request",
        "service_session",
        ["request"],
        unique=True,
        postgresql_where=where,
        sqlite_where=where,
    )
    op.add_column("trigger_cursor", sa.Column("moved_us", sa.BigInteger()))
    op.create_table(
        "trigger_death",
        sa.Column("trigger_id", _ID, primary_key=True, autoincrement=False),
        sa.Column("deaths", sa.BigInteger(), nullable=False),
        sa.Column("alone", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("lived_us", sa.BigInteger(), nullable=False),
        sa.Column("at_us", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_trigger_death_at", "trigger_death", ["at_us"])
    where = sa.text("stream_key IS NOT NULL AND state = 'registered'")
    op.create_index("ix_trigger_stream_waiting", "trigger", ["stream_key"], postgresql_where=where, sqlite_where=where)
    where = sa.text("state = 'kill'")
    op.create_index(
        "ix_task_callback_kill", "task_callback", ["queue", "id"], postgresql_where=where, sqlite_where=where
    )
