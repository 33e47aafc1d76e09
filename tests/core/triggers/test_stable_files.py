"""Files that become stable."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.stable_files import StableFiles, Version


def version(number: int) -> Version:
    return Version(number, 10, 1)


def test_a_file_is_returned_once_when_it_has_been_unchanged_for_long_enough():
    settling = StableFiles(2.0)
    assert settling.due is None
    settling.see("a", version(1), 0.0)
    settling.see("a", version(2), 1.0)
    settling.see("a", version(2), 1.5)
    assert settling.take(2.0) == []
    assert settling.due == 3.0
    assert settling.list_candidates(2.9) == []
    assert settling.list_candidates(3.0) == ["a"]
    assert settling.take(3.0) == [("a", version(2))]
    settling.see("a", version(2), 4.0)
    assert settling.take(9.0) == []
    assert settling.due is None


def test_a_file_that_changes_after_it_was_returned_is_returned_again():
    settling = StableFiles(0.0)
    settling.see("a", version(1), 0.0)
    assert settling.take(0.0) == [("a", version(1))]
    settling.see("a", version(2), 1.0)
    assert settling.take(1.0) == [("a", version(2))]


def test_a_known_file_is_not_returned_before_it_changes():
    settling = StableFiles(1.0)
    settling.know_all({"a": version(1), "b": version(1)}, 0.0)
    settling.see_all({"a": version(1), "b": version(2)}, 1.0)
    assert settling.take(5.0) == [("b", version(2))]


def test_a_file_that_was_removed_is_forgotten():
    settling = StableFiles(1.0)
    settling.see("a", version(1), 0.0)
    settling.see("b", version(1), 0.0)
    settling.see("a", None, 0.5)
    settling.see_all({}, 0.5)
    assert settling.list_candidates(9.0) == []
    assert settling.take(9.0) == []
    settling.see("a", version(1), 10.0)
    assert settling.take(10.5) == []
    assert settling.take(11.0) == [("a", version(1))]


def test_the_older_file_comes_first_and_then_the_smaller_name():
    settling = StableFiles(1.0)
    settling.see_all({"c": version(1), "b": version(2), "a": version(2)}, 0.0)
    assert [path for path, _ in settling.take(1.0)] == ["c", "a", "b"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["see", "gone", "all", "take"]), st.sampled_from("abc"), st.integers(0, 2), st.floats(0, 2)
        ),
        max_size=50,
    )
)
def test_versions_are_returned_once_and_never_too_early(steps):
    settling = StableFiles(1.0)
    there: dict[str, tuple[Version, float]] = {}
    returned: set[tuple[str, Version, float]] = set()
    now = 0.0
    for what, path, number, passed in steps:
        now += passed
        if what == "see":
            settling.see(path, version(number), now)
            if path not in there or there[path][0] != version(number):
                there[path] = (version(number), now)
        elif what == "gone":
            settling.see(path, None, now)
            there.pop(path, None)
        elif what == "all":
            settling.see_all({path: version(number)}, now)
            same = path in there and there[path][0] == version(number)
            there = {path: there[path] if same else (version(number), now)}
        else:
            settled = settling.take(now)
            for found, seen in settled:
                since = there[found][1]
                assert there[found][0] == seen
                assert now >= since + 1.0
                assert (found, seen, since) not in returned
                returned.add((found, seen, since))
            for found, (seen, since) in there.items():
                assert (found, seen, since) in returned or now < since + 1.0
