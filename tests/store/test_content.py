"""Text that a database would refuse is found before an event is handed over."""

from __future__ import annotations

import pytest

from tidemill.store.content import MAX_IDENTITY_BYTES, check_identity, check_payload


@pytest.mark.parametrize(("payload", "expected"), [('"\0"', "NUL"), ('"ü\0"', "NUL"), ('"\ud800"', "Unicode")])
def test_a_payload_that_cannot_be_stored_is_refused(payload: str, expected: str) -> None:
    with pytest.raises(ValueError, match=f"payload.*{expected}"):
        check_payload(payload)


@pytest.mark.parametrize(
    ("identity", "expected"),
    [
        ("a\0b", "NUL"),
        ("\udfff", "Unicode"),
        ("x" * (MAX_IDENTITY_BYTES + 1), "digest"),
        ("ü" * (MAX_IDENTITY_BYTES // 2 + 1), "digest"),
    ],
)
def test_an_identity_that_cannot_be_stored_is_refused(identity: str, expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        check_identity(identity)


@pytest.mark.parametrize("text", ["", "plain", "ü😀", "ü" * (MAX_IDENTITY_BYTES // 2)])
def test_other_text_is_accepted(text: str) -> None:
    check_identity(text)
    check_payload(text)
