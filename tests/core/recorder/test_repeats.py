"""Which frames of engines are new."""

from __future__ import annotations

from tidemill.core.recorder.repeats import KnownFrames


def test_frames_that_are_sent_again_are_known():
    known = KnownFrames()
    assert [known.is_new("a", seq) for seq in (1, 2, 3, 2, 3, 4)] == [True, True, True, False, False, True]


def test_engines_are_numbered_each_for_itself():
    known = KnownFrames()
    assert known.is_new("a", 5)
    assert known.is_new("b", 1)
    assert not known.is_new("a", 4)


def test_the_engine_that_was_silent_for_longest_is_forgotten():
    known = KnownFrames(max_engines=2)
    known.is_new("a", 1)
    known.is_new("b", 1)
    known.is_new("a", 2)
    known.is_new("c", 1)
    assert not known.is_new("a", 2)
    assert known.is_new("b", 1)
