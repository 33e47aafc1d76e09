"""Metadata that is committed with offsets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.streams.offset_metadata import MAX_METADATA_BYTES, decode_metadata, encode_metadata
from tidemill.core.streams.redelivery_items import Commit

gaps = st.lists(st.tuples(st.integers(1, 10**6), st.integers(1, 10**6)), max_size=600)


@given(st.integers(0, 2**62), gaps, st.lists(st.integers(1, 9), max_size=400))
def test_metadata_fits_and_decodes_to_a_prefix_of_the_commit(
    floor: int, steps: list[tuple[int, int]], counts: list[int]
) -> None:
    clean, at = [], floor
    for gap, length in steps:
        clean.append((at + gap, at + gap + length))
        at += gap + length
    failures = tuple((floor + 3 * index, count) for index, count in enumerate(counts))
    text = encode_metadata(Commit("a", floor, tuple(clean), failures))
    assert len(text.encode()) <= MAX_METADATA_BYTES
    said = decode_metadata("a", text)
    if said is None:
        assert not clean
        assert not failures
        return
    assert (said.lane, said.floor) == ("a", floor)
    assert said.clean == tuple(clean)[: len(said.clean)]
    assert said.failures == failures[: len(said.failures)]
    if len(clean) <= 50 and len(failures) <= 50:
        assert (said.clean, said.failures) == (tuple(clean), failures)


def test_metadata_leaves_out_what_does_not_fit_from_the_end():
    clean = tuple((3 * n + 1, 3 * n + 2) for n in range(2000))
    failures = tuple((3 * n, 2) for n in range(2000))
    said = decode_metadata("a", encode_metadata(Commit("a", 0, clean, failures)))
    assert said is not None
    assert 200 < len(said.clean) < 2000
    assert 200 < len(said.failures) < 2000
    assert (said.clean, said.failures) == (clean[: len(said.clean)], failures[: len(said.failures)])


@pytest.mark.parametrize("beyond", [-9, 2**63])
def test_offsets_that_could_not_be_decoded_are_left_out(beyond: int) -> None:
    commit = Commit("a", 10, ((10 + beyond, 12 + beyond), (12, 14), (20, 20 + beyond)), ((10 + beyond, 2), (11, 3)))
    text = encode_metadata(commit)
    assert text == "tidemill1;10;1+3;2+2"
    assert decode_metadata("a", text) == Commit("a", 10, ((12, 14),), ((11, 3),))


def test_metadata_without_anything_that_can_be_decoded_is_empty():
    assert encode_metadata(Commit("a", 10, (), ((1, 2), (11, 0)))) == ""
    assert encode_metadata(Commit("a", -1, ((2, 3),), ())) == ""
    assert encode_metadata(Commit("a", 2**63, ((2**63 + 2, 2**63 + 3),), ())) == ""


@pytest.mark.parametrize(
    "text", [None, "", "somebody else's", "tidemill1;1", "tidemill1;1;2+;", "tidemill1;1;;1+2,", "tidemill1;x;;"]
)
def test_a_text_in_another_format_is_ignored(text: str | None) -> None:
    assert decode_metadata("a", text) is None
