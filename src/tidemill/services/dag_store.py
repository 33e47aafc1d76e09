"""Where the DAGs of a folder are stored, and how a process reaches that store.

Invariant: a SQLite file has one writer. Who comes second sends its calls to the first, over that one's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.store.ciphers import Cipher, build_cipher
from tidemill.store.database import StoreClient
from tidemill.store.engines.lock import StoreInUseError
from tidemill.store.engines.opening import find_file, open_caller

DEFAULT_NAME = "dags.db"
#: How long a store is waited for that another command has open.
_BUSY_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


def choose_folder(settings: Settings, given: Path | None) -> Path:
    """Return the folder of DAG files, absolute; links in its path stay, since they may be moved (git-sync).

    Args:
        settings: `dags.folder` is read.
        given: What the command line says; None: nothing.

    Raises:
        ConfigError: It is not a folder.
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
    """Return the absolute path of a folder with its links, those to the current folder included."""
    if ".." in folder.parts:  # above what a link leads to, not above the link
        return folder.resolve()
    here, shown = Path.cwd(), Path(os.environ.get("PWD", ""))
    # The shell knows by which links the current folder was entered; other programs may have left the variable behind.
    with contextlib.suppress(OSError):
        if shown.is_absolute() and shown.samefile(here):
            here = shown
    return Path(os.path.normpath(here / folder))


def choose_url(settings: Settings, folder: Path) -> str:
    """Return the URL of the store of a folder of DAGs: `store.url`, else a SQLite file beside the folder.

    Where a link leads to the folder, or to one above it, the file is beside the first such link: what that points to
    may be replaced at any time, and the store with it.
    """
    return settings.store.url or f"sqlite:///{_find_store_folder(folder) / DEFAULT_NAME}"


def _find_store_folder(folder: Path) -> Path:
    for path in reversed([folder, *folder.parents]):
        # Others that users cannot replace, such as a link from /home, belong to the system.
        if path.is_symlink() and os.access(path.parent, os.W_OK):
            return path.parent
    return folder.parent


def choose_cipher(settings: Settings, url: str) -> Cipher:
    """Return what encrypts secrets: the keys of `store.encryption_key`, else that of a key file beside the store.

    Raises:
        ConfigError: A key is wrong, or the file cannot be used.
    """
    path = find_file(url)
    return build_cipher(settings.store.encryption_key, None if path is None else path.with_name(f"{path.name}.key"))


class NoStoreError(ConfigError):
    """The store of a folder of DAGs does not exist yet."""


async def open_dag_store(settings: Settings, folder: Path, *, create: bool = False) -> StoreClient:
    """Open the store of a folder of DAGs for calls.

    Args:
        settings: `store` is read.
        folder: The folder, absolute.
        create: Whether it is created if it does not exist.

    Raises:
        NoStoreError: It does not exist.
        ConfigError: It cannot be used.
        RemoteError: It cannot be reached.
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
            return await open_caller(url, choose_cipher(settings, url))
        except StoreInUseError:
            # Another command has it open for a moment, or `dev` is starting or ending, and does not answer.
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
