"""Encrypts the secrets in the database: variables, connections, and the arguments stored by deferrals.

Invariants: a new key file is never created while the store has values encrypted with another key. Each stored text
starts with a prefix that names its encoding, so texts written without a key or with an older key stay readable. The
first key encrypts; all keys decrypt. Without a key nothing is encrypted.
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
#: The prefix of an encrypted text.
ENCRYPTED = "fernet:"


class Cipher:
    """Encrypts and decrypts with Fernet keys.

    Args:
        keys: The keys, newest first: 32 bytes each, as URL-safe base64.
        key_file: The file that holds the key if `keys` is empty; None: texts are stored unencrypted.

    Raises:
        ConfigError: A key is invalid.

    Example:
        >>> Cipher().decrypt(Cipher().encrypt("secret"))
        'secret'
    """

    def __init__(self, keys: Sequence[str] = (), key_file: Path | None = None) -> None:
        self._key_file, self._key = key_file, ""
        self._fernet = _build_fernet(keys) if keys else None
        if keys and self._fernet is None:
            raise ConfigError(
                "store.encryption_key is not a key; create one with: python -c 'from cryptography.fernet import "
                "Fernet; print(Fernet.generate_key().decode())'"
            )

    def prepare(self, list_encrypted: Callable[[], Sequence[str]]) -> None:
        """Read the key file and create it if it is missing; only the process that writes to the store may call this.

        Args:
            list_encrypted: Returns descriptions of the encrypted values in the store, which a new key could not
                decrypt.

        Raises:
            ConfigError: The key file is unusable, holds no key, or is missing while the store has encrypted values.
        """
        path = self._key_file
        if self._fernet is not None or path is None:
            return
        if not path.exists() and (lost := list_encrypted()):
            raise ConfigError(
                f"the key file {path} is missing, and the store has values that only its key decrypts: "
                f"{'; '.join(lost)}. Put the file back, or set store.encryption_key to its key. If the key is lost, "
                "these values are lost too: set store.encryption_key to a new key, and set the values again"
            )
        self._key = _read_key_file(path)
        self._fernet = _build_fernet([self._key])
        if self._fernet is None:
            raise ConfigError(
                f"the key file {path} does not hold a key; restore the original file, or set store.encryption_key; "
                "remove the file only if the store has no variables and connections"
            )

    def save_key(self, path: Path) -> None:
        """Copy the key of the key file, if one is in use, to a new file."""
        if self._key:
            _write_key_file(path, self._key)

    def encrypt(self, text: str) -> str:
        """Return the text as it is stored: encrypted if there is a key."""
        self.prepare(tuple)
        if self._fernet is None:
            return _PLAIN + text
        return ENCRYPTED + self._fernet.encrypt(text.encode()).decode()

    def decrypt(self, stored: str) -> str:
        """Return the plain text of a stored text.

        Raises:
            ConfigError: The key that encrypted the text is missing.
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
    """Return a new Fernet key."""
    from cryptography.fernet import Fernet

    return Fernet.generate_key().decode()


def build_cipher(configured: str, key_file: Path | None = None) -> Cipher:
    """Return the cipher of a store.

    Args:
        configured: The value of `store.encryption_key`: keys separated by commas.
        key_file: The file that holds the key if none is configured; None: nothing is encrypted.

    Raises:
        ConfigError: A key is invalid.
    """
    keys = [key.strip() for key in configured.split(",") if key.strip()]
    return Cipher(keys, key_file)


def _build_fernet(keys: Sequence[str]) -> MultiFernet | None:
    """Return a Fernet for the keys; None if a key is invalid."""
    from cryptography.fernet import Fernet, MultiFernet

    try:
        return MultiFernet([Fernet(key) for key in keys])
    except ValueError:
        return None


def _read_key_file(path: Path) -> str:
    """Return the key of the file; create the file, readable only by this user, if it is missing."""
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
