"""Executes all waiting calls in one transaction, with a savepoint each, and answers them after the commit.

A call never waits for others to arrive: while one transaction commits, the calls of the next one accumulate.

Invariants: a failed call is rolled back alone and does not affect the others. No call is answered before its
transaction is committed; bells ring after the answers.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import structlog
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError

from tidemill.core.errors import ConfigError, InvariantError, RemoteError, describe_error
from tidemill.core.tasks.inputs import Channel
from tidemill.store.calls.call import Call, CallRefusedError
from tidemill.store.calls.dispatch import answer_call
from tidemill.store.ciphers import Cipher
from tidemill.store.context import CallContext, read_now
from tidemill.store.database import build_remote_error
from tidemill.store.statements import NeedsIsolationError, savepoint

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: The maximum number of calls per transaction.
_MOST = 256

_Waiting = tuple[Call[Any], asyncio.Future[Any]]
_Write = Callable[[Callable[[Connection], "_Done"]], Awaitable["_Done"]]


class _Done:
    """The result of a transaction: the answer or error of each call, and the bells to ring."""

    def __init__(self) -> None:
        self.answers: list[Any] = []
        self.bells: set[Channel] = set()


class CallBatches:
    """Answers calls in batches.

    Args:
        label: The store's name in messages.
        write: Runs work in a transaction: `Database.write`.
        cipher: Encrypts the secrets in the database.
        ring: Called on the loop after a commit, with the bells to ring.
    """

    def __init__(self, label: str, write: _Write, cipher: Cipher, ring: Callable[[set[Channel]], None]) -> None:
        self._label = label
        self._write = write
        self._cipher = cipher
        self._ring = ring
        self._waiting: list[_Waiting] = []
        self._task: asyncio.Task[None] | None = None

    async def call(self, request: Call[T]) -> T:
        """Answer a call; see `Database.call`."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._waiting.append((request, future))
        if self._task is None:
            self._task = loop.create_task(self._run(), name="calls to the store")
        return await future

    async def close(self) -> None:
        """Wait until the outstanding calls are answered."""
        while self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:_MOST], self._waiting[_MOST:]
                await self._answer(batch)
        finally:
            self._task = None

    async def _answer(self, batch: list[_Waiting]) -> None:
        requests = [request for request, future in batch if not future.cancelled()]
        futures = [future for _, future in batch if not future.cancelled()]
        try:
            done = await self._write(lambda connection: self._work(connection, requests))
            answers = done.answers
        except Exception as error:
            done, answers = _Done(), [error] * len(futures)
        for future, one in zip(futures, answers, strict=True):
            if future.cancelled():
                continue
            if isinstance(one, Exception):
                future.set_exception(one)
            else:
                future.set_result(one)
        if done.bells:
            self._ring(done.bells)

    def _work(self, connection: Connection, requests: list[Call[Any]]) -> _Done:
        done = _Done()
        now_us = read_now(connection)
        for request in requests:
            try:
                try:
                    self._answer_one(connection, request, now_us, done)
                except NeedsIsolationError:
                    check_transaction(connection)
                    self._answer_one(connection, request, now_us, done, isolates=True)
            except Exception as error:
                check_transaction(connection)
                done.answers.append(build_failure(self._label, request, error))
        return done

    def _answer_one(
        self, connection: Connection, request: Call[Any], now_us: int, done: _Done, *, isolates: bool = False
    ) -> None:
        context = CallContext(lambda: now_us, self._cipher, isolates=isolates)
        with savepoint(connection):
            answer = answer_call(connection, request, context)
        done.answers.append(answer)
        done.bells |= context.bells


def check_transaction(connection: Connection) -> None:
    """Check that SQLite has not rolled back the transaction by itself, as it may when the disk is full.

    Without this check the earlier work would be lost, each later statement would commit by itself, and the final COMMIT
    would report no error.

    Raises:
        sqlite3.OperationalError: SQLite has rolled back the transaction.
    """
    driver = connection.connection.driver_connection
    if isinstance(driver, sqlite3.Connection) and not driver.in_transaction:
        raise sqlite3.OperationalError("SQLite has rolled the transaction back; the disk may be full")


def build_failure(label: str, request: Call[Any], error: Exception) -> Exception:
    """Convert an exception raised by a call to an error of the store."""
    if isinstance(error, (CallRefusedError, RemoteError, ConfigError)):
        return error
    if isinstance(error, (SQLAlchemyError, sqlite3.Error, OSError, UnicodeError)):
        return build_remote_error(label, error)
    name = type(request).__name__
    log.error("a call to the store failed; this is a bug in tidemill", call=name, exc_info=error)
    return InvariantError(f"the call {name} failed: {describe_error(error)}; please report it with the log")
