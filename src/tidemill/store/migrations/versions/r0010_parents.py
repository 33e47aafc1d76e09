"""Links the session of a service to that of the process that supervises it, and records the version of tidemill."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("service_session", sa.Column("parent", _ID))
    op.add_column("service_session", sa.Column("version", sa.Text(), nullable=False, server_default=sa.text("''")))
