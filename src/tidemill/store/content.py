"""Checks that every database can store a text, before an event is handed over.

Invariant: no database refuses an event because of its text if payload and identity passed these checks.
"""

from __future__ import annotations

#: An index entry of PostgreSQL may have 2,704 bytes; an identity of less than half of that always fits.
MAX_IDENTITY_BYTES = 1_024


def check_payload(payload: str) -> None:
    """Check that a payload can be stored.

    Raises:
        ValueError: It has a NUL character, or is not Unicode text.
    """
    _check_text("payload", payload)


def check_identity(identity: str) -> None:
    """Check that an identity can be stored, and found again.

    Raises:
        ValueError: It has a NUL character, is not Unicode text, or is longer than MAX_IDENTITY_BYTES.
    """
    _check_text("identity", identity)
    size_bytes = len(identity) if identity.isascii() else len(identity.encode())
    if size_bytes > MAX_IDENTITY_BYTES:
        raise ValueError(
            f"the identity of an event has {size_bytes} bytes, but at most {MAX_IDENTITY_BYTES} are allowed; "
            "use a digest of it"
        )


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(
            f"the {what} of an event has a NUL character, which databases refuse; remove it, or escape it as JSON does"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} of an event is not Unicode text: {error}") from None
