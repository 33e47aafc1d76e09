"""Adds the events of streams that a later try gets, those that are discarded, and the wait for a trigger's cleanup."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    for name in ("acked", "carried", "discarded", "final"):
        op.add_column("trigger_stream", sa.Column(name, sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("trigger_stream", sa.Column("discarded_for", sa.Text()))
    op.add_column("task_instance", sa.Column("ending_triggerer", _ID))
    where = sa.text("ending_triggerer IS NOT NULL")
    op.create_index(
        "ix_task_ending_triggerer", "task_instance", ["ending_triggerer"], postgresql_where=where, sqlite_where=where
    )
