"""The store in a SQLite file: one writing process with one writer thread and one reader thread.

Invariants: a returned commit is on disk (WAL, `synchronous=FULL`). A write transaction takes the write lock at its
start (BEGIN IMMEDIATE), so that it never fails halfway. Each connection is used only by its own thread. Readers, in
this and other processes, never block a writer.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import SingletonThreadPool

from tidemill.core.errors import ConfigError
from tidemill.store.calls.call import Call
from tidemill.store.calls.dispatch import answer_call
from tidemill.store.ciphers import Cipher
from tidemill.store.context import build_context
from tidemill.store.database import build_remote_error
from tidemill.store.doorbell import Doorbell
from tidemill.store.engines.call_batches import CallBatches, build_failure, check_transaction
from tidemill.store.engines.lock import StoreLock
from tidemill.store.engines.recovery import FileWatch, StoreLostError, save_copy
from tidemill.store.migrate import NoTablesError, check_readable, upgrade
from tidemill.store.queries.encrypted import list_encrypted

T = TypeVar("T")

#: How long another program (the sqlite3 shell, a backup) may hold the file before a write fails and is retried.
BUSY_SECONDS = 5.0
#: How long a reader waits for the writer to create the tables.
_CREATE_SECONDS = 5.0
_PAUSE_SECONDS = 0.05
#: The log is truncated to this size after a checkpoint, so that one burst does not leave a large file behind.
_WAL_BYTES = 64 * 1024 * 1024


class SqliteDatabase:
    """An open SQLite file; created by `open_sqlite` and `open_sqlite_reader`."""

    def __init__(
        self, path: Path, writer: Engine | None, reader: Engine, lock: StoreLock | None, cipher: Cipher | None = None
    ) -> None:
        cipher = cipher or Cipher()
        self._path = path
        self._writer = writer
        self._reader = reader
        self._lock = lock
        self._writing = ThreadPoolExecutor(1, "tidemill-store-write")
        self._reading = ThreadPoolExecutor(1, "tidemill-store-read")
        self._cipher = cipher
        self._watch: FileWatch | None = None
        self._doorbell = Doorbell()
        self._calls = CallBatches(self.label, self.write, cipher, self._doorbell.ring)

    @property
    def label(self) -> str:
        """The path of the file."""
        return str(self._path)

    @property
    def exclusive(self) -> bool:
        """Whether this process holds the file's lock."""
        return self._lock is not None

    async def write(self, work: Callable[[Connection], T]) -> T:
        """Run work in an immediate transaction on the writer thread; see `Database.write`."""
        if self._writer is None:
            raise ConfigError(f"the store {self._path} is open for reading only")
        return await asyncio.get_running_loop().run_in_executor(self._writing, self._run, self._writer, work)

    async def read(self, work: Callable[[Connection], T]) -> T:
        """Run work on the reader thread; see `Database.read`."""
        return await asyncio.get_running_loop().run_in_executor(self._reading, self._run, self._reader, work)

    @property
    def doorbell(self) -> Doorbell:
        """The bells of this process."""
        return self._doorbell

    async def call(self, request: Call[T]) -> T:
        """Answer a named call in one transaction with other waiting calls; see `Database.call`."""
        if self._writer is not None and not request.reads:
            return await self._calls.call(request)
        return await self.read(lambda connection: self._answer_read(connection, request))

    def _answer_read(self, connection: Connection, request: Call[T]) -> T:
        if not request.reads:
            raise ConfigError(f"the store {self._path} is open for reading only")
        try:
            return answer_call(connection, request, build_context(connection, self._cipher))
        except Exception as error:
            raise build_failure(self.label, request, error) from error

    def watch_files(self) -> None:
        """Start to detect the removal or move of the file."""
        if self._lock is not None:
            self._watch = FileWatch(self._path, self._lock.path)

    def find_loss(self) -> str | None:
        """Describe the loss of the file; see `Database.find_loss`."""
        return None if self._watch is None else self._watch.find_loss()

    async def recover(self) -> Path:
        """Save the store's content to another file; see `Database.recover`."""
        watch, writer = self._watch, self._writer
        if watch is None or writer is None:
            raise StoreLostError(f"the store {self._path} is not open for writing")

        def save() -> Path:
            with writer.connect() as connection:
                source: Any = connection.connection.driver_connection
                path = save_copy(source, self._path.name, watch)
            self._cipher.save_key(path.with_name(f"{path.name}.key"))
            return path

        return await asyncio.get_running_loop().run_in_executor(self._writing, save)

    def publish(self, address: str) -> None:
        """Publish the address at which this process answers calls; it must hold the file's lock."""
        if self._lock is not None:
            self._lock.publish(address)

    async def close(self) -> None:
        """Wait for running transactions, then close the file and release the lock."""
        await self._calls.close()
        loop = asyncio.get_running_loop()
        if self._writer is not None:
            await loop.run_in_executor(self._writing, self._writer.dispose)
        await loop.run_in_executor(self._reading, self._reader.dispose)
        self._writing.shutdown(wait=False)
        self._reading.shutdown(wait=False)
        if self._watch is not None:
            self._watch.close()
        if self._lock is not None:
            self._lock.release()

    def _run(self, engine: Engine, work: Callable[[Connection], T]) -> T:
        try:
            with engine.begin() as connection:
                result = work(connection)
                check_transaction(connection)
                return result
        except (SQLAlchemyError, sqlite3.Error, OSError, UnicodeError) as error:
            raise build_remote_error(self.label, error) from error


