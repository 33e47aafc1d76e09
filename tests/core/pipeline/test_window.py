"""Windowing: bounds, order, and when the open window is closed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.pipeline.window import Window, Windowing

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 30)),
        st.tuples(st.just("idle"), st.none()),
        st.tuples(st.just("expire"), st.none()),
        st.tuples(st.just("wait"), st.integers(0, 5)),
        st.tuples(st.just("flush"), st.none()),
    ),
    max_size=60,
)


@given(st.integers(1, 5), st.integers(1, 20), st.sampled_from([0, 3]), steps)
def test_every_item_is_in_one_window_in_order_and_within_the_bounds(
    max_count: int, max_bytes: int, linger: int, script: list[tuple[str, int | None]]
) -> None:
    windowing: Windowing[tuple[int, int, float]] = Windowing(max_count, max_bytes, linger)
    closed: list[tuple[Window[tuple[int, int, float]], float]] = []
    count, now = 0, 0.0
    for action, value in script:
        window = None
        if action == "add":
            assert value is not None
            window = windowing.add((count, value, now), value, now)
            count += 1
        elif action == "wait":
            assert value is not None
            now += value
        elif action == "flush":
            window = windowing.flush()
        else:
            window = windowing.close_idle(now) if action == "idle" else windowing.expire(now)
            assert windowing.due is None or windowing.due > now, "what is due was closed"
        if window is not None:
            closed.append((window, now))
    last = windowing.flush()
    windows = [window for window, _ in closed] + ([last] if last else [])
    assert [window.number for window in windows] == list(range(len(windows)))
    assert [item[0] for window in windows for item in window.items] == list(range(count))
    for window in windows:
        assert window.items
        assert len(window.items) <= max_count
        assert window.size_bytes == sum(size for _, size, _ in window.items)
        assert window.size_bytes <= max_bytes or len(window.items) == 1
    assert windowing.flush() is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20))
def test_with_a_linger_no_window_stays_open_longer_than_that(waits: list[int]) -> None:
    windowing: Windowing[float] = Windowing(1000, 1000, 3.0)
    now = 0.0
    for wait in waits:
        while windowing.due is not None and windowing.due <= now + wait:
            window = windowing.expire(windowing.due)
            assert window is not None
            assert windowing.due is None
        now += wait
        windowing.add(now, 1, now)
        assert windowing.due is not None
        assert windowing.due <= now + 3.0


def test_a_window_closes_by_count_at_the_item_that_fills_it() -> None:
    windowing: Windowing[str] = Windowing(2, 100, 0)
    assert windowing.add("a", 1, 0.0) is None
    assert windowing.add("b", 1, 0.0) == Window(0, ["a", "b"], 2)


def test_an_item_that_just_fits_fills_the_window() -> None:
    windowing: Windowing[str] = Windowing(10, 100, 0)
    assert windowing.add("a", 60, 0.0) is None
    assert windowing.add("b", 40, 0.0) == Window(0, ["a", "b"], 100)


def test_without_a_linger_a_window_closes_as_soon_as_nothing_more_is_waiting() -> None:
    windowing: Windowing[str] = Windowing(10, 100, 0)
    windowing.add("a", 1, 0.0)
    assert windowing.due is None
    assert windowing.expire(99.0) is None
    assert windowing.close_idle(0.0) == Window(0, ["a"], 1)
    assert windowing.close_idle(0.0) is None


def test_with_a_linger_a_window_stays_open_although_nothing_more_is_waiting() -> None:
    windowing: Windowing[str] = Windowing(10, 100, 0.5)
    windowing.add("a", 1, 1.0)
    assert windowing.due == 1.5
    assert windowing.close_idle(1.4) is None
    assert windowing.expire(1.5) == Window(0, ["a"], 1)


def test_an_item_larger_than_a_window_makes_its_own() -> None:
    windowing: Windowing[str] = Windowing(10, 100, 0.5)
    windowing.add("small", 1, 0.0)
    assert windowing.add("large", 1000, 0.1) == Window(0, ["small"], 1)
    assert windowing.due == 0.1, "it is due at once"
    assert windowing.add("next", 1, 0.2) == Window(1, ["large"], 1000)
    assert windowing.add("alone", 1000, 0.3) == Window(2, ["next"], 1)
    assert windowing.close_idle(0.3) == Window(3, ["alone"], 1000)
    assert windowing.add("first", 1000, 0.4) == Window(4, ["first"], 1000)


def test_a_large_item_without_a_linger_is_closed_when_nothing_more_is_waiting() -> None:
    windowing: Windowing[str] = Windowing(10, 100, 0)
    windowing.add("small", 1, 0.0)
    assert windowing.add("large", 1000, 0.0) == Window(0, ["small"], 1)
    assert windowing.due is None
    assert windowing.close_idle(0.0) == Window(1, ["large"], 1000)


def test_what_is_in_the_open_window_can_be_seen() -> None:
    windowing: Windowing[str] = Windowing(2, 1000, 1.0)
    windowing.add("a", 1, 0.0)
    assert list(windowing.items) == ["a"]
    windowing.add("b", 1, 0.0)
    assert not windowing.items


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([0, 3]),
    st.lists(st.tuples(st.lists(st.integers(0, 12), max_size=12), st.integers(0, 4), st.booleans()), max_size=8),
)
def test_items_that_are_added_together_are_in_the_windows_of_those_that_are_added_one_by_one(
    max_count: int, max_bytes: int, linger: int, script: list[tuple[list[int], int, bool]]
) -> None:
    together: Windowing[int] = Windowing(max_count, max_bytes, linger)
    apart: Windowing[int] = Windowing(max_count, max_bytes, linger)
    count, now = 0, 0.0
    for sizes, wait, idle in script:
        items = list(range(count, count + len(sizes)))
        count += len(sizes)
        expected = [apart.add(item, size, now) for item, size in zip(items, sizes, strict=True)]
        assert together.add_all(items, sizes, now) == [window for window in expected if window is not None]
        assert (together.items, together.due) == (apart.items, apart.due)
        now += wait
        if idle:
            assert together.close_idle(now) == apart.close_idle(now)
    assert together.flush() == apart.flush()


def test_the_linger_of_items_that_are_added_together_begins_with_the_first_of_each_window() -> None:
    windowing: Windowing[int] = Windowing(2, 100, 3)
    assert [window.items for window in windowing.add_all([1, 2, 3], [1, 1, 1], 7.0)] == [[1, 2]]
    assert (windowing.items, windowing.due) == ([3], 10.0)
    assert windowing.add_all([], [], 8.0) == []
    assert [window.items for window in windowing.add_all([4], [1], 8.0)] == [[3, 4]]
    assert windowing.due is None
