"""Adds indexes for queries that had to read finished rows: limits, the runs of a DAG, live services."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.drop_index("ix_task_deferred", "task_instance")
    _create("ix_task_deferred", "task_instance", ["dag", "task_id"], "state = 'deferred'")
    _create("ix_task_deferred_pool", "task_instance", ["pool"], "state = 'deferred'")
    _create("ix_task_resumed", "task_instance", ["dag", "task_id"], "state = 'scheduled' AND rank < -549755813888")
    op.create_index("ix_dag_run_dag", "dag_run", ["dag", "id"])
    op.drop_index("ix_dag_run_queued", "dag_run")
    op.drop_index("ix_dag_run_running", "dag_run")
    for state in ("queued", "running", "failed"):
        _create(f"ix_dag_run_{state}", "dag_run", ["dag", "state", "id"], f"state = '{state}'")
    op.drop_index("ix_service_session_live", "service_session")
    _create("ix_service_session_live", "service_session", ["id"], "ended_us IS NULL")


def _create(name: str, table: str, columns: list[str], where: str) -> None:
    op.create_index(name, table, columns, postgresql_where=sa.text(where), sqlite_where=sa.text(where))
