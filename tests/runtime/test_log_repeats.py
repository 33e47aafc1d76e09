"""Equal entries are written once and counted; nothing is swallowed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.runtime.log.repeats import AGAIN_SECONDS, FIRST_SECONDS, MAX_KINDS, Repeats


def entry(event: str = "no broker", **fields: Any) -> dict[str, Any]:
    return {"timestamp": "t", "level": "warning", "event": event, **fields}


def test_the_first_is_written_at_once_and_the_count_of_the_others_soon() -> None:
    repeats = Repeats()

    assert repeats.feed(entry(), 0.0) == [entry()]
    assert [repeats.feed(entry(timestamp=str(n)), 0.1 * n) for n in range(1, 6)] == [[]] * 5
    assert repeats.next_due == FIRST_SECONDS
    assert repeats.tell_due(0.99) == []
    assert repeats.tell_due(1.0) == [entry(timestamp="5", repeated=5)]
    assert repeats.next_due is None


def test_a_flood_is_told_at_long_intervals() -> None:
    repeats = Repeats()
    told = [(now, row.get("repeated", 1)) for now in range(31) for row in repeats.feed(entry(), float(now))]

    assert [now for now, _ in told] == [0, 10, 20, 30]
    assert sum(count for _, count in told) + sum(row["repeated"] for row in repeats.tell_all()) == 31


def test_what_comes_back_after_a_while_is_written_again() -> None:
    repeats = Repeats()

    assert repeats.feed(entry(), 0.0) == [entry()]
    assert repeats.tell_due(FIRST_SECONDS) == []
    assert repeats.feed(entry(), FIRST_SECONDS + 2) == []
    assert [row["repeated"] for row in repeats.tell_due(AGAIN_SECONDS)] == [1]
    assert repeats.tell_due(2 * AGAIN_SECONDS) == []
    assert repeats.feed(entry(), 2 * AGAIN_SECONDS) == [entry()]


def test_entries_that_differ_in_anything_but_the_time_are_all_written() -> None:
    repeats = Repeats()
    different = [entry(error="a"), entry(error="b"), entry(), entry(error="a", path="x"), entry("other")]

    assert [repeats.feed(each, 0.0) for each in different] == [[each] for each in different]


def test_the_same_of_several_engines_is_one_entry_that_names_them_where_that_is_wanted() -> None:
    repeats = Repeats(["engine"])

    assert repeats.feed(entry(engine=0), 0.0) == [entry(engine=0)]
    for engine in (2, 1, 1):
        assert repeats.feed(entry(engine=engine), 0.1) == []
    assert repeats.tell_due(5.0) == [entry(engine="1,2", repeated=3)]
    assert len([Repeats().feed(entry(engine=engine), 0.0) for engine in (0, 1)]) == 2


def test_counts_of_another_process_are_added_up() -> None:
    repeats = Repeats(["engine"])
    repeats.feed(entry(engine=0), 0.0)
    repeats.feed(entry(engine=1), 0.1)

    assert repeats.feed(entry(engine=1, repeated=57), 0.5) == []
    assert repeats.tell_due(1.0) == [entry(engine=1, repeated=58)]


@pytest.mark.parametrize("repeated", ["often", None, 2.5, True, 0, -3])
def test_a_field_of_the_user_that_is_called_repeated_is_not_added_to_the_count(repeated: Any) -> None:
    repeats = Repeats()

    assert repeats.feed(entry(repeated=repeated), 0.0) == [entry(repeated=repeated)]
    assert repeats.feed(entry(repeated=repeated), 0.1) == []
    assert repeats.tell_all() == [entry(repeated=1)]


class Unprintable:
    def __repr__(self) -> str:
        raise LookupError("no text")


def test_values_that_have_no_text_are_counted_too() -> None:
    repeats = Repeats(["engine"])
    bad = Unprintable()

    assert repeats.feed(entry(bad=bad, engine=bad), 0.0) == [entry(bad=bad, engine=bad)]
    assert repeats.feed(entry(bad=bad, engine=bad), 0.1) == []
    assert repeats.tell_all() == [entry(bad=bad, engine=bad, repeated=1)]


def test_an_entry_that_is_fed_while_another_is_counted_changes_nothing_about_it() -> None:
    repeats = Repeats()
    fed: list[Any] = []

    class Due(float):
        # As a finalizer or a signal handler of the same thread does.
        def __lt__(self, other: float) -> bool:
            fed.extend(repeats.feed(entry(f"from within {len(fed)}"), 0.0))
            return super().__lt__(other)

    for name in ("a", "b", "c"):
        repeats.feed(entry(name), 0.0)
        repeats.feed(entry(name), 0.0)
    for kind in repeats._kinds.values():
        kind.due = Due(1.0)

    assert repeats.next_due == 1.0
    assert [row["event"] for row in fed] == ["from within 0", "from within 1"]


def test_without_end_different_entries_do_not_fill_the_memory_and_lose_no_count() -> None:
    repeats = Repeats()
    repeats.feed(entry("first"), 0.0)
    repeats.feed(entry("first"), 0.0)

    told = [row for n in range(MAX_KINDS + 10) for row in repeats.feed(entry(str(n)), 0.0)]

    assert len(repeats._kinds) == MAX_KINDS
    assert [row["event"] for row in told if "repeated" in row] == ["first"]
    assert len(told) == MAX_KINDS + 11


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 3.0)), max_size=60))
def test_every_entry_is_written_or_counted(steps: list[tuple[int, float]]) -> None:
    repeats, now, told = Repeats(), 0.0, []
    for kind, pause in steps:
        now += pause
        told += repeats.feed(entry(str(kind)), now)
        told += repeats.tell_due(now)
    told += repeats.tell_all()

    assert sum(row.get("repeated", 1) for row in told) == len(steps)
