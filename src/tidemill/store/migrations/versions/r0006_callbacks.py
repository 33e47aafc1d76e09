"""Callbacks get the exception that caused them, and are found by their run."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep when the try began that a callback is about, and where its exception came from."""
    op.add_column("task_callback", sa.Column("started_us", sa.BigInteger()))
    op.add_column("task_callback", sa.Column("origin", sa.Text()))
    op.create_index("ix_task_callback_run", "task_callback", ["run", "id"])
