"""Tasks that a user cleared or marked while they ran are ending until their old attempt is gone."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Keep what a user wants of a task that is ending; it holds its slots until then."""
    op.add_column("task_instance", sa.Column("ending_outcome", sa.Text()))
    op.drop_index("ix_task_slots", "task_instance")
    where = sa.text("state IN ('queued', 'running', 'ending')")
    op.create_index("ix_task_slots", "task_instance", ["pool"], postgresql_where=where, sqlite_where=where)
