"""Entries that come in pieces, like lines of standard output: where they may be cut without cutting a secret.

Invariant: no entry ends within a secret that is known. What may become one is held back, until more text or the end
comes.
"""

from __future__ import annotations

import codecs

from tidemill.config.known_secrets import KnownSecrets
from tidemill.runtime.log.task_lines import TaskLine

_new_decoder = codecs.getincrementaldecoder("utf-8")


class OpenEntry:
    """The entry of one stream that is not whole yet.

    Args:
        level: Of its entries.
        source: Of its entries.
        secrets: What must not be cut.

    Attributes:
        is_fresh: Whether text has come since `take`.
    """

    __slots__ = ("_begun", "_decoder", "_is_continued", "_level", "_secrets", "_source", "_time_us", "is_fresh")

    def __init__(self, level: str, source: str, secrets: KnownSecrets) -> None:
        self._level, self._source, self._secrets = level, source, secrets
        self._decoder = _new_decoder("backslashreplace")
        self._begun: list[str] = []
        self._is_continued = False
        self._time_us = 0
        self.is_fresh = False

    @property
    def holds_secret(self) -> bool:
        """Whether it may end in the beginning of a secret."""
        begun = "".join(self._begun)
        return self._secrets.find_open(begun) < len(begun)

    def decode(self, data: bytes) -> str:
        """Return bytes as text; a character that is not whole waits for the rest of it."""
        return self._decoder.decode(data)

    def add(self, text: str, time_us: int) -> None:
        """Add text."""
        self._time_us, self.is_fresh = time_us, True
        self._begun.append(text)

    def add_lines(self, text: str, time_us: int) -> list[TaskLine]:
        """Add text of which each line is an entry; return those that end in it."""
        if "\n" not in text:
            self.add(text, time_us)
            return []
        self._time_us, self.is_fresh = time_us, True
        *whole, begun = ("".join(self._begun) + text).split("\n")
        self._begun = [begun]
        lines = []
        for line in whole:
            # The end of a line that has been shown is not a line.
            if line or not self._is_continued:
                lines.append(self._make_line(line))
            self._is_continued = False
        return lines

    def take(self) -> list[TaskLine]:
        """Return what may be shown already."""
        self.is_fresh = False
        begun = "".join(self._begun)
        cut = self._secrets.find_open(begun)
        self._begun = [begun[cut:]]
        if not cut:
            return []
        self._is_continued = True
        return [self._make_line(begun[:cut])]

    def finish(self) -> list[TaskLine]:
        """Return the rest: nothing follows."""
        rest = "".join(self._begun) + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._begun, self._is_continued, self.is_fresh = [], False, False
        return [self._make_line(rest)] if rest else []

    def _make_line(self, text: str) -> TaskLine:
        return TaskLine(self._time_us, self._level, self._source, text.removesuffix("\r"))
