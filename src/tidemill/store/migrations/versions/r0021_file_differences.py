"""Records which files parsers and workers lack, or have with another content."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

#: The type of row ids, as `store.tables.Id`.
_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "file_difference",
        sa.Column("session_id", _ID, primary_key=True, autoincrement=False),
        sa.Column("path", sa.Text(), primary_key=True),
        sa.Column("difference", sa.Text(), nullable=False),
        sa.Column("since_us", sa.BigInteger(), nullable=False),
        sqlite_with_rowid=False,
    )
