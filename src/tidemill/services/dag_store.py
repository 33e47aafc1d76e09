"""Where the DAGs of a folder are stored, and how a process reaches that store.

Invariant: a SQLite file has one writer. Who comes second sends its calls to the first, over that one's socket.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from tidemill.config.settings import Settings
from tidemill.core.errors import ConfigError
from tidemill.store.ciphers import Cipher, create_key
from tidemill.store.database import Caller
from tidemill.store.lock import StoreInUseError
from tidemill.store.opening import find_file, open_caller

DEFAULT_NAME = "dags.db"
#: How long a store is waited for that another command has open.
_BUSY_SECONDS = 5.0
_PAUSE_SECONDS = 0.05


def choose_folder(settings: Settings, given: Path | None) -> Path:
    """Return the folder of DAG files, absolute.

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
    return folder.resolve()


def choose_url(settings: Settings, folder: Path) -> str:
    """Return the URL of the store of a folder of DAGs: `store.url`, else a SQLite file beside the folder."""
    return settings.store.url or f"sqlite:///{folder.parent / DEFAULT_NAME}"


def build_cipher(settings: Settings, url: str, *, create: bool = False) -> Cipher:
    """Return what encrypts secrets: the keys of `store.encryption_key`, else that of the key file beside the store.

    Args:
        settings: `store.encryption_key` is read.
        url: The store.
        create: Whether a key file is created where there is neither.

    Raises:
        ConfigError: A key is wrong, or the file cannot be used.
    """
    if settings.store.encryption_key:
        return Cipher([key.strip() for key in settings.store.encryption_key.split(",")])
    path = find_file(url)
    if path is None:
        return Cipher()
    key_file = path.with_name(f"{path.name}.key")
    try:
        if create and not key_file.exists():
            descriptor = os.open(key_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(f"{create_key()}\n")
        return Cipher(key_file.read_text().split() if key_file.exists() else ())
    except OSError as error:
        raise ConfigError(
            f"the key file {key_file} cannot be used: {error.strerror}; correct its permissions, or set "
            "store.encryption_key"
        ) from error


async def open_dag_store(settings: Settings, folder: Path, *, create: bool = False) -> Caller:
    """Open the store of a folder of DAGs for calls.

    Args:
        settings: `store` is read.
        folder: The folder, absolute.
        create: Whether it is created if it does not exist.

    Raises:
        ConfigError: It does not exist, or cannot be used.
        RemoteError: It cannot be reached.
    """
    url = choose_url(settings, folder)
    path = find_file(url)
    if path is not None and not create and not path.exists():
        raise ConfigError(
            f"there is no store {path} yet; `tidemill dev {folder.name}` creates it, and so does `tidemill db migrate`"
        )
    deadline = asyncio.get_running_loop().time() + _BUSY_SECONDS
    while True:
        try:
            return await open_caller(url, build_cipher(settings, url, create=create))
        except StoreInUseError:
            # Another command has it open for a moment, or `dev` begins and has not said yet where it answers.
            if asyncio.get_running_loop().time() >= deadline:
                raise
        await asyncio.sleep(_PAUSE_SECONDS)
