"""Triggers and their events."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    op.create_table(
        "trigger",
        sa.Column("id", number, primary_key=True),
        sa.Column("name", sa.Text(), nullable=False, unique=True),
        sa.Column("classpath", sa.Text(), nullable=False),
        sa.Column("kwargs", sa.Text(), nullable=False),
        sa.Column("restart", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text()),
        sa.Column("error", sa.Text()),
        sa.Column("owner", sa.Text()),
        sa.Column("made", sa.Text()),
        sa.Column("token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("next_index", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.Column("changed_us", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "trigger_event",
        sa.Column("id", number, primary_key=True),
        sa.Column("trigger_id", number, sa.ForeignKey("trigger.id"), nullable=False),
        sa.Column("sequence_index", sa.BigInteger(), nullable=False),
        sa.Column("identity", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("trigger_id", "sequence_index", name="uq_trigger_event_sequence"),
    )
    op.create_index(
        "uq_trigger_event_identity",
        "trigger_event",
        ["trigger_id", "identity"],
        unique=True,
        postgresql_where=sa.text("identity IS NOT NULL"),
        sqlite_where=sa.text("identity IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_table("trigger_event")
    op.drop_table("trigger")
