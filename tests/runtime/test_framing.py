"""Frames arrive in any chunks, and what is too large is refused before it is read."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.runtime.framing import FrameSplitter, FrameTooLargeError, add_length, read_body


@given(st.lists(st.binary(max_size=20), max_size=8), st.integers(1, 9))
def test_bodies_come_out_as_they_went_in_whatever_the_chunks(bodies: list[bytes], size: int) -> None:
    stream = b"".join(map(add_length, bodies))
    splitter = FrameSplitter(20)
    found = [body for at in range(0, len(stream), size) for body in splitter.feed(stream[at : at + size])]
    assert (found, splitter.is_amid) == (bodies, False)


def test_what_came_before_a_frame_that_is_too_large_is_yielded() -> None:
    found = []
    with pytest.raises(FrameTooLargeError):
        found.extend(FrameSplitter(3).feed(add_length(b"abc") + add_length(b"abcd")))
    assert found == [b"abc"]


async def test_a_body_is_read_from_a_stream_within_its_limit() -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(add_length(b"ab", b"c") + add_length(b"abcd"))
    assert await read_body(reader, 3) == b"abc"
    with pytest.raises(FrameTooLargeError):
        await read_body(reader, 3)
