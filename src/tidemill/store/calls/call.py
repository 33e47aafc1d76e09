"""What every named call is: a request as a value, with the type of its answer.

A call is sent to the process that has the store open, or answered in this one: `await store.call(request)` is the same
for both. What can be said against a request is a `CallRefusedError`, which changes nothing, whatever the other calls of
the same transaction do.
"""

from __future__ import annotations

import enum
from typing import Generic, TypeVar, get_args

import msgspec

from tidemill.core.errors import TidemillError

Answer_co = TypeVar("Answer_co", covariant=True)
T = TypeVar("T")

#: What a page has unless the call says otherwise.
PAGE = 100


class Call(msgspec.Struct, Generic[Answer_co], frozen=True, tag=True):
    """A request to the store; `Call[int]` is answered by an int."""


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """A page. `next`: give it as `after` for the page that follows; None: this is the last one."""

    rows: tuple[T, ...]
    next: str | None = None


def find_answer_type(kind: type[Call[object]]) -> object:
    """Return the type of the answer to a kind of call."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    (answer,) = get_args(base)
    return answer


class RefusalKind(enum.StrEnum):
    """Why a call is refused.

    FENCED: the attempt, the trigger or the service that speaks has been replaced or has ended. UNKNOWN: what it names
    does not exist. CONFLICT: it contradicts what is stored. INVALID: it makes no sense.
    """

    FENCED = "fenced"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    INVALID = "invalid"


class CallRefusedError(TidemillError):
    """The store refuses a call; repeating it does not help.

    Args:
        kind: Why.
        message: What is wrong, and what to do, in one line.
    """

    def __init__(self, kind: RefusalKind, message: str) -> None:
        """Keep the kind for the program and the text for people."""
        super().__init__(message)
        self.kind = kind
