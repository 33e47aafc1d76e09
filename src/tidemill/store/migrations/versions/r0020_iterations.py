"""Adds the results of elements that run in one attempt."""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    identifier = sa.BigInteger().with_variant(sa.Integer, "sqlite")
    op.create_table(
        "task_iteration",
        sa.Column("task", identifier, primary_key=True, autoincrement=False),
        *[
            sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0"))
            for name in ("seen", "running", "success", "failed", "skipped", "up_for_retry", "began_us", "changed_us")
        ],
    )
    op.create_table(
        "task_part",
        sa.Column("task", identifier, primary_key=True, autoincrement=False),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("value", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("started_us", sa.BigInteger()),
        sa.Column("ended_us", sa.BigInteger(), nullable=False),
    )
    where = sa.text("state != 'success'")
    op.create_index(
        "ix_task_part_unsuccessful", "task_part", ["task", "number"], postgresql_where=where, sqlite_where=where
    )
