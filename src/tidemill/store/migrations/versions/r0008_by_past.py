"""Stores whether tasks of a DAG depend on the previous run; the column is filled when its file is next parsed."""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("dag", sa.Column("by_past", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
