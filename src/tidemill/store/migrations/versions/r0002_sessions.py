"""Adds sessions and lists, narrow cursors next to the wide triggers, and identities that may outlive their events."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

#: An owner was stored as "host:list"; host names contain no colon.
_LIST = {
    "postgresql": "substr(owner, strpos(owner, ':') + 1)",
    "sqlite": "substr(owner, instr(owner, ':') + 1)",
}


def upgrade() -> None:
    """Create the new tables, fill them from the old ones, and drop the columns that moved."""
    dialect = op.get_bind().dialect.name
    number = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
    _create_sessions(number)
    _create_cursors(number, dialect)
    _create_identities(number)
    _narrow_triggers(dialect)
    if dialect == "postgresql":
        _relink_events()
    else:
        _rebuild_events(number)
    op.create_index("ix_trigger_event_created", "trigger_event", ["created_us"])


def _create_sessions(number: sa.types.TypeEngine[int]) -> None:
    op.create_table(
        "session",
        sa.Column("id", number, primary_key=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("boot_id", sa.Text(), nullable=False),
        sa.Column("pid", sa.BigInteger(), nullable=False),
        sa.Column("list", sa.Text(), nullable=False),
        sa.Column("lock", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("beat", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("started_us", sa.BigInteger(), nullable=False),
        sa.Column("beat_us", sa.BigInteger(), nullable=False),
        sa.Column("ended_us", sa.BigInteger()),
        sa.Column("ended_by", number),
        sqlite_autoincrement=True,
    )
    live = sa.text("ended_us IS NULL")
    op.create_index("ix_session_live", "session", ["kind"], postgresql_where=live, sqlite_where=live)
    op.create_table(
        "trigger_list",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("session_id", number, sa.ForeignKey("session.id")),
    )
    op.create_table(
        "list_claim",
        sa.Column("claim", sa.Text(), primary_key=True),
        sa.Column("session_id", number, sa.ForeignKey("session.id"), primary_key=True, autoincrement=False),
    )
    op.create_index("ix_list_claim_session", "list_claim", ["session_id"])


def _create_cursors(number: sa.types.TypeEngine[int], dialect: str) -> None:
    op.create_table(
        "trigger_cursor",
        sa.Column("trigger_id", number, sa.ForeignKey("trigger.id"), primary_key=True, autoincrement=False),
        sa.Column("token", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("next_index", sa.BigInteger(), nullable=False, server_default=sa.text("0")),
        sa.Column("session_id", number),
    )
    if dialect == "postgresql":
        # Leaves room on each page for the next version of its rows, so that storing an event updates no index.
        op.execute("ALTER TABLE trigger_cursor SET (fillfactor = 50)")
    op.execute(
        "INSERT INTO trigger_cursor (trigger_id, token, next_index) "
        "SELECT id, token, next_index FROM trigger ORDER BY id"
    )
    op.create_index("ix_trigger_cursor_session", "trigger_cursor", ["session_id", "token"])


def _create_identities(number: sa.types.TypeEngine[int]) -> None:
    op.create_table(
        "trigger_identity",
        sa.Column("trigger_id", number, primary_key=True, autoincrement=False),
        sa.Column("identity", sa.Text(), primary_key=True),
        sa.Column("sequence_index", sa.BigInteger(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.execute(
        "INSERT INTO trigger_identity (trigger_id, identity, sequence_index, created_us) "
        "SELECT trigger_id, identity, sequence_index, created_us FROM trigger_event WHERE identity IS NOT NULL "
        "ORDER BY trigger_id, identity"
    )
    op.create_index("ix_trigger_identity_created", "trigger_identity", ["created_us"])
    op.drop_index("uq_trigger_event_identity", "trigger_event")


def _narrow_triggers(dialect: str) -> None:
    op.add_column("trigger", sa.Column("list", sa.Text()))
    op.execute(f"UPDATE trigger SET list = {_LIST[dialect]} WHERE owner LIKE '%:%'")  # noqa: S608 - constants
    for name in ("owner", "token", "next_index"):
        # Not a batch operation, which on SQLite would drop the table and the rows that reference it.
        op.execute(f"ALTER TABLE trigger DROP COLUMN {name}")
    op.create_index("ix_trigger_list_state", "trigger", ["list", "state"])


def _relink_events() -> None:
    op.drop_constraint("trigger_event_trigger_id_fkey", "trigger_event", type_="foreignkey")
    op.create_foreign_key(
        "trigger_event_trigger_id_fkey", "trigger_event", "trigger_cursor", ["trigger_id"], ["trigger_id"]
    )


def _rebuild_events(number: sa.types.TypeEngine[int]) -> None:
    """Copy the events: SQLite can neither change a table's foreign keys nor add AUTOINCREMENT to it."""
    op.create_table(
        "trigger_event_0002",
        sa.Column("id", number, primary_key=True),
        sa.Column("trigger_id", number, sa.ForeignKey("trigger_cursor.trigger_id"), nullable=False),
        sa.Column("sequence_index", sa.BigInteger(), nullable=False),
        sa.Column("identity", sa.Text()),
        sa.Column("payload", sa.Text(), nullable=False),
        sa.Column("created_us", sa.BigInteger(), nullable=False),
        sa.UniqueConstraint("trigger_id", "sequence_index", name="uq_trigger_event_sequence"),
        sqlite_autoincrement=True,
    )
    columns = "id, trigger_id, sequence_index, identity, payload, created_us"
    op.execute(f"INSERT INTO trigger_event_0002 ({columns}) SELECT {columns} FROM trigger_event ORDER BY id")  # noqa: S608
    op.drop_table("trigger_event")
    op.rename_table("trigger_event_0002", "trigger_event")
