"""Adds the streams of triggers, and their part in the rows of tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "trigger_stream",
        sa.Column("trigger_id", _ID, sa.ForeignKey("trigger_cursor.trigger_id"), primary_key=True, autoincrement=False),
        sa.Column("task", _ID, nullable=False),
        sa.Column("handled", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("kept", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("ready", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("ended_us", sa.BigInteger()),
        sa.Column("error", sa.Text()),
        sa.Column("checkpoint", sa.Text()),
    )
    where = sa.text("ready = 1")
    op.create_index(
        "ix_trigger_stream_ready", "trigger_stream", ["trigger_id"], postgresql_where=where, sqlite_where=where
    )
    op.create_index("ix_trigger_stream_task", "trigger_stream", ["task"])
    op.create_table(
        "map_identity",
        sa.Column("task", _ID, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.Text(), primary_key=True),
        sqlite_with_rowid=False,
    )
    for name in ("stream_epoch", "stream_due_us", "stream_paused"):
        op.add_column("task_instance", sa.Column(name, sa.BigInteger()))
