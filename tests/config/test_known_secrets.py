"""Secrets that are known by their value are masked, and never cut."""

from __future__ import annotations

import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.config.known_secrets import MAX_FORMS, KnownSecrets

AWKWARD = 'p@ss/w"örd\\'


@pytest.mark.parametrize(
    "shown", [AWKWARD, json.dumps(AWKWARD)[1:-1], quote(AWKWARD), quote(AWKWARD, safe=""), repr(AWKWARD)[1:-1]]
)
def test_a_secret_is_masked_in_each_form_in_which_programs_repeat_it(shown: str) -> None:
    assert KnownSecrets([AWKWARD]).mask(f"login with {shown} failed") == "login with *** failed"


def test_a_secret_that_is_part_of_another_one_does_not_show_the_rest_of_it() -> None:
    assert KnownSecrets(["hunter", "hunter-two"]).mask("it is hunter-two") == "it is ***"
    assert KnownSecrets(["hunter"]).find_open("it is hunter") == len("it is hunter")
    assert KnownSecrets(["hunter", "hunter-two"]).find_open("it is hunter") == len("it is ")


def test_a_secret_that_overlaps_the_beginning_of_another_one_is_held_back_whole() -> None:
    assert KnownSecrets(["xxab", "abcd"]).find_open("1 xxab") == 2


def test_each_long_line_of_a_secret_of_several_lines_is_one() -> None:
    key = "-----BEGIN CERTIFICATE-----\nMIIEvQIBADAN\nshort\n  hkiG9w0BAQEF\n-----END CERTIFICATE-----\n"
    secrets = KnownSecrets([key])
    assert secrets.mask(f"all: {key.strip()}.") == "all: ***."
    assert secrets.mask("one MIIEvQIBADAN and hkiG9w0BAQEF") == "one *** and ***"
    public = "short -----BEGIN CERTIFICATE-----"
    assert secrets.mask(public) == public


def test_what_is_too_short_to_be_told_from_other_text_is_shown() -> None:
    secrets = KnownSecrets(["abc", "", "***", "*****"])
    assert secrets.mask("abc *****") == "abc *****"
    assert secrets.max_chars == 0


def test_how_many_are_kept_is_bounded_and_the_last_ones_stay() -> None:
    secrets = KnownSecrets()
    for number in range(2 * MAX_FORMS // 100):
        secrets.add(f"secret-{number}-{each}" for each in range(100))
    last = 2 * MAX_FORMS // 100 - 1
    assert secrets.mask(f"secret-0-0 secret-{last}-99") == "secret-0-0 ***"


@given(
    st.lists(st.text("ab1", min_size=4, max_size=7), min_size=1, max_size=3),
    st.text("ab1 ", max_size=40),
    st.lists(st.integers(0, 40), max_size=6),
)
def test_text_in_pieces_shows_no_secret_however_it_is_cut(values: list[str], text: str, cuts: list[int]) -> None:
    secrets = KnownSecrets(values)
    shown, held, begin = [], "", 0
    for cut in [*sorted(cuts), len(text)]:
        held += text[begin:cut]
        begin = max(begin, cut)
        end = secrets.find_open(held)
        shown.append(secrets.mask_known(held[:end]))
        held = held[end:]
    shown.append(secrets.mask_known(held))
    # What is left of overlapping secrets depends on which of them is masked first, as in the whole text.
    assert not any(value in piece for value in values for piece in shown)
    for value in values:
        at = text.find(value)
        if at >= 0 and not any(other != value and other in text for other in values):
            assert value not in "".join(shown)


@given(st.text("ab", min_size=4, max_size=7), st.text("ab ", max_size=30), st.integers(0, 30))
def test_the_second_half_of_a_secret_is_found_behind_a_cut(value: str, text: str, at: int) -> None:
    at = min(at, len(text))
    end = KnownSecrets([value]).find_end(text, at)
    assert at <= end
    assert not any(text.startswith(value, begin) for begin in range(max(0, end - len(value) + 1), end) if begin < end)
