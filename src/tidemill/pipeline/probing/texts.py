"""Makes what users, programs and hooks wrote fit for the report of a probe: masked as elsewhere, encodable, and short.

Invariant: a text is masked before it is cut, so that no half of a secret is left.
"""

from __future__ import annotations

import json

from tidemill.config.redaction import redact, redact_text
from tidemill.core.errors import escape_surrogates
from tidemill.pipeline.recording.task_rows import cut_stream
from tidemill.runtime.probe_report import ProbeText

#: A text is shown up to this length, and all texts of a report together up to that.
MAX_CHARS = 16_384
MAX_ALL_CHARS = 400_000
#: JSON that is longer is masked as a text.
_MAX_JSON_CHARS = 1024 * 1024
NOTHING = ProbeText("")


class Room:
    """The room that the texts of a report have left.

    Args:
        chars: How much.
    """

    def __init__(self, chars: int = MAX_ALL_CHARS) -> None:
        """Start with all of it."""
        self._left = chars

    def fit(self, text: str, most: int = MAX_CHARS) -> ProbeText:
        """Return the beginning of a text."""
        masked = escape_surrogates(redact_text(text[: 4 * most]))
        return self._take(masked[:most], is_cut=len(text) > 4 * most or len(masked) > most)

    def fit_json(self, text: str) -> ProbeText:
        """Return the beginning of a JSON object; secrets are known by their keys, too."""
        if len(text) > _MAX_JSON_CHARS:
            return self.fit(text)
        try:
            shown = json.dumps(redact({"": json.loads(text)})[""], ensure_ascii=False, indent=2)
        except (ValueError, RecursionError):
            return self.fit(text)
        return self._take(escape_surrogates(shown[:MAX_CHARS]), is_cut=len(shown) > MAX_CHARS)

    def fit_end(self, data: bytes) -> ProbeText:
        """Return the end of what a program wrote."""
        if not data:
            return NOTHING
        text = redact_text(cut_stream(data).decode("utf-8", "backslashreplace"))
        return self._take(text[-MAX_CHARS:], is_cut=len(text) > MAX_CHARS)

    def _take(self, text: str, *, is_cut: bool) -> ProbeText:
        kept = text[: self._left]
        self._left -= len(kept)
        return ProbeText(kept, is_cut or len(kept) < len(text))
