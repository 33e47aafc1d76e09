"""Callbacks store the origin of their exception, and an index finds them by run."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the start of the try and the origin of the exception."""
    op.add_column("task_callback", sa.Column("started_us", sa.BigInteger()))
    op.add_column("task_callback", sa.Column("origin", sa.Text()))
    op.create_index("ix_task_callback_run", "task_callback", ["run", "id"])
