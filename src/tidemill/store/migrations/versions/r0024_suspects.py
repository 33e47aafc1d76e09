"""Adds an index of the triggers that are suspected of killing their hosts."""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    where = sa.text("deaths >= 2")
    op.create_index("ix_trigger_death_suspect", "trigger_death", ["at_us"], postgresql_where=where, sqlite_where=where)
