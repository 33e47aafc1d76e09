from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidemill.core.recorder.key_text import read_key, write_key


@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "replace")))
@example("\u202eevil\u2066\x1b[31mred".encode())
@example(b"\\x41")
@example(b"\xed\xa0\x80")
def test_the_text_of_a_key_stands_for_that_key_and_can_be_shown_anywhere(key):
    text = write_key(key)
    assert read_key(text) == key
    assert text.isprintable()


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("order-7", b"order-7"),
        ("café", "café".encode()),
        (r"C:\dir\new", b"C:\\dir\\new"),
        (r"\xFF\x0", b"\xff\\x0"),
        ("caf\udce9", b"caf\xe9"),
        ("", b""),
    ],
)
def test_what_people_type_is_taken_as_it_is_unless_it_is_an_escape(text, key):
    assert read_key(text) == key
