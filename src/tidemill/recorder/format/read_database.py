"""Opens the database of a period for reading, while its writer goes on."""

from __future__ import annotations

import os
import sqlite3
import stat

import msgspec

from tidemill.recorder.format.events_database import VERSION
from tidemill.recorder.format.file_layout import Period


class PeriodAbout(msgspec.Struct, frozen=True):
    """What a period is called.

    Attributes:
        group: The consumer group.
        worker: The worker's name.
        started_us: When it was begun, in UTC microseconds since the epoch.
        keep_seconds: For how long it is to be kept.
        bounded: Whether it is of a bounded run, which records failures only.
    """

    group: str
    worker: str
    started_us: int
    keep_seconds: int
    bounded: bool


def read_about(db: sqlite3.Connection) -> PeriodAbout | None:
    """Return what a period is called; None: its process was killed before it said that.

    Raises:
        sqlite3.Error: It cannot be read.
    """
    found = db.execute("select * from about")
    row = found.fetchone()
    if row is None:
        return None
    facts = dict(zip((column[0] for column in found.description), row, strict=True))
    # A recording of a version without bounded runs has no such column.
    bounded = bool(facts.get("bounded"))
    return PeriodAbout(facts["group"], facts["worker"], facts["started_at_us"], facts["keep_seconds"], bounded)


def open_database(period: Period) -> sqlite3.Connection:
    """Return a connection that cannot write.

    Raises:
        OSError: It is missing, empty, a link, or not this user's.
        sqlite3.Error: It is damaged, or of another version.
    """
    status = period.database.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(1, f"{period.database} is not an ordinary file of this user")
    return check_version(
        sqlite3.connect(f"{period.database.absolute().as_uri()}?mode=ro", uri=True, timeout=2.0, isolation_level=None)
    )


def check_version(db: sqlite3.Connection) -> sqlite3.Connection:
    """Return the same connection, if its tables are those of this version.

    Raises:
        sqlite3.Error: It is damaged, or of another version.
    """
    try:
        version = db.execute("pragma user_version").fetchone()[0]
    except BaseException:
        db.close()
        raise
    if version == 0:  # it was begun a moment ago, or its process was killed at that moment
        db.close()
        raise FileNotFoundError(2, "the database has no tables yet")
    if version != VERSION:
        db.close()
        raise sqlite3.DatabaseError(f"its tables have version {version}, not {VERSION}")
    return db
