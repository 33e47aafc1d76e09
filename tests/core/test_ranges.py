"""Ranges cover what was requested, once, whatever was finished before."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError
from tidemill.core.ranges import (
    MAX_PIECE_MESSAGES,
    MIN_PIECE_MESSAGES,
    Offset,
    OffsetRange,
    PartitionEdge,
    TimeBound,
    check_order,
    choose_piece_size,
    find_remaining,
    find_span,
    group_pieces,
    parse_position,
    split,
)

numbers = st.integers(0, 60)


@st.composite
def wholes(draw: st.DrawFn) -> list[OffsetRange]:
    """At most one range per partition, some empty."""
    partitions = draw(st.lists(st.integers(0, 5), unique=True, max_size=4))
    return [OffsetRange(p, start, start + draw(numbers)) for p in partitions for start in [draw(numbers)]]


def offsets(ranges: list[OffsetRange]) -> list[tuple[int, int]]:
    return [(r.partition, offset) for r in ranges for offset in range(r.start, r.end)]


@given(wholes(), st.integers(1, 20))
def test_pieces_cover_every_offset_once_and_none_is_empty_or_too_large(ranges: list[OffsetRange], size: int) -> None:
    pieces = split(ranges, size)
    assert sorted(offsets(pieces)) == sorted(offsets(ranges))
    assert all(0 < piece.size <= size for piece in pieces)


@given(wholes(), st.integers(1, 20))
def test_pieces_of_a_partition_differ_by_one_at_most_and_keep_their_order(ranges: list[OffsetRange], size: int) -> None:
    pieces = split(ranges, size)
    for partition in {piece.partition for piece in pieces}:
        own = [piece for piece in pieces if piece.partition == partition]
        assert own == sorted(own)
        assert max(p.size for p in own) - min(p.size for p in own) <= 1


@given(wholes(), st.lists(st.builds(OffsetRange, st.integers(0, 5), numbers, numbers), max_size=8), st.integers(1, 20))
def test_what_remains_is_the_plan_without_what_is_finished(
    ranges: list[OffsetRange], finished: list[OffsetRange], size: int
) -> None:
    planned = split(ranges, size)
    left = find_remaining(planned, finished)
    assert offsets(left) == [where for where in offsets(planned) if where not in set(offsets(finished))]
    assert all(part.size > 0 for part in left)
    assert find_remaining(left, finished) == left


@given(wholes(), st.integers(1, 20), st.integers(1, 40))
def test_chunks_hold_every_piece_once_and_no_partition_twice(ranges: list[OffsetRange], size: int, room: int) -> None:
    pieces = split(ranges, size)
    made = group_pieces(pieces, room)
    assert [piece for chunk in made for piece in chunk] == pieces
    for chunk in made:
        assert len({piece.partition for piece in chunk}) == len(chunk)
        assert len(chunk) == 1 or sum(piece.size for piece in chunk) <= room


@given(numbers, numbers, numbers, numbers)
def test_a_span_is_the_part_of_a_request_that_exists(start: int, end: int, low: int, more: int) -> None:
    high = low + more
    span = find_span(3, start, end, low, high)
    assert set(offsets([span.range])) == {(3, n) for n in range(start, end) if low <= n < high}
    assert span.deleted == sum(1 for n in range(start, end) if n < low)
    assert span.beyond == sum(1 for n in range(start, end) if n >= high)


@given(st.integers(0, 10**9), st.integers(0, 64))
def test_a_piece_is_worth_an_engine_and_leaves_several_to_each_core(total: int, cores: int) -> None:
    size = choose_piece_size(total, cores)
    assert MIN_PIECE_MESSAGES <= size <= MAX_PIECE_MESSAGES
    if MIN_PIECE_MESSAGES < size < MAX_PIECE_MESSAGES:
        assert size * max(1, cores) * 4 >= total


@given(st.datetimes(min_value=datetime.datetime(1970, 1, 2), timezones=st.just(datetime.UTC)))
def test_a_time_is_parsed_to_the_millisecond(moment: datetime.datetime) -> None:
    read = parse_position(moment.isoformat(), "--from")
    assert isinstance(read, TimeBound)
    behind = moment - (
        datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=1) * read.milliseconds
    )
    assert datetime.timedelta(0) <= behind < datetime.timedelta(milliseconds=1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", Offset(0)),
        (" 1200 ", Offset(1200)),
        ("Earliest", PartitionEdge.EARLIEST),
        ("latest", PartitionEdge.LATEST),
        ("1970-01-01T00:00:01Z", TimeBound(1000)),
        ("1970-01-01T02:00:00+02:00", TimeBound(0)),
    ],
)
def test_offsets_times_and_edges_are_parsed(text: str, expected: object) -> None:
    assert parse_position(text, "--from") == expected


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yesterday", "neither an offset nor a time"),
        ("-5", "neither an offset nor a time"),
        ("", "neither an offset nor a time"),
        ("2026-05-01", "no time zone"),
        ("2026-05-01T10:00:00", "no time zone"),
        ("1960-01-01T00:00:00Z", "before 1970"),
    ],
)
def test_an_invalid_position_is_reported_with_the_valid_forms(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"--to '{text}'.*{said}.*earliest or latest"):
        parse_position(text, "--to")


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (Offset(5), Offset(5)),
        (TimeBound(5), TimeBound(4)),
        (PartitionEdge.LATEST, Offset(5)),
        (Offset(5), PartitionEdge.EARLIEST),
        (PartitionEdge.LATEST, PartitionEdge.LATEST),
    ],
)
def test_an_end_that_is_not_after_the_start_is_rejected(start, end) -> None:
    with pytest.raises(ConfigError, match="--to is not after --from"):
        check_order(start, end)


@pytest.mark.parametrize(
    ("start", "end"),
    [
        (Offset(4), Offset(5)),
        (TimeBound(4), TimeBound(5)),
        (PartitionEdge.EARLIEST, PartitionEdge.LATEST),
        (Offset(5), TimeBound(1)),
    ],
)
def test_a_range_that_may_contain_something_is_accepted(start, end) -> None:
    check_order(start, end)


def test_ranges_finished_elsewhere_remove_nothing():
    planned = [OffsetRange(0, 10, 20)]
    assert find_remaining(planned, [OffsetRange(0, 0, 10), OffsetRange(0, 20, 30), OffsetRange(1, 10, 20)]) == planned


def test_a_range_finished_in_the_middle_leaves_both_ends():
    left = find_remaining([OffsetRange(0, 10, 20)], [OffsetRange(0, 13, 15)])
    assert left == [OffsetRange(0, 10, 13), OffsetRange(0, 15, 20)]


def test_finished_ranges_that_meet_leave_nothing_of_what_they_cover():
    assert find_remaining([OffsetRange(0, 10, 20)], [OffsetRange(0, 0, 15), OffsetRange(0, 15, 30)]) == []
