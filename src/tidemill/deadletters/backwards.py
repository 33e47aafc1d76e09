"""Finds the newest letters that match, reading partitions backwards from their ends. A search can be continued.

A partition is read in chunks: its last offsets, then those before, in ever larger chunks. The time of the oldest letter
in the last chunk is the partition's horizon; every unread letter is older. A match is certain, which means that no
newer one remains to be found, once no partition that still has unread letters has a later horizon.

Invariants: across continued searches, rows come in order of time, each once, and no letter is left out. Only the row of
a letter is stored. A continued search begins where the previous one was certain, and each search makes progress. Within
a partition, offsets decide the order: if a clock was set back, a letter counts as written when the letters before it
were. All calls block, so do not make them on event loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.deadletters.reader import FoundLetter, extract_facts
from tidemill.deadletters.search import Box, Ranges

#: How many offsets the first chunks and the largest chunks have, over all partitions.
FIRST_OFFSETS = 400
MOST_OFFSETS = 4_000
_LEAST_OFFSETS = 20

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Newest(Generic[RowT]):
    """The result of a search.

    Attributes:
        rows: The rows of the letters, the newest first.
        others: How many records were found that are not letters.
        rest: Where to continue: the end of each partition or file that still has unsearched letters.
    """

    rows: list[RowT]
    others: int
    rest: dict[int, int]


@dataclass(slots=True)
class _Match(Generic[RowT]):
    at: float
    offset: int
    row: RowT


@dataclass(slots=True)
class _Part(Generic[RowT]):
    """A partition that was read from `start` to `end`, with its matches and the records that are not letters."""

    low: int
    start: int
    end: int
    horizon: float = math.inf
    matches: list[_Match[RowT]] = field(default_factory=list)
    others: list[int] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return self.start <= self.low


def find_newest_first(
    box: Box,
    ranges: Ranges,
    criteria: LetterCriteria,
    limit: int,
    make_row: Callable[[FoundLetter], RowT],
    is_over: Callable[[], bool] = lambda: False,
) -> Newest[RowT]:
    """Return the newest letters that match, up to `limit`.

    Args:
        box: The letters.
        ranges: The ranges to search; to continue a search, pass the ends in `rest`.
        criteria: Selects the letters.
        limit: The maximum number of rows.
        make_row: Called with each letter that matches.
        is_over: Called after each round of chunks; if it returns true, the search returns the certain matches.
    """
    lows = {number: low for number, (low, _) in ranges.items()}
    if criteria.since is not None:
        lows |= {number: max(lows[number], at) for number, at in box.find_offsets_at(criteria.since, ranges).items()}
    parts: dict[int, _Part[RowT]] = {
        number: _Part(lows[number], max(lows[number], end), max(lows[number], end))
        for number, (_, end) in ranges.items()
    }
    offsets = FIRST_OFFSETS
    while chosen := _choose_parts(parts, limit):
        span = max(_LEAST_OFFSETS, offsets // len(chosen))
        _read_chunks(box, {number: (parts[number], span) for number in chosen}, criteria, make_row)
        offsets = min(offsets * 2, MOST_OFFSETS)
        if is_over():
            break
    return _take_certain(parts, limit)


def _choose_parts(parts: Mapping[int, _Part[RowT]], limit: int) -> list[int]:
    """Return the partitions that may hold a newer letter than the last row."""
    times = sorted((match.at for part in parts.values() for match in part.matches), reverse=True)
    least = times[limit - 1] if len(times) >= limit else -math.inf
    return [number for number, part in parts.items() if not part.is_whole and part.horizon > least]


def _read_chunks(
    box: Box,
    chosen: Mapping[int, tuple[_Part[RowT], int]],
    criteria: LetterCriteria,
    make_row: Callable[[FoundLetter], RowT],
) -> None:
    starts = {number: max(part.low, part.start - span) for number, (part, span) in chosen.items()}
    ends = {number: part.start for number, (part, _) in chosen.items()}
    first: dict[int, float] = {}
    latest: dict[int, float] = {}
    for each in box.stream(starts, ends):
        if not isinstance(each, FoundLetter):
            continue
        part, _ = chosen[each.partition]
        letter = each.letter
        if letter is None:
            part.others.append(each.offset)
            continue
        at = latest[each.partition] = max(latest.get(each.partition, -math.inf), letter.written_at)
        at = min(at, part.horizon)
        first.setdefault(each.partition, at)
        if criteria.matches(extract_facts(letter, text=bool(criteria.text))):
            part.matches.append(_Match(at, each.offset, make_row(each)))
    for number, start in starts.items():
        part, _ = chosen[number]
        part.start = start
        part.horizon = first.get(number, part.horizon)


def _take_certain(parts: Mapping[int, _Part[RowT]], limit: int) -> Newest[RowT]:
    bound = max((part.horizon for part in parts.values() if not part.is_whole), default=-math.inf)
    found = [(match.at, number, match) for number, part in parts.items() for match in part.matches]
    found.sort(key=lambda each: (each[0], each[2].offset), reverse=True)
    certain = [each for each in found if each[0] >= bound][:limit]
    taken = {id(match) for _, _, match in certain}
    rest, others = {}, 0
    for number, part in parts.items():
        # The next search ends after the newest match that is not returned; older records are read again.
        left = [match.offset for match in part.matches if id(match) not in taken]
        end = max(left, default=part.start - 1) + 1
        others += sum(offset >= end for offset in part.others)
        if end > part.low:
            rest[number] = end
    return Newest([match.row for _, _, match in certain], others, rest)


def restrict(ranges: Ranges, rest: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the ranges of a continued search, without offsets that retention has removed meanwhile."""
    return {number: (low, min(end, rest[number])) for number, (low, end) in ranges.items() if number in rest}
