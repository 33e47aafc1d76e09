"""Encrypts what must not lie readable in the database: variables, connections, and what deferrals keep.

Invariants: a key file is never created over values that another key encrypted; a text says by its first word how it
was written, so that texts from before a key was set, and with an older key, stay readable; the first key encrypts, all
of them decrypt; without a key nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tidemill.core.errors import ConfigError

if TYPE_CHECKING:
    from cryptography.fernet import MultiFernet

_PLAIN = "plain:"
#: What an encrypted text begins with.
ENCRYPTED = "fernet:"


class Cipher:
    """Encrypts and decrypts with Fernet keys.

    Args:
        keys: The keys, newest first: 32 bytes each, as URL-safe base64.
        key_file: Where the key is if none is given; None: texts stay readable then.

    Raises:
        ConfigError: One of them is not a key.

    Example:
        >>> Cipher().decrypt(Cipher().encrypt("secret"))
        'secret'
    """

    def __init__(self, keys: Sequence[str] = (), key_file: Path | None = None) -> None:
        """Check the keys."""
        self._key_file, self._key = key_file, ""
        self._fernet = _build_fernet(keys) if keys else None
        if keys and self._fernet is None:
            raise ConfigError(
                "store.encryption_key is not a key; create one with: python -c 'from cryptography.fernet import "
                "Fernet; print(Fernet.generate_key().decode())'"
            )

    def prepare(self, list_encrypted: Callable[[], Sequence[str]]) -> None:
        """Read the key file, and create it if it is missing; only the process that writes to the store may call this.

        Args:
            list_encrypted: Names what the store holds that is encrypted, and would be lost with a new key.

        Raises:
            ConfigError: The file holds no key, cannot be used, or is missing and would be missed.
        """
        path = self._key_file
        if self._fernet is not None or path is None:
            return
        if not path.exists() and (lost := list_encrypted()):
            raise ConfigError(
                f"the key file {path} is missing, and the store has values that only its key decrypts: "
                f"{'; '.join(lost)}. Put the file back, or set store.encryption_key to its key. If the key is lost, so "
                "are these values: set store.encryption_key to a new key, and set them again"
            )
        self._key = _read_key_file(path)
        self._fernet = _build_fernet([self._key])
        if self._fernet is None:
            raise ConfigError(
                f"the key file {path} does not hold a key; put back the one that it held, or set store.encryption_key; "
                "remove the file only if the store has no variables and connections"
            )

    def save_key(self, path: Path) -> None:
        """Write the key of the key file, if that is used, to another file that does not exist."""
        if self._key:
            _write_key_file(path, self._key)

    def encrypt(self, text: str) -> str:
        """Return what is stored in place of a text."""
        self.prepare(tuple)
        if self._fernet is None:
            return _PLAIN + text
        return ENCRYPTED + self._fernet.encrypt(text.encode()).decode()

    def decrypt(self, stored: str) -> str:
        """Return the text.

        Raises:
            ConfigError: It was encrypted with a key that is not there.
        """
        if stored.startswith(_PLAIN):
            return stored[len(_PLAIN) :]
        self.prepare(lambda: ("a value",))
        if self._fernet is None:
            raise ConfigError(
                "the store has encrypted values, but store.encryption_key is not set; set it to their key"
            )
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(stored.removeprefix(ENCRYPTED).encode()).decode()
        except InvalidToken:
            raise ConfigError(
                "a value of the store cannot be decrypted with store.encryption_key; add the key that it was encrypted "
                "with, after the new one"
            ) from None


def create_key() -> str:
    """Return a new key."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def build_cipher(configured: str, key_file: Path | None = None) -> Cipher:
    """Return the cipher of a store.

    Args:
        configured: `store.encryption_key`.
        key_file: Where the key is if none is configured; None: nothing is encrypted then.

    Raises:
        ConfigError: A key is not one.
    """
    keys = [key.strip() for key in configured.split(",") if key.strip()]
    return Cipher(keys, key_file)


def _build_fernet(keys: Sequence[str]) -> MultiFernet | None:
    """Return what encrypts with these keys; None: one of them is not a key."""
    from cryptography.fernet import Fernet, MultiFernet

    try:
        return MultiFernet([Fernet(key) for key in keys])
    except ValueError:
        return None


def _read_key_file(path: Path) -> str:
    """Return the key of a file that only this user can read; create it if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            _write_key_file(path, create_key())
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be used: {error.strerror}; set store.encryption_key, or make the file readable"
        ) from error


def _write_key_file(path: Path, key: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(key + "\n")
        file.flush()
        os.fsync(descriptor)
