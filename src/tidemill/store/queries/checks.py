"""Validates names and texts from users and tasks before they are stored."""

from __future__ import annotations

from tidemill.store.calls.call import CallRefusedError, RefusalKind

#: The maximum length of a name, in characters.
MAX_NAME = 250


def check_name(what: str, name: str) -> None:
    """Check that a name can be displayed, typed and stored.

    Raises:
        CallRefusedError: The name is empty or too long, or has line breaks or other control characters.
    """
    if not name.strip():
        raise CallRefusedError(RefusalKind.INVALID, f"a {what} needs a name; this one is empty")
    if len(name) > MAX_NAME or not name.isprintable():
        raise CallRefusedError(
            RefusalKind.INVALID,
            f"the name of a {what} {name[:MAX_NAME]!r} must have at most {MAX_NAME} characters, and no line breaks "
            "or other control characters; choose another one",
        )


def check_text(name: str, text: str) -> None:
    """Check that every database accepts a text.

    Raises:
        CallRefusedError: The text has NUL characters or lone surrogates.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise CallRefusedError(RefusalKind.INVALID, f"the {name} is not Unicode text; remove lone surrogates") from None
    if "\0" in text:
        raise CallRefusedError(
            RefusalKind.INVALID, f"the {name} has a NUL character, which databases reject; remove it"
        )
