"""When messages were committed."""

from __future__ import annotations

import random

from tidemill.core.recorder.commit_times import CommitTimes


def test_a_message_has_the_time_of_the_commit_that_first_passed_it() -> None:
    commits: CommitTimes[str] = CommitTimes()
    for offset, at in ((10, 100), (20, 200), (20, 250), (30, 300)):
        commits.note("a", offset, at)
    commits.note("b", 5, 150)
    assert commits.find("a", [9, 10, 19, 29, 30, 31]) == [100, 200, 200, 300, None, None]
    assert commits.find("b", [4, 5]) == [150, None]
    assert commits.find("c", [0]) == [None]
    assert commits.find("a", [15, 12, 19]) == [200, 200, 200]


def test_an_offset_that_goes_back_starts_again() -> None:
    commits: CommitTimes[str] = CommitTimes()
    commits.note("a", 10, 100)
    commits.note("a", 5, 300)
    assert commits.find("a", [4, 7]) == [300, None]


def test_after_a_clock_is_set_back_commits_have_their_own_times() -> None:
    commits: CommitTimes[str] = CommitTimes()
    commits.note("a", 10, 100)
    commits.note("a", 20, 50)
    commits.note("a", 30, 60)
    assert commits.find("a", [15, 25]) == [50, 60]


def test_only_commits_that_rows_may_ask_for_are_kept() -> None:
    commits: CommitTimes[str] = CommitTimes()
    for n in range(1, 101):
        commits.note("a", n * 10, n)
        commits.note("b", n * 10, 1)
    commits.forget_before(1)
    assert commits.find("a", [5]) == commits.find("b", [5]) == [1]
    commits.forget_before(50)
    assert commits.find("a", [495, 995]) == [50, 100]
    assert commits.find("b", [995]) == [None]
    commits.forget_before(1000)
    assert commits.find("a", [995]) == [None]


def test_neighbours_and_strangers_get_the_same_answers() -> None:
    rng = random.Random(1)
    commits: CommitTimes[str] = CommitTimes()
    ends: list[tuple[int, int]] = []
    for at in range(1, 60):
        ends.append(((ends[-1][0] if ends else 0) + rng.randrange(1, 9), at))
        commits.note("a", *ends[-1])
    for length in (1, 2, 5, 100):
        start = rng.randrange(200)
        offsets = [start + rng.randrange(length) for _ in range(length)]
        for asked in (offsets, sorted(offsets)):
            expected = [next((at for end, at in ends if offset < end), None) for offset in asked]
            assert commits.find("a", asked) == expected
