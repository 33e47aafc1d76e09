"""Adds the tables of mapped tasks, the labels of their elements, and indexes that tell elements from tasks."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
_COUNTS = (
    "opened", "closed", "arrived", "created", "made", "waiting", "unfinished", "retrying", "success", "failed",
    "upstream_failed", "skipped", "told", "pending",
)  # fmt: skip


def upgrade() -> None:
    op.create_table(
        "task_map",
        sa.Column("task", _ID, primary_key=True, autoincrement=False),
        sa.Column("run", _ID, nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        *[sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")) for name in _COUNTS],
        sa.Column("stop", sa.Text()),
        sa.Column("sources", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.UniqueConstraint("run", "task_id", name="uq_task_map_name"),
    )
    _create("ix_task_map_pending", "task_map", ["task"], "pending = 1")
    op.create_table(
        "map_item",
        sa.Column("task", _ID, primary_key=True, autoincrement=False),
        sa.Column("key", sa.Text(), primary_key=True),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("value", sa.Text(), nullable=False),
    )
    op.add_column("task_instance", sa.Column("label", sa.Text()))
    _create("ix_task_unmapped", "task_instance", ["run", "number", "id"], "map_index = -1")
    bad = "state IN ('failed', 'upstream_failed') AND map_index >= 0"
    _create("ix_task_element_waiting", "task_instance", ["run", "task_id", "map_index"], "pending = 2")
    _create("ix_task_element_failed", "task_instance", ["run", "task_id", "map_index"], bad)


def _create(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
