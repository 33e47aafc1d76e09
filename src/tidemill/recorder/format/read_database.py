"""Opens the database of a period for reading, even while it is written."""

from __future__ import annotations

import os
import sqlite3
import stat

import msgspec

from tidemill.recorder.format.events_database import VERSION
from tidemill.recorder.format.file_layout import Period


class PeriodAbout(msgspec.Struct, frozen=True):
    """The identity of a period.

    Attributes:
        group: The consumer group.
        worker: The worker's name.
        started_us: The start in UTC microseconds since the epoch.
        keep_seconds: The retention.
        bounded: Whether a bounded run wrote it, which records failures only.
    """

    group: str
    worker: str
    started_us: int
    keep_seconds: int
    bounded: bool


def read_about(db: sqlite3.Connection) -> PeriodAbout | None:
    """Return the identity of a period; None if its process was killed before it was stored.

    Raises:
        sqlite3.Error: The database cannot be read.
    """
    found = db.execute("select * from about")
    row = found.fetchone()
    if row is None:
        return None
    facts = dict(zip((column[0] for column in found.description), row, strict=True))
    # Recordings of older versions have no such column.
    bounded = bool(facts.get("bounded"))
    return PeriodAbout(facts["group"], facts["worker"], facts["started_at_us"], facts["keep_seconds"], bounded)


def open_database(period: Period) -> sqlite3.Connection:
    """Return a read-only connection.

    Raises:
        OSError: The file is missing, empty, a link or another user's.
        sqlite3.Error: The database is damaged or of another version.
    """
    status = period.database.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(1, f"{period.database} is not a regular file of this user")
    return check_version(
        sqlite3.connect(f"{period.database.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0, isolation_level=None)
    )


def check_version(db: sqlite3.Connection) -> sqlite3.Connection:
    """Return the same connection after a check of the database's version.

    Raises:
        sqlite3.Error: The database is damaged or of another version.
    """
    try:
        version = db.execute("pragma user_version").fetchone()[0]
    except BaseException:
        db.close()
        raise
    if version == 0:  # it was created a moment ago, or its process was killed at that moment
        db.close()
        raise FileNotFoundError(2, "the database has no tables yet")
    if version != VERSION:
        db.close()
        raise sqlite3.DatabaseError(f"the database has version {version}; this tidemill reads version {VERSION}")
    return db
