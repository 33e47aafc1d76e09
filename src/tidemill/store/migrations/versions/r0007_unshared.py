"""What of the import of a DAG file a forked process would not have."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep it for people; nothing else depends on it."""
    op.add_column("dag_file", sa.Column("unshared", sa.Text()))
