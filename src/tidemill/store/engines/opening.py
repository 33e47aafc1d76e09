"""Opens the store at a URL.

URLs have the form `sqlite:///relative.db`, `sqlite:////absolute.db` or `postgresql://user:password@host/name`.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError
from tidemill.store.ciphers import Cipher
from tidemill.store.database import Database, SchemaChange, StoreClient

_SQLITE = re.compile(r"sqlite(?:\+\w+)?:///(?P<path>[^?#]+)\Z")
_POSTGRES = re.compile(r"postgres(?:ql)?(?:\+\w+)?(?P<rest>://.*)\Z", re.DOTALL)
DEFAULT_NAME = "tidemill.db"
#: How long a socket may take to accept a connection; only a socket with a long backlog does not accept at once.
_PROBE_SECONDS = 1.0


def choose_store_url(configured: str, folder: Path) -> str:
    """Return the URL of the store to open.

    Args:
        configured: The value of `store.url`; empty: a SQLite file in the folder.
        folder: The folder of the trigger list.

    Example:
        >>> choose_store_url("", Path("/srv"))
        'sqlite:////srv/tidemill.db'
    """
    return configured or f"sqlite:///{(folder / DEFAULT_NAME).absolute()}"


def has_one_writer(url: str) -> bool:
    """Return whether only one process at a time can write to a store.

    Raises:
        ConfigError: The URL is not a store URL.
    """
    path, _ = _parse_url(url)
    return path is not None


def find_file(url: str) -> Path | None:
    """Return the file of a SQLite store; None for PostgreSQL.

    Raises:
        ConfigError: The URL is not a store URL.
    """
    return _parse_url(url)[0]


async def open_store(
    url: str, cipher: Cipher | None = None, *, schema: SchemaChange = SchemaChange.UPGRADE, listen_url: str = ""
) -> Database:
    """Open a store for writing and bring its tables up to date.

    Args:
        url: The store URL.
        cipher: Encrypts the secrets in the database; None: they are stored unencrypted.
        schema: What may be done to the tables of PostgreSQL.
        listen_url: A URL that leads directly to the server, if the other one leads to a pooler; empty: the same.

    Raises:
        ConfigError: The URL is not a store URL, another process writes to the file, or the tables have another
            revision.
        RemoteError: The database is unreachable.
    """
    path, address = _parse_url(url)
    if path is not None:
        from tidemill.store.engines.sqlite import open_sqlite

        return await open_sqlite(path, cipher)
    with _explain_missing_driver():
        from tidemill.store.engines.postgres import open_postgres
    return await open_postgres(address, cipher=cipher, schema=schema, listen_url=listen_url)


async def open_reader(url: str, cipher: Cipher | None = None) -> Database:
    """Open a store for reading; another process may write to it at the same time.

    Raises:
        ConfigError: The URL is not a store URL, or the store does not exist.
        RemoteError: The database is unreachable.
    """
    path, address = _parse_url(url)
    if path is not None:
        from tidemill.store.engines.sqlite import open_sqlite_reader

        return await open_sqlite_reader(path, cipher)
    with _explain_missing_driver():
        from tidemill.store.engines.postgres import open_postgres_reader
    return await open_postgres_reader(address, cipher)


async def open_caller(
    url: str, cipher: Cipher | None = None, *, schema: SchemaChange = SchemaChange.UPGRADE
) -> StoreClient:
    """Open a store for calls, directly or through the process that has it open; see `open_store`.

    Raises:
        StoreInUseError: The process that writes to the file answers no calls, because it is starting or stopping.
        ConfigError: The URL is not a store URL.
        RemoteError: The database is unreachable.
    """
    path, _ = _parse_url(url)
    if path is None:
        return await open_store(url, cipher, schema=schema)
    from tidemill.store.engines.lock import StoreInUseError, StoreLock

    try:
        return await open_store(url, cipher)
    except StoreInUseError:
        address = await asyncio.to_thread(StoreLock(path).read_address)
        if address is None or not await asyncio.to_thread(_is_listening, address):
            raise
        from tidemill.store.wire.remote import RemoteStore

        return RemoteStore(Path(address), str(path))


def _is_listening(address: str) -> bool:
    """Return whether a process listens at a Unix socket, without checking that it answers calls."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_SECONDS)
        try:
            probe.connect(address)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # for example a full backlog; the first call will report it
            return True
    return True


@contextlib.contextmanager
def _explain_missing_driver() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"a store in PostgreSQL needs the package {error.name}; install it: pip install 'tidemill[postgres]'"
        ) from error


def _parse_url(url: str) -> tuple[Path | None, str]:
    sqlite = _SQLITE.match(url)
    if sqlite and unquote(sqlite["path"]) != ":memory:":
        return Path(unquote(sqlite["path"])), ""
    postgres = _POSTGRES.match(url)
    if postgres:
        return None, f"postgresql{postgres['rest']}"
    raise ConfigError(
        f"store.url {redact_text(url)!r} is not a supported store URL; use sqlite:///folder/file.db, "
        "sqlite:////absolute/file.db or postgresql://user:password@host:5432/name"
    )
