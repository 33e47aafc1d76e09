"""Cursors: what comes back is what went out, and anything else is refused with a reason."""

from __future__ import annotations

import base64
import json

import pytest

from tidemill.core.recorder.cursor import WrongCursorError, decode_cursor, encode_cursor

KINDS = (int, str, str)
KEY = (-1_800_000_000_000_000, "orders.host-1", "a/b+ü\x00")


def test_a_key_comes_back():
    assert decode_cursor(encode_cursor("q", KEY), "q", KINDS) == KEY


def test_a_cursor_fits_into_an_address():
    assert encode_cursor("q", KEY).replace("-", "").replace("_", "").isalnum()


def test_a_cursor_of_another_query_is_refused():
    with pytest.raises(WrongCursorError, match="another query"):
        decode_cursor(encode_cursor("q", KEY), "other", KINDS)


@pytest.mark.parametrize(
    "cursor",
    [
        "",
        "x",
        "%%%",
        "ü",
        "A" * 5_000,
        *(base64.b64encode(data).decode() for data in (b"[]", b"{}", b"[1]", b"\xff\xff", b"[" * 3_000)),
    ],
)
def test_what_is_not_a_cursor_is_refused(cursor: str):
    with pytest.raises(WrongCursorError, match="damaged"):
        decode_cursor(cursor, "q", KINDS)


@pytest.mark.parametrize(
    "key",
    [(1, "a"), (1, "a", "b", "c"), ("1", "a", "b"), (True, "a", "b"), (2**63, "a", "b"), (-(2**63) - 1, "a", "b")],
)
def test_a_key_of_other_types_is_refused(key: tuple[int | str, ...]):
    with pytest.raises(WrongCursorError, match="damaged"):
        decode_cursor(encode_cursor("q", key), "q", KINDS)


def test_the_digest_is_that_of_the_query():
    text = encode_cursor("q", (1,))
    assert json.loads(base64.urlsafe_b64decode(text + "=" * (-len(text) % 4)))[1:] == [1]
