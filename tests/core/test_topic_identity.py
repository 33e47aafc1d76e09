"""Which topic an offset belongs to: decided by ids that are known, and by nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.streams.offset_metadata import MAX_METADATA_BYTES
from tidemill.core.topic_identity import MARK_BYTES, TopicIdentity, add_mark, is_replaced, split_mark

ONE, TWO, THREE = "taYg+JvuRumb3DRM9XqF/A", "C3Rz1Ot3S-CIsSjEYSPR4Q", "CeIZZCUuSj6ihgDVGn0AOg"
IDS = st.sampled_from([None, ONE, TWO])


@given(IDS, st.text())
def test_a_mark_and_a_note_come_back_as_they_were(topic_id: str | None, note: str) -> None:
    if topic_id is None and note.startswith("topic="):
        return  # nobody writes such a note
    assert split_mark(add_mark(topic_id, note)) == (topic_id, note)


@pytest.mark.parametrize(
    "text", ["", "mine", "topic=short;x", f"topic={ONE}", f" topic={ONE};x", f"topic={ONE[:-1]}é;x"]
)
def test_a_text_in_another_format_is_a_note_without_an_id(text: str) -> None:
    assert split_mark(text) == (None, text)


def test_a_mark_and_the_longest_note_fit_beside_an_offset() -> None:
    assert len(add_mark(ONE, "")) == MARK_BYTES
    assert MARK_BYTES + MAX_METADATA_BYTES <= 4096


@pytest.mark.parametrize("before", [None, ONE, TWO])
@pytest.mark.parametrize("now", [None, ONE, TWO])
def test_only_two_known_ids_that_differ_are_two_topics(before: str | None, now: str | None) -> None:
    replaced = None not in (before, now) and before != now
    assert is_replaced(before, now) is replaced
    identity: TopicIdentity[str] = TopicIdentity()
    assert identity.assign("a", before, now) is not replaced
    assert identity.find_id("a") == (now or before)


def test_an_id_that_is_known_later_is_compared_with_the_one_beside_the_offset() -> None:
    identity: TopicIdentity[str] = TopicIdentity()
    assert identity.assign("a", ONE, None)
    assert identity.assign("b", None, None)
    assert identity.find_replaced(None) == []
    assert identity.find_replaced(TWO) == ["a"]
    assert (identity.find_id("a"), identity.find_id("b")) == (ONE, TWO), "b takes the id on"


def test_a_partition_is_replaced_until_it_is_assigned_again() -> None:
    identity: TopicIdentity[str] = TopicIdentity()
    identity.assign("a", None, ONE)
    assert identity.find_replaced(ONE) == []
    assert identity.find_replaced(TWO) == identity.find_replaced(TWO) == ["a"]
    assert identity.assign("a", None, TWO)
    assert identity.find_replaced(TWO) == []
    identity.forget("a")
    identity.forget("a")
    assert identity.find_replaced(THREE) == []
    assert identity.find_id("a") is None


@given(st.lists(st.tuples(st.sampled_from(["assign", "look", "forget"]), st.sampled_from("ab"), IDS, IDS), max_size=30))
def test_no_known_topic_is_ever_taken_for_another(steps: list[tuple[str, str, str | None, str | None]]) -> None:
    identity: TopicIdentity[str] = TopicIdentity()
    read: dict[str, str | None] = {}
    for step, lane, committed, now in steps:
        if step == "forget":
            identity.forget(lane)
            read.pop(lane, None)
        elif step == "assign":
            trusted = identity.assign(lane, committed, now)
            assert trusted is not (committed is not None and now is not None and committed != now)
            read[lane] = now or committed
        else:
            replaced = identity.find_replaced(now)
            assert set(replaced) == {lane for lane, known in read.items() if known and now and known != now}
            read = {lane: known or now for lane, known in read.items()}
        assert {lane: identity.find_id(lane) for lane in read} == read
