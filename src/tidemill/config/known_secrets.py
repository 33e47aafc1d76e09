"""Masks secrets that are known by value, such as the inputs of a file's tasks, in all text that users see.

Invariants: a secret is masked in every form in which programs repeat it (as it is, in JSON, in a URL, in `repr`); the
masked text is only for display, never for storage as a value.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

from tidemill.config.redaction import MASK, redact_text

#: Shorter secrets would occur by chance in many lines.
MIN_CHARS = 4
#: Each line of a multi-line secret is masked by itself if it has at least this length.
MIN_LINE_CHARS = 8
#: A task that gets a new token every minute would slow down the masking of every line; the oldest forms are dropped.
MAX_FORMS = 10_000


class KnownSecrets:
    """The secrets of one file, or of one process.

    Args:
        values: The initial secrets.

    Example:
        >>> KnownSecrets(["p@ss"]).mask("cannot reach p%40ss.example: login of app with p@ss failed")
        'cannot reach ***.example: login of app with *** failed'
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._forms: dict[str, None] = {}
        #: All forms, and the forms without a line break; the longest first, since a short one may be part of a longer
        #: one.
        self._longest_first: tuple[str, ...] = ()
        self._in_line: tuple[str, ...] = ()
        self.add(values)

    @property
    def max_chars(self) -> int:
        """The length of the longest form."""
        return len(self._longest_first[0]) if self._longest_first else 0

    def add(self, values: Iterable[str]) -> None:
        """Add secrets; those that are too short to distinguish from other text are ignored."""
        before = len(self._forms)
        forms = dict.fromkeys(form for value in values for form in _list_forms(value))
        if not forms:
            return
        is_new = any(form not in self._forms for form in forms)
        for form in forms:
            self._forms.pop(form, None)
        self._forms |= forms
        while len(self._forms) > MAX_FORMS:
            del self._forms[next(iter(self._forms))]
        if is_new or len(self._forms) != before:
            self._longest_first = tuple(sorted(self._forms, key=len, reverse=True))
            self._in_line = tuple(form for form in self._longest_first if "\n" not in form)

    def mask(self, text: str) -> str:
        """Mask the known secrets in a text, and everything that looks like a secret."""
        return redact_text(self.mask_known(text))

    def mask_known(self, text: str) -> str:
        """Mask only the known secrets in a text."""
        for form in self._longest_first:
            if form in text:
                text = text.replace(form, MASK)
        return text

    def find_open(self, line: str) -> int:
        """Return where a possible start of a secret begins at the end of an unfinished line.

        The text before this point may be shown: no secret crosses the point, whichever text follows.

        Example:
            >>> KnownSecrets(["T0psecret"]).find_open("the password is T0p")
            16
        """
        start = len(line)
        for form in self._in_line:
            at = line.find(form[0], max(0, len(line) - len(form) + 1), start)
            while at >= 0:
                if form.startswith(line[at:]):
                    start = at
                    break
                at = line.find(form[0], at + 1, start)
        while (begin := self._find_over(line, start)[0]) < start:
            start = begin
        return start

    def find_end(self, text: str, at: int) -> int:
        """Return the end of the secret that crosses a point of a text; the point itself if none does.

        Example:
            >>> KnownSecrets(["T0psecret"]).find_end("T0psecret is it", 3)
            9
        """
        while (end := self._find_over(text, at)[1]) > at:
            at = end
        return at

    def _find_over(self, text: str, at: int) -> tuple[int, int]:
        """Return the start and the end of the secret that crosses a point of a text."""
        for form in self._longest_first:
            begin = text.find(form, max(0, at - len(form) + 1), at + len(form) - 1)
            if 0 <= begin < at:
                return begin, begin + len(form)
        return at, at


def _list_forms(value: str) -> Iterator[str]:
    """Yield a secret, and each of its lines that is long enough, in all forms."""
    whole = value.strip()
    parts = [value, whole]
    if "\n" in whole:
        lines = (line.strip() for line in whole.split("\n"))
        # The BEGIN and END lines of a key are not secret, and public certificates have them too.
        parts += [line for line in lines if len(line) >= MIN_LINE_CHARS and not line.startswith("-----")]
    for part in parts:
        if len(part) >= MIN_CHARS and part.strip("*"):
            yield part
            yield json.dumps(part)[1:-1]
            yield json.dumps(part, ensure_ascii=False)[1:-1]
            yield repr(part)[1:-1]
            yield _quote(part, safe="")
            yield _quote(part, safe="/")
            yield quote_plus(part, errors="surrogatepass")


def _quote(text: str, safe: str) -> str:
    return quote(text, safe=safe, errors="surrogatepass")
