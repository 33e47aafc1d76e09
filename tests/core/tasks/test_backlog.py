from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.tasks.backlog import MAX_BACKLOG, MAX_BACKLOG_BYTES, Consumer, ItemBacklog, count_taken


@pytest.mark.parametrize(
    ("backlog", "full", "room"),
    [
        (ItemBacklog(), False, True),
        (ItemBacklog(MAX_BACKLOG // 2 - 1), False, True),
        (ItemBacklog(MAX_BACKLOG // 2), False, False),
        (ItemBacklog(MAX_BACKLOG - 1), False, False),
        (ItemBacklog(MAX_BACKLOG), True, False),
        (ItemBacklog(1, MAX_BACKLOG_BYTES // 2 - 1), False, True),
        (ItemBacklog(1, MAX_BACKLOG_BYTES // 2), False, False),
        (ItemBacklog(1, MAX_BACKLOG_BYTES), True, False),
    ],
)
def test_a_generator_waits_at_the_limit_and_goes_on_below_half_of_it(backlog, full, room):
    assert (backlog.is_full(), backlog.has_room()) == (full, room)


def test_the_smallest_backlog_is_empty_before_the_generator_goes_on():
    assert ItemBacklog(1).is_full(1)
    assert not ItemBacklog(1).has_room(1)
    assert ItemBacklog(0).has_room(1)


@given(st.integers(0, 100), st.integers(0, 100), st.integers(1, 60), st.integers(1, 60))
def test_no_backlog_is_full_and_has_room(items, size, max_items, max_size):
    backlog = ItemBacklog(items, size)
    assert not (backlog.is_full(max_items, max_size) and backlog.has_room(max_items, max_size))
    assert ItemBacklog().has_room(max_items, max_size), "a generator whose elements have taken all of it goes on"


def test_the_slowest_map_that_counts_decides():
    slow, fast = Consumer(3), Consumer(9)
    assert count_taken(10, []) == 10
    assert count_taken(10, [slow, fast]) == 3
    assert count_taken(10, [Consumer(7, per_item=2)]) == 3, "half of an item is not taken"
    assert count_taken(10, [fast, Consumer(0, per_item=0)]) == 9, "a product with an empty list has no elements"
    assert count_taken(10, [fast, Consumer(0, opened=False)]) == 0
    assert count_taken(10, [fast, Consumer(0, opened=False, waits_for_end=True)]) == 9
    assert count_taken(10, [fast, Consumer(4, waits_for_end=True)]) == 4, "it has opened, so it waits for nothing"
    assert count_taken(10, [fast, Consumer(0, ended=True)]) == 9
