"""Reads the headers of a Kafka record once, and never again after a failure.

Clients of other languages write any bytes as the name of a header. For a name that is not UTF-8, the client's
`headers()` sets an error, but returns and keeps a list in which this name is a null pointer; touching it crashes the
process. A second call returns the list without an error. So does a first call from a line that ran often before,
because the interpreter's specialized calls of C methods do not check for errors returned together with a result.
`methodcaller` does check. No other code of tidemill may therefore call `headers()`.
"""

from __future__ import annotations

import operator
from typing import Any, Final

from tidemill.core.errors import describe_error
from tidemill.runtime.kafka.source_message import Header, SourceMessage

#: How many bytes of a name that is not UTF-8 an error shows.
_SHOWN_BYTES: Final = 100
_ask_for_headers = operator.methodcaller("headers")
#: The result for most records, created once because this is a hot path.
_NO_HEADERS: Final[tuple[tuple[Header, ...], str | None]] = ((), None)


class UnreadableHeadersError(Exception):
    """The headers of a message cannot be read; the text gives the reason."""


def read_headers(record: Any) -> tuple[tuple[Header, ...], str | None]:
    """Return the headers of a record, and why they cannot be read, if they cannot; call it once per record."""
    try:
        headers = _ask_for_headers(record)
    except Exception as error:
        return (), _describe(error)
    return _NO_HEADERS if headers is None else (tuple(headers), None)


def check_headers(message: SourceMessage) -> None:
    """Check that the headers of a message could be read.

    Raises:
        UnreadableHeadersError: The headers could not be read.
    """
    if message.headers_error is not None:
        raise UnreadableHeadersError(message.headers_error)


def _describe(error: BaseException) -> str:
    while not isinstance(error, UnicodeDecodeError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, UnicodeDecodeError):
        name = bytes(error.object)
        return f"the name of a header is not UTF-8: {name[:_SHOWN_BYTES]!r}{'...' if len(name) > _SHOWN_BYTES else ''}"
    return describe_error(error)
