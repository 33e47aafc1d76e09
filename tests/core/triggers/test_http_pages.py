from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.triggers.http_pages import (
    MAX_URL_CHARACTERS,
    PageRule,
    find_next_link,
    find_next_page,
    find_value,
    has_same_origin,
    hide_secrets,
    restore_secrets,
    set_parameters,
)

URL = "https://api.example:8443/v1/items?size=2"
LINK, BY_URL, BY_CURSOR = PageRule(), PageRule(("paging", "next")), PageRule(cursor_path=("after",), cursor_param="c")


@pytest.mark.parametrize(
    ("rule", "body", "link", "expected"),
    [
        (LINK, None, "/v1/items?page=2", "https://api.example:8443/v1/items?page=2"),
        (LINK, {"paging": {"next": "x"}}, None, None),
        (BY_URL, {"paging": {"next": f"{URL}&skip=2"}}, "/other", f"{URL}&skip=2"),
        (BY_URL, {"paging": {"next": None}}, None, None),
        (BY_URL, {"paging": {"next": ""}}, None, None),
        (BY_URL, {}, "/other", None),
        (BY_URL, "text", None, None),
        (BY_CURSOR, {"after": "a b&c"}, None, f"{URL}&c=a+b%26c"),
        (BY_CURSOR, {"after": 0}, None, f"{URL}&c=0"),
        (BY_CURSOR, {"after": False}, None, None),
        (PageRule(("@odata.nextLink",)), {"@odata.nextLink": "?$skiptoken=x"}, None, "?$skiptoken=x"),
    ],
)
def test_the_next_page_is_where_the_rule_says(rule, body, link, expected):
    if expected is not None and expected.startswith("?"):
        expected = f"https://api.example:8443/v1/items{expected}"
    assert find_next_page(rule, URL, body, link) == expected


def test_a_cursor_takes_the_place_of_the_one_before():
    assert find_next_page(BY_CURSOR, f"{URL}&c=1", {"after": "2"}, None) == f"{URL}&c=2"


@pytest.mark.parametrize(
    "link",
    [
        "http://api.example:8443/x",
        "https://api.example/x",
        "https://evil.example:8443/x",
        "//evil.example/x",
        "file:/x",
    ],
)
def test_a_page_at_another_host_is_refused(link):
    with pytest.raises(ValueError, match="another host"):
        find_next_page(LINK, URL, None, link)


def test_the_default_port_is_the_same_host():
    assert find_next_page(LINK, "https://a/x", None, "https://a:443/y") == "https://a:443/y"


@pytest.mark.parametrize(
    ("rule", "body"), [(BY_URL, {"paging": {"next": 7}}), (BY_CURSOR, {"after": [1]}), (BY_CURSOR, {"after": True})]
)
def test_a_value_of_another_type_is_refused(rule, body):
    with pytest.raises(TypeError, match="of type"):
        find_next_page(rule, URL, body, None)


def test_a_path_leads_through_objects_and_arrays():
    document = {"a": [{"b": 1}, 2]}
    paths = [("a", "0", "b"), ("a", "1"), ("a", "2"), ("a", "x"), ("a", "1", "c"), ("z",)]
    assert [find_value(document, path) for path in paths] == [1, 2, None, None, None, None]


def test_a_rule_without_paths_needs_no_json():
    assert [rule.needs_json for rule in (LINK, BY_URL, BY_CURSOR)] == [False, True, True]


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_cursor_arrives_at_the_server_as_it_was(cursor):
    from urllib.parse import parse_qsl, urlsplit

    url = set_parameters("http://a/b?n=1", {"c": cursor})
    assert parse_qsl(urlsplit(url).query, keep_blank_values=True) == [("n", "1"), ("c", cursor)]


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (None, None),
        ("", None),
        ('<a>; rel="next"', "a"),
        ("<a>;rel=next", "a"),
        ("<a>; REL=Next", "a"),
        ('<a>; rel="last next"; title="x"', "a"),
        ('<x>; rel="prev", <a?b=1,2>; title="a, <b>; rel=\\"c"; rel="next"', "a?b=1,2"),
        ("<x>, <a>; rel=next, <b>; rel=next", "a"),
        (" , ,<a> ; rel = next ,", "a"),
        ('<x>; rel="nextish"', None),
        ('<x>; title="rel=next"', None),
        ("not a link", None),
        ('<x>; rel="prev", garbage', None),
    ],
)
def test_a_link_header_names_the_next_page(header, expected):
    assert find_next_link(header) == expected


@pytest.mark.parametrize(
    "header",
    [
        '<a; rel="next"',
        'a; rel="next"',
        '<a> rel="next"',
        '<a>; rel="next',
        "<>; rel=next",
        '<x>; rel=prev; <a>; rel="next"',
        "<a>;" + " " * 20_000 + '; rel="next"',
    ],
)
def test_a_next_page_in_a_malformed_header_is_an_error(header):
    with pytest.raises(ValueError, match="Link header"):
        find_next_link(header)


@given(st.text(max_size=60), st.sampled_from(["", "<a>; rel=next", "rel=next"]))
def test_any_header_is_read_or_refused(text, end):
    with contextlib.suppress(ValueError):
        assert find_next_link(text + end) != ""


@pytest.mark.parametrize("link", ["http://[::1/x", "https://api.example:99999999/x", "https://api.example:port/x"])
def test_a_malformed_url_is_refused(link):
    with pytest.raises(ValueError, match="malformed"):
        find_next_page(LINK, URL, None, link)


def test_a_url_that_grows_without_end_is_refused():
    long = "x" * MAX_URL_CHARACTERS
    for rule, body, link in [(LINK, None, f"/{long}"), (BY_CURSOR, {"after": long}, None)]:
        with pytest.raises(ValueError, match="characters"):
            find_next_page(rule, URL, body, link)


def test_a_fragment_does_not_make_another_page():
    assert find_next_page(LINK, URL, None, f"{URL}#2") == URL


def test_the_origin_of_a_url_has_its_default_port():
    assert has_same_origin("https://a/x", "https://a:443/y")
    assert not has_same_origin("https://a/x", "http://a/x")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=4, max_size=20), st.sampled_from(["a", "a b", "&="]))
def test_a_stored_url_has_no_secret_and_leads_to_the_same_page(secret, other):
    secrets = {"env:KEY": secret, "short": "a"}
    url = set_parameters("http://host/items", {"key": secret, "page": other})
    hidden = hide_secrets(url, secrets)
    assert "{env:KEY" in hidden
    assert restore_secrets(hidden, secrets) == url


def test_the_longest_secret_is_hidden_first():
    secrets = {"a": "hunter", "b": "hunter2"}
    assert hide_secrets("/x?a=hunter&b=hunter2", secrets) == "/x?a={a}&b={b}"
    assert hide_secrets("/x?c=a+b%2F", {"c": "a b/"}) == "/x?c={c+}"
    assert restore_secrets("/x?a={a}&b={b}", secrets) == "/x?a=hunter&b=hunter2"
