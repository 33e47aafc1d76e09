"""Prepares texts of users, programs and hooks for the report of a probe: masked, encodable, and short.

Invariant: a text is masked before it is cut, so that no part of a secret remains.
"""

from __future__ import annotations

import json

from tidemill.config.redaction import redact, redact_text
from tidemill.core.errors import escape_surrogates
from tidemill.pipeline.recording.task_rows import cut_stream
from tidemill.runtime.link.probe_report import ProbeText

#: The limit of each text, and of all texts of a report together.
MAX_CHARS = 16_384
MAX_ALL_CHARS = 400_000
#: Longer JSON is masked as a plain text.
_MAX_JSON_CHARS = 1024 * 1024
NOTHING = ProbeText("")


class Room:
    """The remaining text budget of a report.

    Args:
        chars: The budget.
    """

    def __init__(self, chars: int = MAX_ALL_CHARS) -> None:
        self._left = chars

    def fit(self, text: str, most: int = MAX_CHARS) -> ProbeText:
        """Return the beginning of a text."""
        masked = escape_surrogates(redact_text(text[: 4 * most]))
        return self._take(masked[:most], is_cut=len(text) > 4 * most or len(masked) > most)

    def fit_json(self, text: str) -> ProbeText:
        """Return the beginning of a JSON document; secrets are also recognized by their keys."""
        if len(text) > _MAX_JSON_CHARS:
            return self.fit(text)
        try:
            shown = json.dumps(redact({"": json.loads(text)})[""], ensure_ascii=False, indent=2)
        except (ValueError, RecursionError):
            return self.fit(text)
        return self._take(escape_surrogates(shown[:MAX_CHARS]), is_cut=len(shown) > MAX_CHARS)

    def fit_end(self, data: bytes) -> ProbeText:
        """Return the end of a program's output."""
        if not data:
            return NOTHING
        text = redact_text(cut_stream(data).decode("utf-8", "backslashreplace"))
        return self._take(text[-MAX_CHARS:], is_cut=len(text) > MAX_CHARS)

    def _take(self, text: str, *, is_cut: bool) -> ProbeText:
        kept = text[: self._left]
        self._left -= len(kept)
        return ProbeText(kept, is_cut or len(kept) < len(text))
