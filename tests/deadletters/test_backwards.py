"""The newest letters first: in the order of time over partitions and searches, none left out, few kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

import hypothesis.strategies as st
from hypothesis import given
from tests.letters import letter

from tidemill.core.deadletters.redrive import LetterCriteria
from tidemill.deadletters.backwards import Newest, find_newest_first, restrict
from tidemill.deadletters.letter import Letter
from tidemill.deadletters.reader import FoundLetter, Reached

#: A time, or None for what is not a letter.
Times = list[float | None]


def make_letter(letter_id: str, at: float) -> Letter:
    return letter(0, letter_id=letter_id, timestamp=datetime.fromtimestamp(at, UTC).isoformat())


class Box:
    """Letters with times, in partitions that begin at offset 5; counts what is read."""

    def __init__(self, partitions: list[Times]) -> None:
        self.partitions = partitions
        self.ranges = {number: (5, 5 + len(times)) for number, times in enumerate(partitions)}
        self.read = 0

    def find_offsets_at(self, seconds: float, ranges: Mapping[int, tuple[int, int]]) -> dict[int, int]:
        return {
            number: next(
                (5 + row for row, at in enumerate(self.partitions[number]) if at is not None and at >= seconds), end
            )
            for number, (_, end) in ranges.items()
        }

    def stream(self, starts: Mapping[int, int], ends: Mapping[int, int]) -> Iterator[FoundLetter | Reached | None]:
        for number, end in ends.items():
            yield None
            for offset in range(starts[number], end):
                at = self.partitions[number][offset - 5]
                self.read += 1
                yield FoundLetter(number, offset, None if at is None else make_letter(f"{number}:{offset}", at))
            yield Reached(number, end)


def show(found: FoundLetter) -> tuple[float, str]:
    assert found.letter is not None
    return found.letter.written_at, found.letter.letter_id


def search_all(box: Box, criteria: LetterCriteria, limit: int, *, hurry: bool) -> list[Newest[tuple[float, str]]]:
    """Return all pages."""
    pages, ranges = [], dict(box.ranges)
    while ranges or not pages:
        pages.append(find_newest_first(box, ranges, criteria, limit, show, lambda: hurry))
        left = restrict(box.ranges, pages[-1].rest)
        assert not left or left != ranges
        ranges = left
    return pages


partitions = st.lists(
    st.lists(st.one_of(st.none(), st.integers(0, 40)), max_size=60).map(lambda times: _sort(times)),
    max_size=4,
)


def _sort(times: list[int | None]) -> Times:
    ordered = iter(sorted(at for at in times if at is not None))
    return [None if at is None else float(next(ordered)) for at in times]


@given(partitions, st.integers(1, 12), st.booleans(), st.none() | st.integers(0, 40))
def test_pages_have_each_letter_once_in_the_order_of_time(
    given_times: list[Times], limit: int, hurry: bool, since: int | None
) -> None:
    box = Box(given_times)
    pages = search_all(box, LetterCriteria(since=since), limit, hurry=hurry)
    rows = [row for page in pages for row in page.rows]
    expected = [
        (at, f"{number}:{5 + row}")
        for number, times in enumerate(given_times)
        for row, at in enumerate(times)
        if at is not None and (since is None or at >= since)
    ]
    assert sorted(rows) == sorted(expected)
    assert [at for at, _ in rows] == sorted((at for at, _ in rows), reverse=True)
    assert all(len(page.rows) <= limit for page in pages)
    if since is None:
        assert sum(page.others for page in pages) == sum(times.count(None) for times in given_times)


@given(st.lists(st.lists(st.integers(0, 50).map(float), max_size=40), max_size=3), st.integers(1, 9))
def test_with_wrong_clocks_every_letter_is_found_and_the_search_ends(given_times: list[Times], limit: int) -> None:
    box = Box(given_times)
    rows = [row for page in search_all(box, LetterCriteria(), limit, hurry=True) for row in page.rows]
    assert sorted(rows) == sorted(
        (at, f"{number}:{5 + row}") for number, times in enumerate(given_times) for row, at in enumerate(times)
    )


def test_the_newest_of_many_are_found_without_reading_all() -> None:
    box = Box([[float(number) for number in range(50_000)], [float(number) for number in range(20)]])
    page = find_newest_first(box, box.ranges, LetterCriteria(), 100, show)
    assert [at for at, _ in page.rows] == [float(number) for number in range(49_999, 49_899, -1)]
    assert box.read < 1_000
    assert page.rest == {0: 5 + 49_900, 1: 25}


def test_what_retention_removes_between_two_searches_is_not_searched() -> None:
    assert restrict({0: (10, 30), 1: (0, 5), 2: (4, 9)}, {0: 20, 1: 9}) == {0: (10, 20), 1: (0, 5)}
