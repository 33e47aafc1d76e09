"""Finds the newest letters that match, from the ends of partitions backwards, and goes on where it stopped.

A partition is read in chunks: its last offsets, those before, larger ones each time. The time of the oldest letter of
the last chunk is the partition's horizon: what was not read yet is older. A letter that was found is certain, that is,
no newer one is still to be found, once no partition that is not read to its beginning has a later horizon.

Invariants: rows come in the order of time over all searches that continue each other, each once; no letter is left out;
of a letter only its row is kept; a search that continues begins where the one before was certain, and each makes
progress. Within a partition the order is that of offsets: where a clock was set back, a letter counts as written when
the ones before it were. Blocking: not for event loops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from tidemill.core.deadletters.redrive import Criteria
from tidemill.deadletters.reader import Found, extract_facts
from tidemill.deadletters.search import Box, Ranges

#: How many offsets the first and the largest chunks have, over all partitions.
FIRST_OFFSETS = 400
MOST_OFFSETS = 4_000
_LEAST_OFFSETS = 20

RowT = TypeVar("RowT")


@dataclass(frozen=True, slots=True)
class Newest(Generic[RowT]):
    """What a search found.

    Attributes:
        rows: Of the letters, the newest first.
        others: How many records were met that are not letters.
        rest: Where to go on: the end of each partition or file that is not searched to its beginning.
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
    """A partition: read from `start` to `end`, of which matches and records that are not letters are kept."""

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
    criteria: Criteria,
    limit: int,
    make_row: Callable[[Found], RowT],
    is_over: Callable[[], bool] = lambda: False,
) -> Newest[RowT]:
    """Return the newest letters that match, at most `limit`.

    Args:
        box: The letters.
        ranges: Where they are searched; the ends are those of `rest` to go on.
        criteria: Which.
        limit: The most rows.
        make_row: Called with each letter that matches.
        is_over: Called after each round of chunks; then the search ends with what is certain.
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
    """Return which partitions may hold a newer letter than the last of the rows."""
    times = sorted((match.at for part in parts.values() for match in part.matches), reverse=True)
    least = times[limit - 1] if len(times) >= limit else -math.inf
    return [number for number, part in parts.items() if not part.is_whole and part.horizon > least]


def _read_chunks(
    box: Box, chosen: Mapping[int, tuple[_Part[RowT], int]], criteria: Criteria, make_row: Callable[[Found], RowT]
) -> None:
    starts = {number: max(part.low, part.start - span) for number, (part, span) in chosen.items()}
    ends = {number: part.start for number, (part, _) in chosen.items()}
    first: dict[int, float] = {}
    latest: dict[int, float] = {}
    for each in box.stream(starts, ends):
        if not isinstance(each, Found):
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
        left = [match.offset for match in part.matches if id(match) not in taken]
        end = max(left, default=part.start - 1) + 1
        others += sum(offset >= end for offset in part.others)
        if end > part.low:
            rest[number] = end
    return Newest([match.row for _, _, match in certain], others, rest)


def restrict(ranges: Ranges, rest: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """Return the ranges that a search goes on with; what retention has removed meanwhile is not among them."""
    return {number: (low, min(end, rest[number])) for number, (low, end) in ranges.items() if number in rest}
