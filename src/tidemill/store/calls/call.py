"""The base class of named calls: a request as a value, typed with its answer, that names the function that answers it.

A call is answered in this process or sent to the process that has the store open; `await store.call(request)` works for
both. A request that is invalid raises `CallRefusedError` and changes nothing, whatever the other calls of the same
transaction do.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar, get_args

import msgspec

from tidemill.core.errors import TidemillError

Answer_co = TypeVar("Answer_co", covariant=True)
T = TypeVar("T")
KindT = TypeVar("KindT", bound="type[Call[Any]]")

#: The default page size.
PAGE = 100


class Call(msgspec.Struct, Generic[Answer_co], frozen=True, tag=True):
    """A request to the store; the answer to a `Call[int]` is an int.

    Attributes:
        function: The function that answers it, as `module:name` below `store.queries`; its parameters are the
            connection, the request and the `CallContext`. Named by its path, because clients do not import SQLAlchemy.
        reads: Whether it changes nothing; such a call is answered outside the write transactions.
    """

    function: ClassVar[str]
    reads: ClassVar[bool]


def answered_by(function: str, *, reads: bool = False) -> Callable[[KindT], KindT]:
    """Declare the function that answers a kind of call, and whether it only reads; see `Call`.

    Example:
        >>> @answered_by("dags.values.task_values:get_variable", reads=True)
        ... class GetValue(Call[str | None], frozen=True):
        ...     key: str
        >>> GetValue.reads
        True
    """

    def declare(kind: KindT) -> KindT:
        kind.function, kind.reads = function, reads
        return kind

    return declare


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """A page. `next`: the `after` of the next page; None: this is the last page."""

    rows: tuple[T, ...]
    next: str | None = None


def find_answer_type(kind: type[Call[object]]) -> object:
    """Return the answer type of a kind of call."""
    (base,) = kind.__orig_bases__  # type: ignore[attr-defined]
    (answer,) = get_args(base)
    return answer


class RefusalKind(enum.StrEnum):
    """Why a call was refused.

    FENCED: the sender's attempt, trigger or service has been replaced or has ended. UNKNOWN: the named object does not
    exist. CONFLICT: the request contradicts stored data. INVALID: the request is malformed.
    """

    FENCED = "fenced"
    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    INVALID = "invalid"


class CallRefusedError(TidemillError):
    """The store refused a call; repeating the call does not help.

    Args:
        kind: The kind of refusal.
        message: What is wrong and what to do, in one line.
    """

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
