"""Which messages of a revoked lane are dropped, and which are waited for."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.pipeline.handover import Handover


def test_only_messages_before_the_first_one_with_unstarted_work_are_waited_for():
    handover = Handover(unresolved=[10, 12, 13, 20], unstarted=[13, 20])
    assert handover.left == 2
    handover.note_resolved(10)
    handover.note_resolved(12)
    assert handover.left == 0


def test_with_everything_running_everything_is_waited_for():
    assert Handover([1, 2, 5], []).left == 3


def test_if_the_head_has_not_started_nothing_is_waited_for():
    assert Handover([1, 2, 5], [1]).left == 0


def test_a_task_that_would_have_to_run_again_drops_its_message_and_all_behind_it():
    handover = Handover([1, 2, 5, 6], [])
    handover.note_withdrawn([6, 5])
    assert handover.left == 2
    handover.note_withdrawn([6])
    handover.note_withdrawn([])
    assert handover.left == 2
    handover.note_withdrawn([1, 9])
    assert handover.left == 0


@given(
    st.sets(st.integers(0, 30)),
    st.data(),
)
def test_exactly_what_could_still_be_committed_is_waited_for(unresolved, data):
    unstarted = data.draw(st.sets(st.sampled_from(sorted(unresolved)))) if unresolved else set()
    handover = Handover(unresolved, unstarted)
    open_, again = set(unresolved), set(unstarted)
    before = handover.left
    for offset, resolves in data.draw(st.lists(st.tuples(st.integers(0, 30), st.booleans()), max_size=20)):
        if resolves:
            handover.note_resolved(offset)
            open_.discard(offset)
        else:
            handover.note_withdrawn([offset])
            again.add(offset)
        cut = min(again, default=31)
        assert handover.left == sum(offset < cut for offset in open_)
        assert handover.left <= before
        before = handover.left
