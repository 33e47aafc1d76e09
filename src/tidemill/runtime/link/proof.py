"""How the two ends of a link prove to each other, before anything else, that both know the pipeline's secret.

Each end answers the other's random number with an HMAC over both numbers and the engine's whole hello, so a proof is
valid for one connection, one direction and one hello. The secret itself is never sent over the link.
"""

from __future__ import annotations

import enum
import hmac
import secrets

#: The length of a random number and of a proof, in bytes.
NONCE_BYTES = 32
_DOMAIN = b"tidemill link 1"


class Side(enum.Enum):
    """The side that a proof comes from."""

    DRIVER = b"driver"
    ENGINE = b"engine"


def new_nonce() -> bytes:
    """Return a random number that cannot be guessed."""
    return secrets.token_bytes(NONCE_BYTES)


def link_proof(secret: str, side: Side, hello: bytes, nonce: bytes) -> bytes:
    """Return the proof of one side.

    Args:
        secret: The pipeline's secret.
        side: The side that proves itself.
        hello: The engine's hello as it was sent, which includes its nonce.
        nonce: The driver's nonce.
    """
    found = hmac.new(secret.encode(), digestmod="sha256")
    for part in (_DOMAIN, side.value, nonce, hello):
        found.update(len(part).to_bytes(8, "big") + part)
    return found.digest()


def is_proof(given: bytes, secret: str, side: Side, hello: bytes, nonce: bytes) -> bool:
    """Return whether a proof comes from a side that knows the secret; takes the same time for any input."""
    return hmac.compare_digest(given, link_proof(secret, side, hello, nonce))
