"""Adds the waits of generators at their `yield`, the sizes of what they yielded, and the limits of maps."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("task_instance", sa.Column("block", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("task_instance", sa.Column("block_us", sa.BigInteger()))
    op.add_column("map_item", sa.Column("size_up_to", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    for name in ("max_outstanding", "max_length", "max_backlog"):
        op.add_column("task_map", sa.Column(name, sa.BigInteger()))
    op.drop_index("ix_task_slots", "task_instance")
    holds = "state IN ('queued', 'running', 'ending') AND block NOT IN (1, 2)"
    _create("ix_task_slots", "task_instance", ["pool"], holds)
    _create("ix_task_blocked", "task_instance", ["pool", "block", "id"], "state = 'running' AND block > 0")


def _create(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
