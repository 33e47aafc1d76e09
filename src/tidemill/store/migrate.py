"""Upgrades the tables of a database to this program's revision when a store is opened.

Invariants: an upgrade is one transaction. If several processes start at the same time, one upgrades and the others wait
for it. A database that is up to date is only read, without importing alembic. A database that a newer tidemill has
upgraded is refused.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Select, Text, column, inspect, select, table, text

from tidemill.core.errors import ConfigError
from tidemill.store.batches import find_dialect
from tidemill.store.statements import Statement
from tidemill.store.tables import HEAD, VERSION_TABLE

MIGRATIONS = Path(__file__).parent / "migrations"
#: The key of the advisory lock: "tidemill" in ASCII, so that it differs from the keys of other programs.
_LOCK_KEY = int.from_bytes(b"tidemill", "big")


class NoTablesError(ConfigError):
    """The store has no tables, for example because it is still being created."""


def read_revision(connection: Connection) -> str | None:
    """Return the revision of a database; None if it has no tidemill tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    found = connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar()  # noqa: S608 - a constant
    return str(found) if found is not None else None


def is_current(connection: Connection) -> bool:
    """Return whether the database has the newest revision."""
    return read_revision(connection) == HEAD


def upgrade(connection: Connection) -> None:
    """Upgrade the database to the newest revision.

    Args:
        connection: A connection inside a transaction; for SQLite, an immediate one.

    Raises:
        ConfigError: A newer tidemill has upgraded the database.
    """
    if is_current(connection):
        return
    if find_dialect(connection) == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
        if is_current(connection):
            return
    _run_alembic(connection)


def check_current(found: str | None, label: str) -> None:
    """Check that tables have the revision of this program.

    Args:
        found: Their revision; None: there are none.
        label: The name of the store in messages.

    Raises:
        ConfigError: They have another one, or there are none.
    """
    if found == HEAD:
        return
    has = "has no tables" if found is None else f"has tables of revision {found}, but this tidemill needs {HEAD}"
    newer = found is not None and found > HEAD
    update = "`tidemill db migrate` of a newer version has changed them; update tidemill"
    migrate = "run `tidemill db migrate`" if found is None else "stop all services, then run `tidemill db migrate`"
    todo = update if newer else migrate
    raise ConfigError(f"the store {label} {has}; {todo}")


def check_unchanged(connection: Connection, label: str) -> None:
    """Check that tables that had the revision of this program still have it.

    Raises:
        ConfigError: They have another one.
    """
    check_current(_version.fetch(connection)[0][0], label)


@Statement
def _version(dialect: str) -> Select[str]:
    return select(column("version_num", Text())).select_from(table(VERSION_TABLE))


def check_readable(connection: Connection, label: str) -> None:
    """Check that the tables have the revision that this program reads.

    Raises:
        NoTablesError: There are no tables.
        ConfigError: The tables have another revision.
    """
    found = read_revision(connection)
    if found is None:
        raise NoTablesError(f"the store {label} has no tables; `tidemill triggers run` creates them")
    if found != HEAD:
        raise ConfigError(
            f"the store {label} has revision {found}, but this tidemill reads {HEAD}; use the version of tidemill that "
            "writes to the store"
        )


def _run_alembic(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["connection"] = connection
    found = read_revision(connection)
    if found is not None:
        try:
            ScriptDirectory.from_config(config).get_revision(found)
        except CommandError:
            raise ConfigError(
                f"the store has revision {found}, which this tidemill does not know (its own is {HEAD}): a newer "
                "version has upgraded it; update tidemill"
            ) from None
    command.upgrade(config, "head")
