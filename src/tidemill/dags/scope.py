"""Which DAG, group and teardown are open in the file that is being read: `with DAG(...)`, `with TaskGroup(...)`.

Also collects the DAGs that a file has opened, for those that it keeps in no variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Generic, TypeVar

ItemT = TypeVar("ItemT")

#: What the names begin with under which DAG files are modules; nothing imports them by these.
DAG_MODULE: Final = "tidemill_dag_"


class Stack(Generic[ItemT]):
    """What is open, the innermost last; each thread and asyncio task has its own."""

    def __init__(self, name: str) -> None:
        """Begin with nothing open."""
        self._items: ContextVar[tuple[ItemT, ...]] = ContextVar(name, default=())

    @property
    def current(self) -> ItemT | None:
        """The innermost; None: nothing is open."""
        items = self._items.get()
        return items[-1] if items else None

    def push(self, item: ItemT) -> None:
        """Open."""
        self._items.set((*self._items.get(), item))

    def pop(self) -> ItemT:
        """Close the innermost."""
        *rest, last = self._items.get()
        self._items.set(tuple(rest))
        return last


# What is in them are DAGs, groups and operators; their modules stand on this one.
open_dags: Stack[Any] = Stack("open_dags")
open_groups: Stack[Any] = Stack("open_groups")
open_teardowns: Stack[Any] = Stack("open_teardowns")

_collected: ContextVar[list[Any] | None] = ContextVar("collected", default=None)


@contextmanager
def collect_dags() -> Iterator[list[Any]]:
    """Collect the DAGs that are opened meanwhile."""
    found: list[Any] = []
    token = _collected.set(found)
    try:
        yield found
    finally:
        _collected.reset(token)


def note_dag(dag: Any) -> None:
    """Add a DAG to those that are being collected."""
    found = _collected.get()
    if found is not None and not any(dag is other for other in found):
        found.append(dag)
