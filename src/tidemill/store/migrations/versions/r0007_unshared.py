"""Stores the effects of importing a DAG file that a forked process does not inherit."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, which is only displayed."""
    op.add_column("dag_file", sa.Column("unshared", sa.Text()))
