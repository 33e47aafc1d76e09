"""Entries that arrive in pieces, such as lines of standard output: cuts them without cutting a secret.

Invariant: no entry ends within a known secret. Text that may become one is held back until more text or the end
arrives.
"""

from __future__ import annotations

import codecs

from tidemill.config.known_secrets import KnownSecrets
from tidemill.runtime.log.task_lines import TaskLine

_new_decoder = codecs.getincrementaldecoder("utf-8")


class OpenEntry:
    """The incomplete entry of one stream.

    Args:
        level: The level of its entries.
        source: The source of its entries.
        secrets: The secrets that must not be cut.

    Attributes:
        is_fresh: Whether text has arrived since `take`.
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
        """Whether the text may end with the beginning of a secret."""
        begun = "".join(self._begun)
        return self._secrets.find_open(begun) < len(begun)

    def decode(self, data: bytes) -> str:
        """Decode bytes; an incomplete character waits for its rest."""
        return self._decoder.decode(data)

    def add(self, text: str, time_us: int) -> None:
        self._time_us, self.is_fresh = time_us, True
        self._begun.append(text)

    def add_lines(self, text: str, time_us: int) -> list[TaskLine]:
        """Add text whose lines are separate entries; return the completed ones."""
        if "\n" not in text:
            self.add(text, time_us)
            return []
        self._time_us, self.is_fresh = time_us, True
        *whole, begun = ("".join(self._begun) + text).split("\n")
        self._begun = [begun]
        lines = []
        for line in whole:
            # If only the end of the line is left to show, and it is empty, it is not an entry.
            if line or not self._is_continued:
                lines.append(self._make_line(line))
            self._is_continued = False
        return lines

    def take(self) -> list[TaskLine]:
        """Return the text that may already be shown."""
        self.is_fresh = False
        begun = "".join(self._begun)
        cut = self._secrets.find_open(begun)
        self._begun = [begun[cut:]]
        if not cut:
            return []
        self._is_continued = True
        return [self._make_line(begun[:cut])]

    def finish(self) -> list[TaskLine]:
        """Return the rest, at the end of the stream."""
        rest = "".join(self._begun) + self._decoder.decode(b"", final=True)
        self._decoder.reset()
        self._begun, self._is_continued, self.is_fresh = [], False, False
        return [self._make_line(rest)] if rest else []

    def _make_line(self, text: str) -> TaskLine:
        return TaskLine(self._time_us, self._level, self._source, text.removesuffix("\r"))
