"""Starts a writer, and logs advice if SQLite lacks what the writer needs."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator

import structlog

from tidemill.recorder.writing.writer import RecordWriter

log = structlog.get_logger(__name__)


@contextlib.contextmanager
def start_writing(writer: RecordWriter) -> Iterator[bool]:
    """Record while the block runs; yields whether anything is recorded."""
    with contextlib.ExitStack() as stack:
        can_write = True
        try:
            stack.enter_context(writer)
        except sqlite3.Error as error:
            log.warning(
                "nothing is recorded: SQLite cannot create the database",
                error=str(error),
                advice="use a Python whose SQLite is 3.34 or newer and has FTS5, or set debug.enabled to false",
            )
            can_write = False
        yield can_write
