"""Adds the index of skipped elements."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    skipped = sa.text("state = 'skipped' AND map_index >= 0")
    op.create_index(
        "ix_task_element_skipped",
        "task_instance",
        ["run", "task_id", "map_index"],
        postgresql_where=skipped,
        sqlite_where=skipped,
    )
