"""Adds the table of the check value, by which services find out whether they have the right key."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "key_check",
        sa.Column("id", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.Text(), nullable=False),
    )
