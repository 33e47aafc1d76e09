"""Differences and sums of counts."""

from __future__ import annotations

from tidemill.core.recorder.counting import (
    add_buckets,
    find_changed,
    seconds_between_partitions,
    subtract_buckets,
    subtract_count,
)


def test_a_count_that_fell_began_again():
    assert subtract_count(10, 4) == 6
    assert subtract_count(3, 4) == 3


def test_buckets_that_were_not_there_had_nothing():
    assert subtract_buckets([3, 4], []) == [3, 4]
    assert subtract_buckets([3, 4], [1, 4]) == [2, 0]
    assert subtract_buckets([], [1]) == []


def test_buckets_are_added_whichever_is_missing():
    assert add_buckets([1], []) == [1]
    assert add_buckets([], []) == []
    assert add_buckets([1, 2], [3, 4]) == [4, 6]


def test_what_is_new_or_other_has_changed():
    assert find_changed({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 1}) == ["b", "c"]


def test_many_partitions_are_counted_less_often():
    assert [seconds_between_partitions(number) for number in (0, 1, 64, 65, 1000)] == [1, 1, 1, 2, 16]
