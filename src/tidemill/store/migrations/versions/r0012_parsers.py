"""Records which session of a parser has a file, and which ones lack a file whose session has ended."""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.add_column("dag_file", sa.Column("session_id", _ID))
    op.add_column("dag_file", sa.Column("absent", sa.Text(), nullable=False, server_default=sa.text("'[]'")))
