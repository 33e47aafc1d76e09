"""The interface of the store's databases, and how their failures are classified.

Invariants: `write` returns only after a durable commit; work is a function over a connection, called inside one
transaction, and called again in another one only if the first lost to other transactions. A retryable `RemoteError`
leaves open whether a commit took place: the answer may have been lost. One that is not retryable means that the
database refuses the content.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidemill.config.redaction import redact_text
from tidemill.core.errors import RemoteError
from tidemill.store.calls.call import Call
from tidemill.store.doorbell import Doorbell

# Services that only call a store start faster, and are smaller, without SQLAlchemy.
if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

#: Classes of SQLSTATE that blame the content: data exceptions, constraints, exceeded program limits.
_CONTENT_CLASSES = frozenset({"22", "23", "54"})
#: SQLSTATEs of a serialization failure and of a deadlock.
_CONFLICTS = frozenset({"40001", "40P01"})
_SQLITE_CONTENT = (sqlite3.DataError, sqlite3.IntegrityError, OverflowError)
_TEXT_LIMIT = 2_000


class Database(Protocol):
    """An open store."""

    @property
    def label(self) -> str:
        """Its name in messages, without secrets."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether other processes cannot write to it while this one has it open."""
        ...

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; return its result once the transaction is committed.

        Raises:
            RemoteError: The database failed.
        """
        ...

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run work that changes nothing in a transaction, and return its result.

        Raises:
            RemoteError: The database failed.
        """
        ...

    @property
    def doorbell(self) -> Doorbell:
        """What tells services that they have work."""
        ...

    async def call(self, request: Call[T]) -> T:
        """Answer a named call, once what it changes is committed.

        Raises:
            CallRefusedError: The call is refused, and nothing has changed.
            RemoteError: The database failed; if it is retryable, the call may have been carried out.
        """
        ...

    def publish(self, address: str) -> None:
        """Let other processes know where this one answers calls, if they cannot open the store themselves."""
        ...

    def find_loss(self) -> str | None:
        """Return what has happened to its file, if that was removed or moved away; it may block for a moment."""
        ...

    async def recover(self) -> Path:
        """Save what is in a store that lost its file to another one beside it, with its key, and return its path.

        Raises:
            StoreLostError: It cannot be saved.
        """
        ...

    async def close(self) -> None:
        """Wait for running transactions, and close it."""
        ...


class Calls(Protocol):
    """What answers named calls, and nothing else: all that most services need of a store."""

    async def call(self, request: Call[T]) -> T:
        """Answer a named call; see `Database.call`."""
        ...


class Caller(Calls, Protocol):
    """A store for calls: a database, or a connection to the process that has it open."""

    @property
    def label(self) -> str:
        """Its name in messages, without secrets."""
        ...

    @property
    def doorbell(self) -> Doorbell:
        """What tells services that they have work."""
        ...

    async def close(self) -> None:
        """Close it."""
        ...


def build_remote_error(label: str, error: BaseException) -> RemoteError:
    """Return the store's error for a driver's error.

    Args:
        label: The name of the database.
        error: An error of SQLAlchemy, a driver or the network.
    """
    cause = _find_cause(error)
    text = redact_text(f"{type(cause).__name__}: {cause}"[:_TEXT_LIMIT])
    if is_conflict(error):
        return RemoteError(f"a transaction on the store {label} keeps losing to other transactions: {text}")
    if _blames_content(cause):
        return RemoteError(f"the store {label} refuses the content: {text}", retryable=False)
    return RemoteError(f"the store {label} cannot be reached or does not work: {text}")


def is_conflict(error: BaseException) -> bool:
    """Return whether a transaction was rolled back in favour of another one, and can be repeated at once."""
    return getattr(_find_cause(error), "sqlstate", None) in _CONFLICTS


def _find_cause(error: BaseException) -> BaseException:
    # The driver's own text: SQLAlchemy adds the statement and its parameters, which contain users' data.
    original = getattr(error, "orig", None)
    return original if isinstance(original, BaseException) else error


def _blames_content(cause: BaseException) -> bool:
    state = getattr(cause, "sqlstate", None)
    if isinstance(state, str):
        return state[:2] in _CONTENT_CLASSES
    # A text with lone surrogates fails before it reaches a database.
    return isinstance(cause, (*_SQLITE_CONTENT, UnicodeError))
