"""Encrypts what must not lie readable in the database: variables, connections, and what deferrals keep.

Invariants: a text says by its first word how it was written, so that texts from before a key was set, and with an older
key, stay readable; the first key encrypts, all of them decrypt; without a key nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.errors import ConfigError

_PLAIN, _FERNET = "plain:", "fernet:"


class Cipher:
    """Encrypts and decrypts with Fernet keys.

    Args:
        keys: The keys, newest first: 32 bytes each, as URL-safe base64; none: texts stay readable.

    Raises:
        ConfigError: One of them is not a key.

    Example:
        >>> Cipher().decrypt(Cipher().encrypt("secret"))
        'secret'
    """

    def __init__(self, keys: Sequence[str] = ()) -> None:
        """Check the keys."""
        self._fernet = None
        if keys:
            from cryptography.fernet import Fernet, MultiFernet

            try:
                self._fernet = MultiFernet([Fernet(key) for key in keys])
            except ValueError:
                raise ConfigError(
                    "store.encryption_key is not a key; create one with: python -c 'from cryptography.fernet import "
                    "Fernet; print(Fernet.generate_key().decode())'"
                ) from None

    def encrypt(self, text: str) -> str:
        """Return what is stored in place of a text."""
        if self._fernet is None:
            return _PLAIN + text
        return _FERNET + self._fernet.encrypt(text.encode()).decode()

    def decrypt(self, stored: str) -> str:
        """Return the text.

        Raises:
            ConfigError: It was encrypted with a key that is not there.
        """
        if stored.startswith(_PLAIN):
            return stored[len(_PLAIN) :]
        if self._fernet is None:
            raise ConfigError(
                "the store has encrypted values, but store.encryption_key is not set; set it to their key"
            )
        from cryptography.fernet import InvalidToken

        try:
            return self._fernet.decrypt(stored.removeprefix(_FERNET).encode()).decode()
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
        key_file: Where the key is if none is configured; created if it is missing. None: nothing is encrypted then.

    Raises:
        ConfigError: A key is not one, or the file cannot be used.
    """
    keys = [key.strip() for key in configured.split(",") if key.strip()]
    if not keys and key_file is not None:
        keys = [_read_key_file(key_file)]
    return Cipher(keys)


def _read_key_file(path: Path) -> str:
    """Return the key of a file that only this user can read; create it if it is missing."""
    try:
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(create_key() + "\n")
                file.flush()
                os.fsync(descriptor)
        return path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the key file {path} cannot be used: {error.strerror}; set store.encryption_key, or make the file readable"
        ) from error
