"""The file behind a cache: entries in SQLite, read and written by a thread of its own.

All functions block; `cache` calls them in its thread. Invariants: a batch is written as a whole or not at all. A file
that is damaged, or not a database, is renamed, never deleted, and replaced by a new one. A failure leaves the file
closed or usable, so that the next call can retry.
"""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import structlog

from tidemill.core.errors import RemoteError
from tidemill.core.pipeline.write_behind import CacheEntry, ChangeBatch

log = structlog.get_logger(__name__)

#: How long to wait for another process that locks the file: the engine that this one replaces may still be stopping.
BUSY_SECONDS = 5.0
#: SQLite's error codes for a damaged file, and for one that is not a database.
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (key TEXT PRIMARY KEY, data BLOB NOT NULL, expires_at REAL);
CREATE INDEX IF NOT EXISTS entries_expires_at ON entries (expires_at) WHERE expires_at IS NOT NULL;
"""

T = TypeVar("T")


class CacheFile:
    """One engine's file.

    Args:
        path: Its path; a missing folder is created.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._db: sqlite3.Connection | None = None

    def read_newest(self, limit: int, now: float) -> tuple[list[tuple[str, CacheEntry]], bool]:
        """Return the latest entries, oldest first, and whether the file has no others.

        Raises:
            RemoteError: The file cannot be opened or read.
        """
        return self._try("read", lambda db: _read_newest(db, limit, now))

    def read(self, key: str) -> CacheEntry | None:
        """Return an entry, expired or not.

        Raises:
            RemoteError: The file cannot be opened or read.
        """
        return self._try("read", lambda db: _read(db, key))

    def write(self, batch: ChangeBatch, now: float) -> None:
        """Write a batch, and delete expired entries.

        Raises:
            RemoteError: The file cannot be opened or written, for example because the disk is full.
        """
        self._try("written", lambda db: _write(db, batch, now))

    def close(self) -> None:
        """Close the file; the next call opens it again."""
        db, self._db = self._db, None
        if db is not None:
            with contextlib.suppress(sqlite3.Error):  # an error would already have been raised by the last batch
                db.close()

    def _try(self, what: str, action: Callable[[sqlite3.Connection], T]) -> T:
        for last in (False, True):
            try:
                return action(self._open())
            except Exception as error:  # including values too large for SQLite: flushes must continue
                self.close()
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if last or code not in _BROKEN:
                    raise RemoteError(f"the cache {self.path} cannot be {what}: {error}") from error
                self._set_aside(error)
        raise AssertionError  # the loop returns or raises

    def _open(self) -> sqlite3.Connection:
        if self._db is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # Create it here, so that no other user can read it whatever the umask is.
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            db = sqlite3.connect(self.path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
            self._db = db
            db.execute("PRAGMA journal_mode=WAL")
            db.execute("PRAGMA synchronous=NORMAL")
            found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                error = sqlite3.DatabaseError(found)
                error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise error
            db.executescript(_SCHEMA)
        return self._db

    def _set_aside(self, error: Exception) -> None:
        aside = self.path.with_name(f"{self.path.name}.broken-{time.time_ns()}")
        try:
            self.path.rename(aside)
            for suffix in ("-wal", "-shm"):  # they belong to the damaged file
                self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        except OSError as refused:
            raise RemoteError(f"the cache {self.path} is broken ({error}) and cannot be renamed: {refused}") from error
        log.warning(
            "the cache's file is damaged; a new one is started",
            path=str(self.path),
            kept_as=str(aside),
            error=str(error),
        )


def _read_newest(db: sqlite3.Connection, limit: int, now: float) -> tuple[list[tuple[str, CacheEntry]], bool]:
    rows = db.execute(
        "SELECT key, data, expires_at FROM entries WHERE expires_at IS NULL OR expires_at > ? "
        "ORDER BY rowid DESC LIMIT ?",
        (now, limit + 1),
    ).fetchall()
    return [(key, _make_entry(data, until)) for key, data, until in reversed(rows[:limit])], len(rows) <= limit


def _read(db: sqlite3.Connection, key: str) -> CacheEntry | None:
    row = db.execute("SELECT data, expires_at FROM entries WHERE key = ?", (key,)).fetchone()
    return None if row is None else _make_entry(*row)


def _make_entry(data: bytes, until: float | None) -> CacheEntry:
    return CacheEntry(data, math.inf if until is None else until)


def _write(db: sqlite3.Connection, batch: ChangeBatch, now: float) -> None:
    db.execute("BEGIN IMMEDIATE")
    try:
        if batch.clear:
            db.execute("DELETE FROM entries")
        db.executemany(
            "DELETE FROM entries WHERE key = ?", ((key,) for key, entry in batch.changes.items() if not entry)
        )
        db.executemany("INSERT OR REPLACE INTO entries (key, data, expires_at) VALUES (?, ?, ?)", _make_rows(batch))
        db.execute("DELETE FROM entries WHERE expires_at <= ?", (now,))
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):  # SQLite may already have rolled back
            db.execute("ROLLBACK")
        raise


def _make_rows(batch: ChangeBatch) -> Iterable[tuple[str, bytes, float | None]]:
    for key, entry in batch.changes.items():
        if entry is not None:
            yield key, entry.data, None if entry.expires_at == math.inf else entry.expires_at
