"""The interface of the store's databases, and the classification of their errors.

Invariants: `write` returns only after a durable commit. Work is a function of a connection; it runs inside one
transaction, and runs again only if that transaction lost a conflict. After a retryable `RemoteError` the commit may or
may not have happened, because the answer may have been lost. A `RemoteError` that is not retryable means that the
database rejects the content.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from tidemill.config.redaction import redact_text
from tidemill.core.errors import RemoteError
from tidemill.store.calls.call import Call
from tidemill.store.doorbell import Doorbell

# Services that only call a store start faster and use less memory without SQLAlchemy.
if TYPE_CHECKING:
    from sqlalchemy import Connection

T = TypeVar("T")

#: SQLSTATE classes that blame the content: data exceptions, constraint violations, exceeded program limits.
_CONTENT_CLASSES = frozenset({"22", "23", "54"})
#: The SQLSTATEs of serialization failures and deadlocks.
_CONFLICTS = frozenset({"40001", "40P01"})
_SQLITE_CONTENT = (sqlite3.DataError, sqlite3.IntegrityError, OverflowError)
_TEXT_LIMIT = 2_000


class StoreAwayError(RemoteError):
    """The database cannot be reached. Its process has logged that, and logs when it can be reached again."""


class SchemaChange(enum.Enum):
    """What a process may do to the tables of a PostgreSQL database that it opens.

    UPGRADE: create them, or bring them up to date. CREATE: create them if there are none. NONE: nothing; services of
    other versions may use them.
    """

    UPGRADE = "upgrade"
    CREATE = "create"
    NONE = "none"


class Database(Protocol):
    """An open store."""

    @property
    def label(self) -> str:
        """The store's name in messages, without secrets."""
        ...

    @property
    def exclusive(self) -> bool:
        """Whether no other process can write to the store while this one has it open."""
        ...

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in a transaction; return its result after the commit.

        Raises:
            RemoteError: The database failed.
        """
        ...

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run read-only work in a transaction and return its result.

        Raises:
            RemoteError: The database failed.
        """
        ...

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell that wakes services when they have work."""
        ...

    async def call(self, request: Call[T]) -> T:
        """Answer a named call; return after its changes are committed.

        Raises:
            CallRefusedError: The call was refused and changed nothing.
            RemoteError: The database failed; if the error is retryable, the call may have been executed.
        """
        ...

    def publish(self, address: str) -> None:
        """Publish the address at which this process answers calls, for processes that cannot open the store."""
        ...

    def find_loss(self) -> str | None:
        """Return a description of the loss if the store's file was removed or moved, else None; may block briefly."""
        ...

    async def recover(self) -> Path:
        """Save the content of a store that lost its file, and its key, to new files; return the path of the database.

        Raises:
            StoreLostError: The content cannot be saved.
        """
        ...

    async def close(self) -> None:
        """Wait for running transactions, then close the database."""
        ...


class StoreCalls(Protocol):
    """Answers named calls; most services need nothing else of a store."""

    async def call(self, request: Call[T]) -> T:
        """Answer a named call; see `Database.call`."""
        ...


class StoreClient(StoreCalls, Protocol):
    """A store that answers calls: a database, or a connection to the process that has it open."""

    @property
    def label(self) -> str:
        """The store's name in messages, without secrets."""
        ...

    @property
    def doorbell(self) -> Doorbell:
        """The doorbell that wakes services when they have work."""
        ...

    async def close(self) -> None: ...


def build_remote_error(label: str, error: BaseException) -> RemoteError:
    """Convert an error of SQLAlchemy, the driver or the network to a RemoteError.

    Args:
        label: The store's name.
        error: The error.
    """
    cause = _find_cause(error)
    text = redact_text(f"{type(cause).__name__}: {cause}"[:_TEXT_LIMIT])
    if is_conflict(error):
        return RemoteError(f"a transaction on the store {label} keeps conflicting with other transactions: {text}")
    if _blames_content(cause):
        return RemoteError(f"the store {label} rejects the content: {text}", retryable=False)
    return RemoteError(f"the store {label} is unreachable or failing: {text}")


def is_conflict(error: BaseException) -> bool:
    """Return whether a transaction was rolled back because of a conflict and can be repeated at once."""
    return getattr(_find_cause(error), "sqlstate", None) in _CONFLICTS


def _find_cause(error: BaseException) -> BaseException:
    # Use the driver's own text: SQLAlchemy appends the statement and its parameters, which contain user data.
    original = getattr(error, "orig", None)
    return original if isinstance(original, BaseException) else error


def _blames_content(cause: BaseException) -> bool:
    state = getattr(cause, "sqlstate", None)
    if isinstance(state, str):
        return state[:2] in _CONTENT_CLASSES
    # A text with lone surrogates fails before it reaches the database.
    return isinstance(cause, (*_SQLITE_CONTENT, UnicodeError))
