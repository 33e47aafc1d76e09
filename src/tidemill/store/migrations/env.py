"""Runs alembic on the connection and in the transaction that `tidemill.store.migrate` provides."""

from alembic import context

import tidemill.store.dag_tables  # noqa: F401 - registers its tables
from tidemill.store.tables import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
