"""Adds the digest of the items that an element ran with, and how many elements of a map are compared."""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("task_instance", sa.Column("items_digest", sa.BigInteger()))
    op.add_column("task_map", sa.Column("compared", sa.BigInteger()))
