"""Which stalls are reported: those that last."""

from tidemill.core.supervision.long_waits import AGAIN_SECONDS, FIRST_SECONDS, LongWaits

WAITS = {"hook": "has not returned"}


def test_a_stall_is_reported_once_it_lasts_and_again_at_intervals() -> None:
    long_waits = LongWaits()
    reported = [moment / 4 for moment in range(4 * 130) if long_waits.feed(0, WAITS, moment / 4)]
    assert reported == [FIRST_SECONDS, FIRST_SECONDS + AGAIN_SECONDS, FIRST_SECONDS + 2 * AGAIN_SECONDS]


def test_a_stall_that_passes_is_not_reported_and_a_later_one_counts_from_its_own_beginning() -> None:
    long_waits = LongWaits()
    assert long_waits.feed(0, WAITS, 0.0) == []
    assert long_waits.feed(0, {}, FIRST_SECONDS - 1) == []
    assert long_waits.feed(0, WAITS, FIRST_SECONDS) == []
    assert long_waits.feed(0, WAITS, 2 * FIRST_SECONDS) == [("hook", "has not returned")]


def test_stalls_are_kept_by_engine_and_name_and_reported_with_the_newest_reason() -> None:
    long_waits = LongWaits()
    assert long_waits.feed(0, {"a": "1"}, 0.0) == []
    assert long_waits.feed(1, {"a": "1"}, 3.0) == []
    assert long_waits.feed(0, {"a": "2", "b": "1"}, FIRST_SECONDS) == [("a", "2")]
    assert long_waits.feed(1, {"a": "1"}, FIRST_SECONDS) == []
    assert long_waits.feed(0, {"b": "1"}, 2 * FIRST_SECONDS) == [("b", "1")]
