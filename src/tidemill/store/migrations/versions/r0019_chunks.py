"""Adds the times when the scheduler has to cut the unfinished chunks of maps."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("task_map", sa.Column("due_us", sa.BigInteger()))
    where = sa.text("due_us IS NOT NULL")
    op.create_index("ix_task_map_due", "task_map", ["due_us"], postgresql_where=where, sqlite_where=where)
