"""Counts dead letters by kind, sink, error and day, in bounded memory."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping

from tidemill.core.deadletters.redrive import Facts

#: Numbers and ids that differ from letter to letter; short numbers, such as exit codes, are significant.
_VARYING = re.compile(r"\b(?:[0-9a-f]{8,}(?:-[0-9a-f]{4,})*|\d{4,})\b", re.IGNORECASE)
_LINE = 120
OTHERS = "(others)"


def generalize_error(error: str) -> str:
    r"""Return the first line of an error, with # for the parts that differ from letter to letter.

    Example:
        >>> generalize_error("no user 123456 in table users\nmore")
        'no user # in table users'
    """
    line = error.strip().partition("\n")[0]
    return _VARYING.sub("#", line[: _LINE * 2])[:_LINE]


class LetterStats:
    """Counts of letters.

    Args:
        most: The number of different values that are counted separately; the others are counted together.
    """

    def __init__(self, most: int = 1_000) -> None:
        self._most = most
        self.letters = 0
        self.messages = 0
        self.no_letters = 0
        self.redriven = 0
        self.oldest: float | None = None
        self.newest: float | None = None
        self._counts: dict[str, dict[str, int]] = {"kind": {}, "sink": {}, "error": {}, "day": {}}

    def add(self, facts: Facts, error: str) -> None:
        """Count a letter."""
        self.letters += 1
        self.messages += facts.messages
        self.redriven += facts.redrives > 0
        at = facts.written_at
        self.oldest = at if self.oldest is None else min(self.oldest, at)
        self.newest = at if self.newest is None else max(self.newest, at)
        self._count("kind", facts.kind)
        if facts.sink_name:
            self._count("sink", f"{facts.sink_type}.{facts.sink_name}")
        self._count("error", generalize_error(error))
        self._count("day", datetime.datetime.fromtimestamp(at, datetime.UTC).date().isoformat())

    def _count(self, group: str, value: str) -> None:
        counts = self._counts[group]
        if value not in counts and len(counts) >= self._most:
            value = OTHERS
        counts[value] = counts.get(value, 0) + 1

    @property
    def counts(self) -> Mapping[str, Mapping[str, int]]:
        """The counts by kind, sink and error (the most frequent first) and by day (in order)."""
        return {
            group: dict(sorted(counts.items(), key=lambda each: each[0] if group == "day" else (-each[1], each[0])))
            for group, counts in self._counts.items()
        }
