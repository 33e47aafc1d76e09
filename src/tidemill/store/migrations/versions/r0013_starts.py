"""Adds the mark of triggers that start their tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("trigger", sa.Column("starts", sa.BigInteger()))
