"""Finds letters: all that match, or the newest of them. Only the returned letters are held in memory.

All calls block, so do not make them on event loops.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.deadletters.reader import FoundLetter, Reached, extract_facts

#: The first offset and the end of each partition or file.
Ranges = Mapping[int, tuple[int, int]]


class Box(Protocol):
    """Letters in a topic or in files; see `opening.Letters`."""

    def find_offsets_at(self, seconds: float, ranges: Ranges) -> dict[int, int]:
        """Return where to start so that every letter written at a time or later is found."""

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[FoundLetter | Reached | None]:
        """Yield all records, in order within each partition."""


def read_all(box: Box, ranges: Ranges, criteria: LetterCriteria, *, garbage: bool = False) -> Iterator[FoundLetter]:
    """Yield the letters that match, the oldest first.

    Args:
        box: The letters.
        ranges: The ranges to read.
        criteria: Selects the letters.
        garbage: Whether to yield records that are not letters, too.
    """
    starts = {number: low for number, (low, _) in ranges.items()}
    if criteria.since is not None:
        starts = box.find_offsets_at(criteria.since, ranges)
    yield from _read_matching(box, criteria, starts, {number: end for number, (_, end) in ranges.items()}, garbage)


def find_newest(box: Box, ranges: Ranges, criteria: LetterCriteria, limit: int) -> list[FoundLetter]:
    """Return the newest letters that match, in order of time; without filters, records that are not letters count as
    well.
    """

    def age(each: FoundLetter) -> float:
        return each.letter.written_at if each.letter is not None else 0.0

    def newest(found: Iterable[FoundLetter]) -> list[FoundLetter]:
        numbered = heapq.nlargest(limit, enumerate(found), key=lambda each: (age(each[1]), each[0]))
        return [each for _, each in reversed(numbered)]

    if not criteria.empty:
        return newest(read_all(box, ranges, criteria))
    ends = {number: end for number, (_, end) in ranges.items()}
    reach = limit
    while True:
        starts = {number: max(low, end - reach) for number, (low, end) in ranges.items()}
        found = newest(_read_matching(box, criteria, starts, ends, garbage=True))
        if len(found) == limit or all(starts[number] == low for number, (low, _) in ranges.items()):
            return found
        # Transactions leave offsets without a letter, so the search goes further back.
        reach *= 4


def _read_matching(
    box: Box, criteria: LetterCriteria, starts: Mapping[int, int], ends: Mapping[int, int], garbage: bool
) -> Iterator[FoundLetter]:
    for each in box.stream(starts, ends):
        if not isinstance(each, FoundLetter):
            continue
        if each.letter is None:
            if garbage:
                yield each
        elif criteria.matches(extract_facts(each.letter, text=bool(criteria.text))):
            yield each
