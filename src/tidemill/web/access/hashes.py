"""Hashes of passwords and tokens, as stored in the configuration.

Passwords can be guessed, so their hash is slow and takes 19 MiB of memory; one is checked at a time. Tokens are random,
so a fast hash suffices.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

#: OWASP's second choice for argon2id: 19 MiB, 2 passes, 1 lane. The memory is allocated in the driver.
_HASHER = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1, type=Type.ID)
_TOKEN_BYTES = 32
#: Checked for unknown users, so that the response takes as long as for known ones.
_NOBODY = _HASHER.hash(secrets.token_urlsafe())


def hash_password(password: str) -> str:
    """Return the hash of a password, for `debug.users`."""
    return _HASHER.hash(password)


def is_password(password: str, expected: str | None) -> bool:
    """Return whether a password matches; slow on purpose.

    Args:
        password: The password that was entered.
        expected: The user's hash; None: there is no such user.
    """
    try:
        return _HASHER.verify(expected or _NOBODY, password) and expected is not None
    except (VerificationError, InvalidHashError):
        return False


def make_token() -> str:
    """Return a new random token."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def hash_token(token: str) -> str:
    """Return the hash of a token, for `debug.tokens`.

    Example:
        >>> hash_token("an example")[:16]
        '73300871f44c168e'
    """
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def is_token(token: str, expected: str) -> bool:
    """Return whether a token has a hash, in constant time."""
    return hmac.compare_digest(hash_token(token), expected)
