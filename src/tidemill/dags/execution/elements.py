"""Elements of a task whose attempt runs all of them: one to run, its result, and what its threads share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from tidemill.dags.attempt.task_services import ChunkItem
from tidemill.dags.exceptions import TaskError


class PlaceLeft(BaseException):
    """Ends an attempt whose elements another one runs; no `except Exception` catches it.

    Its worker stops, or it waits for elements where it cannot keep its process.
    """


class ElementsWait(TaskError):
    """Elements have failed and wait for their retry, in another attempt."""


@dataclass(frozen=True, slots=True)
class ElementToRun:
    """An element to run.

    Attributes:
        number: Its index.
        tries: How often it has failed.
        items: What its arguments are made of.
        size: The number of characters of these.
    """

    number: int
    tries: int
    items: tuple[ChunkItem, ...]
    size: int


class Result(NamedTuple):
    """The outcome of an element, as it is stored."""

    number: int
    state: str
    tries: int
    value: str | None
    error: str | None
    started_us: int


@dataclass(slots=True)
class Progress:
    """What the feeder, the workers and the keeper of an iteration share; all of it changes under one lock.

    Attributes:
        changed: The lock, and the news of each change.
        running: The number of elements that workers run.
        seen: The number of elements that were read from the store.
        is_done: Whether all elements are read and have ended.
        is_stopping: Whether the attempt ends, whatever is left.
        is_leaving: Whether the worker stops: elements that run may end, and another attempt runs the others.
        wake: Has workers on an event loop look for changes.
    """

    changed: threading.Condition = field(default_factory=threading.Condition)
    running: int = 0
    seen: int = 0
    is_done: bool = False
    is_stopping: bool = False
    is_leaving: bool = False
    wake: Callable[[], None] = lambda: None

    @property
    def takes_none(self) -> bool:
        """Whether no further element is to be run."""
        return self.is_stopping or self.is_leaving

    def leave(self) -> None:
        with self.changed:
            self.is_leaving = self.is_leaving or not self.is_done
            self.changed.notify_all()
        self.wake()

    def stop(self) -> None:
        with self.changed:
            self.is_stopping = True
            self.changed.notify_all()
        self.wake()
