"""Redrives: which letters are sent, in which steps and how fast; what is saved is sent once, whatever happens."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.deadletters.letter_stats import OTHERS, LetterStats, generalize_error
from tidemill.core.deadletters.redrive import (
    Batching,
    Facts,
    LetterCriteria,
    Recent,
    RedrivePace,
    RedrivePosition,
    RedriveTally,
    SinkNames,
    Target,
    UnsentReason,
    identify_redrive,
    judge_letter,
)

LETTER = Facts(
    "abc123",
    "delivery",
    "postgres",
    "orders",
    written_at=100.0,
    keys=("k1", "k2"),
    redrives=1,
    messages=2,
    payloads=1,
    text="No SUCH table",
)


@pytest.mark.parametrize(
    ("criteria", "matches"),
    [
        (LetterCriteria(), True),
        (LetterCriteria(ids=("abc",)), True),
        (LetterCriteria(ids=("x", "abc123")), True),
        (LetterCriteria(ids=("bc",)), False),
        (LetterCriteria(kinds=("task", "delivery")), True),
        (LetterCriteria(kinds=("task",)), False),
        (LetterCriteria(sinks=("orders",)), True),
        (LetterCriteria(sinks=("postgres.orders",)), True),
        (LetterCriteria(sinks=("sinks.postgres.orders",)), True),
        (LetterCriteria(sinks=("postgres",)), False),
        (LetterCriteria(since=100.0, until=100.5), True),
        (LetterCriteria(since=100.1), False),
        (LetterCriteria(until=100.0), False),
        (LetterCriteria(keys=("k2", "other")), True),
        (LetterCriteria(keys=("k",)), False),
        (LetterCriteria(text="such TABLE"), True),
        (LetterCriteria(text="view"), False),
        (LetterCriteria(kinds=("delivery",), keys=("other",)), False),
    ],
)
def test_a_letter_matches_if_it_meets_one_value_of_every_criterion(criteria: LetterCriteria, matches: bool) -> None:
    assert criteria.matches(LETTER) is matches


def test_a_letter_without_a_sink_matches_no_sink() -> None:
    assert not LetterCriteria(sinks=(".",)).matches(Facts("1", "task"))


def test_criteria_are_empty_only_if_none_is_set() -> None:
    assert LetterCriteria().empty
    assert not LetterCriteria(text="x").empty


def test_the_same_selection_to_the_same_target_is_the_same_redrive() -> None:
    one = identify_redrive("t", "b", "source", LetterCriteria(kinds=("task", "parse"), since=1.0))
    assert one == identify_redrive("t", "b", "source", LetterCriteria(kinds=("parse", "task", "task"), since=1.0))
    others = [
        identify_redrive("u", "b", "source", LetterCriteria(kinds=("task", "parse"), since=1.0)),
        identify_redrive("t", "c", "source", LetterCriteria(kinds=("task", "parse"), since=1.0)),
        identify_redrive("t", "b", "sink", LetterCriteria(kinds=("task", "parse"), since=1.0)),
        identify_redrive("t", "b", "source", LetterCriteria(kinds=("task",), since=1.0)),
        identify_redrive("t", "b", "source", LetterCriteria(kinds=("task", "parse"), until=1.0)),
        identify_redrive("t", "b", "source", LetterCriteria(sinks=("task", "parse"), since=1.0)),
    ]
    assert len({one, *others}) == 7


@pytest.mark.parametrize(
    ("facts", "target", "why"),
    [
        (LETTER, Target.SOURCE, None),
        (LETTER, Target.TOPIC, None),
        (LETTER, Target.SINK, None),
        (Facts("1", "task", redrives=3), Target.SOURCE, UnsentReason.MAX_REDRIVES),
        (Facts("1", "task", redrives=4), Target.TOPIC, UnsentReason.MAX_REDRIVES),
        (Facts("1", "delivery", "http", "a", redrives=9, payloads=1), Target.SINK, None),
        (Facts("1", "task", messages=0), Target.SOURCE, UnsentReason.NO_MESSAGES),
        (Facts("1", "task"), Target.SINK, UnsentReason.NO_PAYLOADS),
        (Facts("1", "hook", payloads=2), Target.SINK, UnsentReason.NO_PAYLOADS),
    ],
)
def test_a_letter_is_sent_or_has_a_reason_not_to_be(facts: Facts, target: Target, why: UnsentReason | None) -> None:
    assert judge_letter(facts, LetterCriteria(), target, max_redrives=3) is why


def test_a_letter_that_is_not_selected_has_no_other_reason() -> None:
    assert (
        judge_letter(Facts("1", "task", redrives=9), LetterCriteria(kinds=("parse",)), Target.SOURCE, 3)
        is UnsentReason.NOT_SELECTED
    )


# -- the cursor -----------------------------------------------------------------------------------------------


class Simulation:
    """A topic, what survives a crash of a redrive (what was sent, what was saved), and one run of it."""

    def __init__(self, letters: dict[int, int], together: bool) -> None:
        self.ends = letters
        self.together = together
        self.saved: dict[int, int] = {}
        self.sent: list[tuple[int, int]] = []
        self.begin()

    def begin(self) -> None:
        self.cursor = RedrivePosition(self.saved, self.ends)
        self.positions = {number: min(self.saved.get(number, 0), end) for number, end in self.ends.items()}
        self.batch: list[tuple[int, int]] = []
        assert self.cursor.left == sum(end - self.positions[number] for number, end in self.ends.items())

    def read(self, pick: int) -> None:
        unfinished = [number for number, end in self.ends.items() if self.positions[number] < end]
        if unfinished:
            number = unfinished[pick % len(unfinished)]
            self.batch.append((number, self.positions[number]))
            self.positions[number] += 1
            self.cursor.advance(number, self.positions[number])

    def flush(self, crash_between: bool) -> None:
        positions = self.cursor.unsaved
        if crash_between and self.together:
            # A transaction that did not end: nothing of it is visible.
            self.begin()
            return
        self.sent += self.batch
        if crash_between:
            self.begin()
            return
        self.batch = []
        self.saved |= positions
        self.cursor.note_saved(positions)
        assert self.cursor.unsaved == {}
        assert all(self.cursor.find_saved(number) == at for number, at in positions.items())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.integers(0, 5)),
        st.tuples(st.just("flush"), st.booleans()),
        st.tuples(st.just("crash"), st.none()),
    ),
    max_size=60,
)
TOPIC = st.dictionaries(st.integers(0, 3), st.integers(0, 8), min_size=1)


def carried_out(letters: dict[int, int], steps: list, *, together: bool) -> Simulation:
    run = Simulation(letters, together)
    for name, value in steps:
        if name == "read":
            run.read(value)
        elif name == "flush":
            run.flush(value)
        else:
            run.begin()
    while run.cursor.left:
        run.read(0)
    run.flush(False)
    return run


@given(TOPIC, STEPS)
def test_with_transactions_each_letter_is_sent_exactly_once_whatever_crashes(
    letters: dict[int, int], steps: list
) -> None:
    run = carried_out(letters, steps, together=True)
    expected = [(number, offset) for number, end in letters.items() for offset in range(end)]
    assert sorted(run.sent) == sorted(expected)


@given(TOPIC, STEPS)
def test_without_transactions_only_letters_of_an_unsaved_step_are_sent_again(
    letters: dict[int, int], steps: list
) -> None:
    run = carried_out(letters, steps, together=False)
    expected = {(number, offset) for number, end in letters.items() for offset in range(end)}
    crashes = sum(1 for name, value in steps if name == "flush" and value)
    assert set(run.sent) == expected
    if not crashes:
        assert len(run.sent) == len(expected)
    # Within a partition letters are sent in order; a repetition starts at the saved position.
    for number, end in letters.items():
        offsets = [offset for other, offset in run.sent if other == number]
        assert all(after <= before + 1 for before, after in itertools.pairwise(offsets))
        assert offsets == [] or (offsets[0] == 0 and max(offsets) == end - 1)


@given(TOPIC, st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12))))
def test_a_cursor_never_moves_back_nor_beyond_the_end(letters: dict[int, int], told: list) -> None:
    cursor = RedrivePosition({}, letters)
    lefts = [cursor.left]
    for partition, position in told:
        cursor.advance(partition, position)
        lefts.append(cursor.left)
    assert lefts == sorted(lefts, reverse=True)
    assert lefts[-1] >= 0
    assert all(at <= letters[number] for number, at in cursor.unsaved.items())


# -- pace, batches, memory ------------------------------------------------------------------------------------


@given(
    st.floats(0.1, 1000.0),
    st.lists(st.tuples(st.integers(1, 5), st.floats(0.0, 10.0)), min_size=1, max_size=40),
)
def test_no_more_is_sent_than_the_rate_allows(rate: float, sends: list[tuple[int, float]]) -> None:
    pace, now, sent = RedrivePace(rate), 0.0, []
    for count, idle in sends:
        now += idle
        now += pace.find_wait(now)
        pace.note_sent(count, now)
        sent.append((now, count))
    for first, (began, _) in enumerate(sent):
        for last in range(first + 1, len(sent)):
            before = sum(count for _, count in sent[first:last])
            assert sent[last][0] - began >= before / rate - 1e-6


def test_without_a_rate_nothing_waits() -> None:
    pace = RedrivePace(None)
    pace.note_sent(1_000, 5.0)
    assert pace.find_wait(5.0) == 0.0


def test_a_batch_is_due_by_count_size_or_age() -> None:
    batching = Batching(max_letters=2, max_bytes=100, max_seconds=1.0)
    assert not batching.is_due(1e9)
    batching.add(10, 5.0)
    assert not batching.is_due(5.9)
    assert batching.is_due(6.0)
    batching.add(10, 5.5)
    assert batching.is_due(5.5)
    batching.clear()
    assert not batching.is_due(1e9)
    batching.add(100, 7.0)
    assert batching.is_due(7.0)


def test_a_letter_that_was_written_twice_is_recognised_while_it_is_remembered() -> None:
    recent = Recent(size=2)
    assert [recent.check_seen(letter_id) for letter_id in ("a", "a", "b", "c", "a", "c")] == [
        False,
        True,
        False,
        False,
        False,
        True,
    ]


def test_selected_letters_that_were_not_sent_are_listed_up_to_a_bound() -> None:
    tally = RedriveTally(keep=1)
    tally.note_skipped(UnsentReason.NOT_SELECTED)
    tally.note_skipped(UnsentReason.LOST, "a", "gone")
    tally.note_skipped(UnsentReason.LOST, "b", "gone")
    tally.note_skipped(UnsentReason.TWICE, "c")
    assert tally.failed == [("a", UnsentReason.LOST, "gone")]
    assert tally.unsent == 2
    assert tally.why == {UnsentReason.NOT_SELECTED: 1, UnsentReason.LOST: 2, UnsentReason.TWICE: 1}


def test_letters_that_were_sent_in_part_are_listed_up_to_a_bound() -> None:
    tally = RedriveTally(keep=1)
    tally.note_sent_in_part("a", 3)
    tally.note_sent_in_part("b", 4)
    assert (tally.lost_messages, tally.in_part, tally.unsent) == (7, [("a", 3)], 0)


@pytest.mark.parametrize(
    ("asked", "unknown"),
    [
        (["api"], set()),
        (["http.api", "sinks.redis.cache"], set()),
        (["cache", "cahce"], {"cahce"}),
        (["redis.api"], {"redis.api"}),
        ([], set()),
    ],
)
def test_names_that_match_no_sink_are_found(asked: list[str], unknown: set[str]) -> None:
    names = SinkNames(asked, [("http", "api")])
    names.note_sink("redis", "cache")
    names.note_sink("", "")
    assert names.unknown == unknown


# -- counts ---------------------------------------------------------------------------------------------------


def test_errors_that_differ_only_in_numbers_and_ids_are_counted_together() -> None:
    assert generalize_error("timeout after 30000 ms\ntrace") == generalize_error("timeout after 31234 ms")
    assert generalize_error("no 0f8fad5b-d9cb-469f-a165-70867728950e") == generalize_error(
        "no 7c9e6679-7425-40de-944b-e07fc1f90ae7"
    )
    assert generalize_error("exit code 1") != generalize_error("exit code 2")
    assert len(generalize_error("x" * 1000)) == 120


def test_letters_are_counted_by_kind_sink_error_and_day() -> None:
    stats = LetterStats()
    stats.add(Facts("1", "task", written_at=86_400.0, messages=3), "exit code 1")
    stats.add(Facts("2", "delivery", "http", "api", written_at=0.0, redrives=1), "refused")
    stats.add(Facts("3", "task", written_at=90_000.0), "exit code 1")
    assert (stats.letters, stats.messages, stats.redriven, stats.oldest, stats.newest) == (3, 5, 1, 0.0, 90_000.0)
    assert stats.counts == {
        "kind": {"task": 2, "delivery": 1},
        "sink": {"http.api": 1},
        "error": {"exit code 1": 2, "refused": 1},
        "day": {"1970-01-01": 1, "1970-01-02": 2},
    }
    assert list(stats.counts["day"]) == ["1970-01-01", "1970-01-02"]


def test_different_errors_beyond_a_bound_are_counted_together() -> None:
    stats = LetterStats(most=2)
    for error in ("a", "b", "c", "d", "a"):
        stats.add(Facts("1", "task"), error)
    assert stats.counts["error"] == {"a": 2, OTHERS: 2, "b": 1}
