"""Prepares texts of users, programs and servers for recording: encodable, short, and masked as in logs and letters.

Invariant: a text is masked before it is cut, so that no half of a secret remains.
"""

from __future__ import annotations

import functools

from tidemill.config.redaction import redact_text
from tidemill.core.deadletters.letter_stats import generalize_error
from tidemill.core.errors import escape_surrogates
from tidemill.recorder.format.schema import MAX_ERROR_CHARS

#: Ids, labels and names are cut to this length.
MAX_NAME_CHARS = 1_000
#: Only this much of a text is masked; less than that is stored.
_MASKED_CHARS = 4 * MAX_ERROR_CHARS
#: The error class is computed from at most this many characters.
_CLASS_CHARS = 1_000


def clean_name(name: str) -> str:
    """Return an id, label or name as recordable text."""
    text = str.__str__(name)  # a subclass may override its length or its representation
    if len(text) <= MAX_NAME_CHARS and text.isascii():
        return text
    return escape_surrogates(text[:MAX_NAME_CHARS])


def clean_error(text: str) -> str:
    """Return an error text with secrets masked, cut to its maximum length."""
    return redact_text(escape_surrogates(text[:_MASKED_CHARS]))[:MAX_ERROR_CHARS]


def classify_error(text: str) -> str:
    """Return the class by which failures with this error are grouped, as in `tidemill dlq stats`."""
    if len(text) <= _CLASS_CHARS:
        return _classify_short_text(text)
    # Mask before cutting. The long text itself bypasses the cache, which would hold it as a key.
    return _generalize_masked_text(redact_text(escape_surrogates(text[:_MASKED_CHARS]))[:_CLASS_CHARS])


@functools.lru_cache(1_000)
def _classify_short_text(text: str) -> str:
    return generalize_error(redact_text(escape_surrogates(text)))


@functools.lru_cache(1_000)
def _generalize_masked_text(text: str) -> str:
    return generalize_error(text)
