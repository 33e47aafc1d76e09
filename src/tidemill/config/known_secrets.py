"""Secrets that are known by their value: what the tasks of a file were given, masked wherever their text is shown.

Invariants: a secret is masked in the forms in which programs repeat it (as it is, in JSON, in an address, in `repr`);
whatever is masked here is text for people, never a value that somebody stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

from tidemill.config.redaction import MASK, redact_text

#: Shorter secrets would be found in every other line.
MIN_CHARS = 4
#: Of a secret of several lines, each line of this length is one, too.
MIN_LINE_CHARS = 8
#: A task that is given a new token every minute would slow down every line; the forms seen longest ago are dropped.
MAX_FORMS = 10_000


class KnownSecrets:
    """The secrets of one file, or of one process.

    Args:
        values: The first ones.

    Example:
        >>> KnownSecrets(["p@ss"]).mask("cannot reach p%40ss.example: login of app with p@ss failed")
        'cannot reach ***.example: login of app with *** failed'
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        self._forms: dict[str, None] = {}
        #: All forms, and those that fit in a line; the longest first, since a short one may be part of it.
        self._longest_first: tuple[str, ...] = ()
        self._in_line: tuple[str, ...] = ()
        self.add(values)

    @property
    def max_chars(self) -> int:
        """The length of the longest form."""
        return len(self._longest_first[0]) if self._longest_first else 0

    def add(self, values: Iterable[str]) -> None:
        """Add secrets; those that are too short to be told from other text are left out."""
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
        """Mask the known secrets in a text, and nothing else."""
        for form in self._longest_first:
            if form in text:
                text = text.replace(form, MASK)
        return text

    def find_open(self, line: str) -> int:
        """Return where the end of an unfinished line begins that may become a secret with more text.

        Whatever is before it may be shown: no secret lies over this point, whichever text follows.

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
        """Return where the secret ends that lies over a point of a text; the point itself, if none does.

        Example:
            >>> KnownSecrets(["T0psecret"]).find_end("T0psecret is it", 3)
            9
        """
        while (end := self._find_over(text, at)[1]) > at:
            at = end
        return at

    def _find_over(self, text: str, at: int) -> tuple[int, int]:
        """Return where a secret begins and ends that lies over a point of a text."""
        for form in self._longest_first:
            begin = text.find(form, max(0, at - len(form) + 1), at + len(form) - 1)
            if 0 <= begin < at:
                return begin, begin + len(form)
        return at, at


def _list_forms(value: str) -> Iterator[str]:
    """Return a secret in all forms, and each of its lines that is long enough."""
    whole = value.strip()
    parts = [value, whole]
    if "\n" in whole:
        lines = (line.strip() for line in whole.split("\n"))
        # The frame of a key says nothing, and is that of certificates, which are public.
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
