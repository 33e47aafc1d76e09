"""Makes texts of users, programs and servers fit to be recorded: encodable, masked as in logs and letters, and short.

Invariant: a text is masked before it is cut, so that no half of a secret is left.
"""

from __future__ import annotations

import functools

from tidemill.config.redaction import redact_text
from tidemill.core.deadletters.letter_stats import generalize_error
from tidemill.core.errors import escape_surrogates
from tidemill.recorder.format.schema import MAX_ERROR_CHARS

#: Ids, labels and names are kept up to this length.
MAX_NAME_CHARS = 1_000
#: Only this much of a text is masked; what is kept is less.
_MASKED_CHARS = 4 * MAX_ERROR_CHARS
#: The error class is made of less than this.
_CLASS_CHARS = 1_000


def clean_name(name: object) -> str:
    """Return an id, a label or a name."""
    # A text of another type may have a length of its own, or be shown as something else than it is.
    text = name if type(name) is str else str.__str__(name) if isinstance(name, str) else str(name)
    if len(text) <= MAX_NAME_CHARS and text.isascii():
        return text
    return escape_surrogates(text[:MAX_NAME_CHARS])


def clean_error(text: str) -> str:
    """Return an error text."""
    return redact_text(escape_surrogates(text[:_MASKED_CHARS]))[:MAX_ERROR_CHARS]


def classify_error(text: str) -> str:
    """Return the class by which failures with this error are grouped, the one of `tidemill dlq stats`."""
    if len(text) <= _CLASS_CHARS:
        return _classify_short_text(text)
    # Masked before it is cut; but not kept whole by the cache, which keeps what it is asked for.
    return _generalize_masked_text(redact_text(escape_surrogates(text[:_MASKED_CHARS]))[:_CLASS_CHARS])


@functools.lru_cache(1_000)
def _classify_short_text(text: str) -> str:
    return generalize_error(redact_text(escape_surrogates(text)))


@functools.lru_cache(1_000)
def _generalize_masked_text(text: str) -> str:
    return generalize_error(text)
