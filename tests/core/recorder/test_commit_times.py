"""When messages were committed."""

from __future__ import annotations

import random

from tidemill.core.recorder.commit_times import CommitTimes


def test_a_message_has_the_time_of_the_commit_that_first_passed_it() -> None:
    commits: CommitTimes[str] = CommitTimes()
    for offset, at in ((10, 100), (20, 200), (20, 250), (30, 300)):
        commits.note("a", offset, at)
    commits.note("b", 5, 150)
    assert commits.find(["a", "a", "a", "b", "a", "b", "c", "a", "a"], [9, 10, 19, 4, 29, 5, 0, 30, 31]) == [
        100, 200, 200, 150, 300, None, None, None, None,
    ]  # fmt: skip


def test_an_offset_that_goes_back_starts_again() -> None:
    commits: CommitTimes[str] = CommitTimes()
    commits.note("a", 10, 100)
    commits.note("a", 5, 300)
    assert commits.find(["a", "a"], [4, 7]) == [300, None]


def test_after_a_clock_is_set_back_commits_have_their_own_times() -> None:
    commits: CommitTimes[str] = CommitTimes()
    commits.note("a", 10, 100)
    commits.note("a", 20, 50)
    commits.note("a", 30, 60)
    assert commits.find(["a", "a"], [15, 25]) == [50, 60]


def test_only_commits_that_rows_may_ask_for_are_kept() -> None:
    commits: CommitTimes[str] = CommitTimes()
    for n in range(1, 101):
        commits.note("a", n * 10, n)
        commits.note("b", n * 10, 1)
    commits.forget_before(1)
    assert commits.find(["a", "b"], [5, 5]) == [1, 1]
    commits.forget_before(50)
    assert commits.find(["a", "a", "b"], [495, 995, 995]) == [50, 100, None]
    commits.forget_before(1000)
    assert commits.find(["a"], [995]) == [None]


def test_neighbours_and_strangers_get_the_same_answers() -> None:
    rng = random.Random(1)
    commits: CommitTimes[int] = CommitTimes()
    ends: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    for at in range(1, 60):
        partition = rng.randrange(2)
        end = (ends[partition][-1][0] if ends[partition] else 0) + rng.randrange(1, 9)
        ends[partition].append((end, at))
        commits.note(partition, end, at)
    places = [rng.randrange(2) for _ in range(3000)]
    offsets = [rng.randrange(200) for _ in places]
    expected = [
        next((at for end, at in ends[place] if offset < end), None)
        for place, offset in zip(places, offsets, strict=True)
    ]
    assert commits.find(places, offsets) == expected