async def open_sqlite(path: Path, cipher: Cipher | None = None) -> SqliteDatabase:
    """Open a file for writing, create it if it is missing, and bring its tables up to date.

    Raises:
        StoreInUseError: Another process writes to the file.
        ConfigError: The file is unusable, or a newer tidemill has upgraded it.
        RemoteError: SQLite failed.
    """
    lock = StoreLock(path)
    await asyncio.to_thread(lock.acquire)
    _create_private(path)
    database = SqliteDatabase(path, _create_engine(path, "rwc"), _create_engine(path, "ro"), lock, cipher)
    try:
        await database.write(upgrade)
        database.watch_files()
        if cipher is not None:
            await database.write(lambda connection: cipher.prepare(lambda: list_encrypted(connection)))
    except BaseException:
        await database.close()
        raise
    return database


async def open_sqlite_reader(path: Path, cipher: Cipher | None = None) -> SqliteDatabase:
    """Open a file for reading; another process may write to it at the same time.

    Raises:
        ConfigError: The file does not exist, or its tables have another revision.
        RemoteError: SQLite failed.
    """
    if not await asyncio.to_thread(path.is_file):
        raise ConfigError(f"the store {path} does not exist; `tidemill triggers run` creates it where store.url says")
    database = SqliteDatabase(path, None, _create_engine(path, "ro"), None, cipher)
    try:
        await _wait_for_tables(database)
    except BaseException:
        await database.close()
        raise
    return database


def _create_private(path: Path) -> None:
    """Create a missing file that only this user can read, because it will hold events, results and logs."""
    # SQLite gives the files next to it the same mode. If the file cannot be created here, SQLite reports the error
    # later.
    with contextlib.suppress(OSError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))


async def _wait_for_tables(database: SqliteDatabase) -> None:
    deadline = asyncio.get_running_loop().time() + _CREATE_SECONDS
    while True:
        try:
            return await database.read(lambda connection: check_readable(connection, database.label))
        except NoTablesError:
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)


def _create_engine(path: Path, mode: str) -> Engine:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?mode={mode}",
            uri=True,
            timeout=BUSY_SECONDS,
            # `begin_transaction` begins transactions, not the driver.
            isolation_level=None,
            # `dispose` closes the connection from another thread if its own thread has exited.
            check_same_thread=False,
        )
        if mode != "ro":
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute(f"PRAGMA journal_size_limit={_WAL_BYTES}")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=SingletonThreadPool, pool_size=1)
    begin = "BEGIN" if mode == "ro" else "BEGIN IMMEDIATE"

    def begin_transaction(connection: Connection) -> Any:
        connection.exec_driver_sql(begin)

    event.listen(engine, "begin", begin_transaction)
    return engine
