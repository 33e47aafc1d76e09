"""Checks that every database can store a text, before an event is handed over.

Invariant: no database refuses an event whose payload and identity passed because of its text.
"""

from __future__ import annotations

#: PostgreSQL's indexes take 2,704 bytes; with less than half of it an identity is never the one that does not fit.
MAX_IDENTITY_BYTES = 1_024


def check_payload(payload: str) -> None:
    """Make sure that a payload can be stored.

    Raises:
        ValueError: It has a NUL character, or is not Unicode text.
    """
    _check_text("payload", payload)


def check_identity(identity: str) -> None:
    """Make sure that an identity can be stored, and found again.

    Raises:
        ValueError: It has a NUL character, is not Unicode text, or is longer than MAX_IDENTITY_BYTES.
    """
    _check_text("identity", identity)
    size_bytes = len(identity) if identity.isascii() else len(identity.encode())
    if size_bytes > MAX_IDENTITY_BYTES:
        raise ValueError(
            f"the identity of an event has {size_bytes} bytes, {MAX_IDENTITY_BYTES} are allowed; use a digest of it"
        )


def _check_text(what: str, text: str) -> None:
    if "\0" in text:
        raise ValueError(f"the {what} of an event has a NUL character, which databases refuse; JSON escapes it")
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the {what} of an event is not Unicode text: {error}") from None
