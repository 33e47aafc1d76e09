"""Where the items of a map are cut, over random arrivals."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.tasks.chunks import Cut, count_chunks, cut, locate_chunk


@given(st.integers(0, 50), st.integers(1, 9))
@settings(max_examples=50)
def test_chunks_without_a_time_limit_cover_all_items_once(total: int, most: int) -> None:
    number = count_chunks(total, most, closed=True)
    found = [item for chunk in range(number) for item in locate_chunk(chunk, most, total)]
    assert found == list(range(total))
    assert all(
        len(locate_chunk(chunk, most, total)) == most for chunk in range(count_chunks(total, most, closed=False))
    )


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), max_size=12), st.integers(1, 5), st.integers(1, 20))
@settings(max_examples=50)
def test_a_chunk_is_cut_when_it_is_full_or_its_first_item_has_waited_or_at_the_close(
    arrivals: list[tuple[int, int]], most: int, wait_us: int
) -> None:
    total = end = now = 0
    since: int | None = None
    sizes: list[int] = []
    for number, pause in [*arrivals, (0, 0)]:
        closed = len(sizes) >= 0 and (number, pause) == (0, 0) and total > 0
        now += pause
        total += number
        found = cut(total, end, most, wait_us, closed=closed, since_us=since, now_us=now)
        bounds = [end, *found.ends]
        sizes += [after - before for before, after in itertools.pairwise(bounds)]
        waited = since is not None and now >= since + wait_us
        end = bounds[-1]
        since = found.since_us
        assert all(0 < size <= most for size in sizes)
        assert total - end < most
        if closed:
            assert end == total
        assert (found.due_us is None) == (end == total) == (since is None)
        if waited and not closed:
            # The first item is in a chunk now, and what is left has arrived since.
            assert since is None or since == now
    assert sum(sizes) == end


def test_what_is_left_after_a_full_chunk_waits_from_then_on() -> None:
    assert cut(5, 0, 3, 10, closed=False, since_us=2, now_us=9) == Cut((3,), 9, 19)
    assert cut(5, 3, 3, 10, closed=False, since_us=9, now_us=18) == Cut((), 9, 19)
    assert cut(5, 3, 3, 10, closed=True, since_us=9, now_us=18) == Cut((5,))
