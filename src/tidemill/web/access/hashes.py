"""Hashes of passwords and tokens, as the configuration keeps them.

A password may be guessed, so its hash is slow and takes memory: 19 MiB, of which one at a time is checked. A token is
random, so that a fast hash is enough.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

#: OWASP's second choice for argon2id: 19 MiB, 2 passes, 1 lane. The memory is the driver's.
_HASHER = PasswordHasher(time_cost=2, memory_cost=19 * 1024, parallelism=1, type=Type.ID)
_TOKEN_BYTES = 32
#: Checked where there is no such user, so that the answer takes as long as for one that exists.
_NOBODY = _HASHER.hash(secrets.token_urlsafe())


def hash_password(password: str) -> str:
    """Return the hash of a password, for `debug.users`."""
    return _HASHER.hash(password)


def is_password(password: str, expected: str | None) -> bool:
    """Tell whether this is the password; takes a while.

    Args:
        password: What somebody typed.
        expected: The hash; None: there is no such user.
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
    """Tell whether this is the token with that hash; takes as long for any."""
    return hmac.compare_digest(hash_token(token), expected)
