"""Tasks that a user cleared or marked while they ran stay in the state `ending` until their old attempt has exited."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the outcome that follows the ending; until then the task holds its slots."""
    op.add_column("task_instance", sa.Column("ending_outcome", sa.Text()))
    op.drop_index("ix_task_slots", "task_instance")
    where = sa.text("state IN ('queued', 'running', 'ending')")
    op.create_index("ix_task_slots", "task_instance", ["pool"], postgresql_where=where, sqlite_where=where)
