"""URLs, headers and forms of requests: a path never leads elsewhere, and a header never becomes two."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.delivery.http_request import (
    MAX_HEADER_CHARACTERS,
    MAX_TARGET_CHARACTERS,
    build_headers,
    build_url,
    encode_form,
)

BASES = ["https://h/v1", "https://app:pw@h:8080/v1/?key=k&x=", "http://h", "http://h/?key=k"]
#: Text in which steps up, other hosts and encoded forms are likely.
TRICKY = st.text() | st.lists(
    st.sampled_from(
        [
            *("..", ".", "/", "//", "\\", "%2e", "%2F", "%", "2e", ";", " ", "\t", "?", "#", "@", ":", "http:", "a"),
            *("\uff0e", "\uff0f", "\u2025", "\u2024", "\ud800", "\0", "\r\n", "\u00e9"),
        ]
    ),
    max_size=8,
).map("".join)
VALUES = st.text() | st.integers() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False)


def folders(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


@given(st.sampled_from(BASES), TRICKY)
def test_a_path_leads_below_the_configured_url_as_the_client_sends_it_or_is_refused(base: str, path: str) -> None:
    try:
        made = build_url(base, path)
    except ValueError:
        return
    sent, root = httpx.URL(made), httpx.URL(base)
    assert (sent.scheme, sent.host, sent.port, sent.userinfo) == (root.scheme, root.host, root.port, root.userinfo)
    assert sent.query == root.query
    raw = sent.raw_path.partition(b"?")[0].decode()
    parts, under = folders(raw), folders(urlsplit(base).path)
    assert parts[: len(under)] == under
    added = parts[len(under) :]
    assert [unquote(part) for part in added] == folders(path), "what is asked for is what is sent, one part for one"
    while any(unquote(part) != part for part in added):
        added = [unquote(part) for part in added]
        assert not any(part in (".", "..") or "/" in part or "\\" in part for part in added)


@pytest.mark.parametrize(
    "path",
    [
        "..", ".", "../x", "a/../../x", "a/..", "./a", "/a", "//evil.example/a", "a//b", "http://evil.example/", "/",
        " ", "a/ /b", "%2e%2e/x", "%2E./x", "a/%2f..", "a%5c..%5cb", "%252e%252e/x", "a%0d%0ab", "a\\..\\b", "..;/x",
        "..;a=b/x", ".;/x", "a/;x/b", " .. /x", "\uff0e\uff0e/x", "\u2025/x", "a\uff0fb", "a\uff3cb",
        "\uff05\uff12e\uff05\uff12e", "a\r\nHost: evil", "a\0b", "a\tb", "a\x7fb", "a\ud800b",
        "x" * (MAX_TARGET_CHARACTERS + 1), "\u00e9" * 2_000,
    ],
)  # fmt: skip
def test_a_path_that_could_lead_elsewhere_is_refused(path: str) -> None:
    with pytest.raises(ValueError, match="path") as caught:
        build_url("https://h/v1", path)
    assert len(str(caught.value)) < 300
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("base", "path", "query", "made"),
    [
        ("https://h/v1", "", None, "https://h/v1"),
        ("https://h/v1/", "orders/7", None, "https://h/v1/orders/7"),
        ("https://h/v1", "orders/", None, "https://h/v1/orders/"),
        ("https://h", "a b/\u00e9/50%", None, "https://h/a%20b/%C3%A9/50%25"),
        ("https://h/v1?k=1#part", "items:batch?x=1#y;z", {"q": "a&b"}, "https://h/v1/items:batch%3Fx=1%23y%3Bz?k=1&q=a%26b"),
        ("https://h/", "...", {"n": [1, 2.5, True], "s": "x y"}, "https://h/...?n=1&n=2.5&n=true&s=x%20y"),
        ("https://h/v1", "", [("a", "1"), ["a", 2]], "https://h/v1?a=1&a=2"),
        ("https://h/v1", "", {}, "https://h/v1"),
    ],
)  # fmt: skip
def test_path_and_query_are_added_encoded(base: str, path: str, query: Any, made: str) -> None:
    assert build_url(base, path, query) == made


@given(st.sampled_from(BASES), st.dictionaries(st.text(), VALUES | st.lists(VALUES, max_size=3), max_size=4))
def test_a_query_is_added_to_that_of_the_url_and_parses_as_it_was(base: str, query: dict[str, Any]) -> None:
    own = parse_qsl(urlsplit(base).query, keep_blank_values=True)
    try:
        made = build_url(base, "", query)
    except ValueError:
        assert {name for name, _ in own} & set(query)
        return
    found = parse_qsl(urlsplit(made).query, keep_blank_values=True)
    pairs = [(name, each) for name, value in query.items() for each in (value if isinstance(value, list) else [value])]
    shown = [str(value).lower() if isinstance(value, bool) else str(value) for _, value in pairs]
    assert found == [*own, *zip([name for name, _ in pairs], shown, strict=True)]
    assert parse_qsl(encode_form(query).decode(), keep_blank_values=True) == found[len(own) :]


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("a=1", "query must be a mapping, or pairs of name and value, not str"),
        (5, "query must be a mapping"),
        ({"a": None}, "'a' of query must be str, int, float, bool or a list of those, not NoneType"),
        ({"a": [b"x"]}, "not bytes"),
        ({"a": [[1]]}, "not list"),
        ({"a": float("nan")}, "not a finite number"),
        ({"a": float("inf")}, "not a finite number"),
        ({5: "a"}, "a name of type int"),
        (["ab"], "pairs of name and value, not 'ab'"),
        ([("a", 1, 2)], "pairs of name and value"),
        ({"a\ud800": 1}, "lone surrogate"),
        ({"a": "\ud800"}, "lone surrogate"),
        ({"key": "mine"}, "query has 'key', which is already in the sink's url"),
        ({"a": "x" * 10_000_000}, "longer than 8000"),
        ({"a" * 10_000_000: None}, "must be str"),
    ],
)
def test_an_invalid_query_is_refused(query: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem) as caught:
        build_url("https://h/v1?key=k", "", query)
    assert len(str(caught.value)) < 300


def test_a_path_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="path must be str, not bytes"):
        build_url("https://h/", b"x")  # type: ignore[arg-type]


@given(st.dictionaries(st.text(min_size=1, max_size=10), st.text(max_size=20), max_size=3))
def test_headers_are_accepted_by_the_client_unchanged_or_refused(headers: dict[str, str]) -> None:
    try:
        made = build_headers(headers, "Idempotency-Key")
    except ValueError:
        return
    assert {name: made[name.lower()] for name in headers} == headers
    request = httpx.Request("POST", "https://h/", headers=made)
    assert all(request.headers[name] == value for name, value in headers.items())
    raw = [part for pair in request.headers.raw for part in pair]
    assert not any(b"\r" in part or b"\n" in part or b"\0" in part for part in raw)


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ([("a", "b")], "headers must be a mapping, not list"),
        ({"a": 5}, "must map str to str, not str to int"),
        ({5: "a"}, "not int to str"),
        ({"a b": "x"}, "'a b' is not a valid header name"),
        ({"": "x"}, "is not a valid header name"),
        ({"a\r\nb": "x"}, "is not a valid header name"),
        ({"a": "x\r\nHost: evil"}, "contains a character that headers do not allow"),
        ({"a": "x\0"}, "contains a character"),
        ({"a": " x"}, "or starts or ends with whitespace"),
        ({"a": "x\t"}, "or starts or ends with whitespace"),
        ({"a": "\u00e9"}, "contains a character"),
        ({"a": "\ud800"}, "contains a character"),
        ({"Host": "evil"}, "header Host cannot be set here"),
        ({"Transfer-Encoding": "chunked"}, "cannot be set here"),
        ({"idempotency-KEY": "x"}, "cannot be set here"),
        ({"A": "1", "a": "2"}, "header a is given twice"),
        ({"a": "x" * MAX_HEADER_CHARACTERS}, "longer than 8000"),
        ({"x" * 10_000_000: ""}, "longer than 8000"),
    ],
)
def test_invalid_headers_are_refused(headers: Any, problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem) as caught:
        build_headers(headers, "Idempotency-Key")
    assert len(str(caught.value)) < 300
