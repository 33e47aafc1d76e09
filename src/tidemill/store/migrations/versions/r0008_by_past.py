"""DAGs say whether tasks of a run wait for the run before; it is set when their files are read next."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("dag", sa.Column("by_past", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
