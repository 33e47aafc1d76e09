"""Reads the journal of task transitions, which records the input that ended each epoch."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from sqlalchemy import Connection, Select, and_, select

from tidemill.store.batches import RowSet, find_dialect
from tidemill.store.dag_tables import task_journal
from tidemill.store.statements import Statement

_LEFT = RowSet("left_epochs", task=int, epoch=int)


def find_left(connection: Connection, epochs: Collection[tuple[int, int]]) -> dict[tuple[int, int], str]:
    """Return the inputs with which tasks left the given epochs, by task and epoch."""
    dialect = find_dialect(connection)
    rows = [(task, epoch + 1) for task, epoch in epochs]
    found = _find_left.fetch(connection, _LEFT.build_parameters(dialect, rows))
    return {(task, epoch - 1): given for task, epoch, given in found}


@Statement
def _find_left(dialect: str) -> Select[Any]:
    given, journal = _LEFT.build_source(dialect), task_journal.c
    same = and_(journal.task == given.c.task, journal.epoch == given.c.epoch)
    return select(journal.task, journal.epoch, journal.given).join(given, same)
