"""The open DAG, group and teardown of the file that is being parsed: `with DAG(...)`, `with TaskGroup(...)`.

Also collects all DAGs that a file opens, since a file need not store them in variables.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

#: The prefix of the module names of DAG files; nothing imports the files by these names.
DAG_MODULE: Final = "tidemill_dag_"


class Stack(Generic[ItemT]):
    """A stack of open objects, the innermost last; each thread and asyncio task has its own."""

    def __init__(self, name: str) -> None:
        self._items: ContextVar[tuple[ItemT, ...]] = ContextVar(name, default=())

    @property
    def current(self) -> ItemT | None:
        """The innermost object; None if nothing is open."""
        items = self._items.get()
        return items[-1] if items else None

    def push(self, item: ItemT) -> None:
        """Open an object."""
        self._items.set((*self._items.get(), item))

    def pop(self) -> ItemT:
        """Close the innermost object and return it."""
        *rest, last = self._items.get()
        self._items.set(tuple(rest))
        return last


# The items are DAGs, groups and operators. They are typed as Any because their modules import this one.
open_dags: Stack[Any] = Stack("open_dags")
open_groups: Stack[Any] = Stack("open_groups")
open_teardowns: Stack[Any] = Stack("open_teardowns")

_collected: ContextVar[list[Any] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_dags() -> Iterator[list[Any]]:
    """Collect the DAGs that are opened inside the block."""
    found: list[Any] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def note_dag(dag: Any) -> None:
    """Add a DAG to the ones being collected."""
    found = _collected.get()
    if found is not None and not any(dag is other for other in found):
        found.append(dag)
