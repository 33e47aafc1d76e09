"""Checks, before an event is queued, that every supported database can store its text.

Invariant: if payload and identity pass these checks, no database refuses the event because of its text.
"""

from __future__ import annotations

#: PostgreSQL limits an index entry to 2,704 bytes; an identity of less than half that always fits.
MAX_IDENTITY_BYTES = 1_024


def check_payload(payload: str) -> None:
    """Check that the database can store a payload.

    Raises:
        ValueError: The payload has a NUL character or is not valid Unicode.
    """
    _check_text("payload", payload)


def check_identity(identity: str) -> None:
    """Check that the database can store and index an identity.

    Raises:
        ValueError: The identity has a NUL character, is not valid Unicode, or is longer than MAX_IDENTITY_BYTES.
    """
    _check_text("identity", identity)
    size_bytes = len(identity) if identity.isascii() else len(identity.encode())
    if size_bytes > MAX_IDENTITY_BYTES:
        raise ValueError(
            f"the identity of an event is {size_bytes} bytes long; at most {MAX_IDENTITY_BYTES} are allowed; "
            "use a digest of it"
        )


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(
            f"the {what} of an event has a NUL character, which databases reject; remove it, or escape it as JSON does"
        )
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} of an event is not Unicode text: {error}") from None
