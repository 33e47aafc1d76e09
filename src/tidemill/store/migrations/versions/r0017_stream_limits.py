"""Adds the limits of streams, the events that end their tasks, and streams whose events are elements of maps."""

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trigger_stream", sa.Column("room_at", sa.BigInteger()))
    op.add_column("trigger_stream", sa.Column("held", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("trigger_stream", sa.Column("ends_at", sa.BigInteger()))
    op.add_column("trigger_stream", sa.Column("ending", sa.Text()))
    op.add_column("trigger_stream", sa.Column("feeds", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    where = sa.text("ready = 2")
    op.create_index(
        "ix_trigger_stream_held", "trigger_stream", ["trigger_id"], postgresql_where=where, sqlite_where=where
    )
