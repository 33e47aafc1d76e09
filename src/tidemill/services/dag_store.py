"""Locates the store of a folder of DAGs and opens it for calls.

Invariant: a SQLite file has one writer. Other processes send their calls to the writer's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.store.ciphers import Cipher, build_cipher
from tidemill.store.database import SchemaChange, StoreClient
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import find_file, open_caller

DEFAULT_NAME = "dags.db"
#: How long to wait for a store that another command has open.
_BUSY_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


def choose_folder(settings: Settings, given: Path | None) -> Path:
    """Return the absolute path of the folder of DAG files; links in the path stay, since git-sync, for example, moves
    them.

    Args:
        settings: Provides `dags.folder`.
        given: The folder on the command line; None if there is none.

    Raises:
        ConfigError: The path is not a folder.
    """
    folder = Path(settings.dags.folder) if given is None else given
    if not folder.is_dir():
        if folder.exists():
            raise ConfigError(f"{folder} is not a folder; name the folder that contains the DAG files")
        raise ConfigError(
            f"there is no folder {folder}; create it, name another one, or begin with an example: "
            "tidemill init my-dags --template dags"
        )
    return make_absolute(folder)


def make_absolute(folder: Path) -> Path:
    """Return the absolute path of a folder with its links kept, including those in the path of the current folder."""
    if ".." in folder.parts:  # ".." refers to the parent of a link's target, not of the link
        return folder.resolve()
    here, shown = Path.cwd(), Path(os.environ.get("PWD", ""))
    # PWD has the links by which the shell entered the current folder; it may be stale, so compare it with the folder.
    with contextlib.suppress(OSError):
        if shown.is_absolute() and shown.samefile(here):
            here = shown
    return Path(os.path.normpath(here / folder))


def choose_url(settings: Settings, folder: Path) -> str:
    """Return the URL of the store of a folder of DAGs: `store.url`, or else a SQLite file next to the folder.

    If the path of the folder contains a link, the file is next to the first link, because the link's target may be
    replaced at any time, and a store inside it would be lost.
    """
    return settings.store.url or f"sqlite:///{_find_store_folder(folder) / DEFAULT_NAME}"


def _find_store_folder(folder: Path) -> Path:
    for path in reversed([folder, *folder.parents]):
        # Links that the user cannot replace, such as one from /home, belong to the system.
        if path.is_symlink() and os.access(path.parent, os.W_OK):
            return path.parent
    return folder.parent


def choose_cipher(settings: Settings, url: str) -> Cipher:
    """Return the cipher for secrets, with the keys of `store.encryption_key` or of a key file next to the store.

    Raises:
        ConfigError: A key is invalid, or the key file cannot be used.
    """
    path = find_file(url)
    return build_cipher(settings.store.encryption_key, None if path is None else path.with_name(f"{path.name}.key"))


class NoStoreError(ConfigError):
    """The store of a folder of DAGs does not exist yet."""


async def open_dag_store(
    settings: Settings, folder: Path, *, create: bool = False, schema: SchemaChange = SchemaChange.CREATE
) -> StoreClient:
    """Open the store of a folder of DAGs for calls.

    Args:
        settings: Provides the section `store`.
        folder: The folder, absolute.
        create: Whether to create a missing SQLite file.
        schema: What may be done to the tables of PostgreSQL.

    Raises:
        NoStoreError: The store does not exist.
        ConfigError: The store cannot be used.
        RemoteError: The store cannot be reached.
    """
    url = choose_url(settings, folder)
    path = find_file(url)
    if path is not None and not create and not path.exists():
        raise NoStoreError(
            f"there is no store {path} yet; `tidemill dev {folder.name}` creates it, and so does `tidemill db migrate`"
        )
    deadline = asyncio.get_running_loop().time() + _BUSY_SECONDS
    while True:
        try:
            return await open_caller(url, choose_cipher(settings, url), schema=schema)
        except StoreInUseError:
            # Another command has the store open for a moment, or `dev` is starting or stopping and does not answer.
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
