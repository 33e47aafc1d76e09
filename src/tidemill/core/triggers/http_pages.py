"""Finds the next page of an API from a response: by a URL or a cursor in its JSON, or by a URL in its `Link` header.

Invariants: all pages have the scheme, host and port of the first one, because requests carry credentials. A response
that names a next page in a form that cannot be read is an error, never the last page.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, quote, quote_plus, urlencode, urljoin, urlsplit

_PORTS = {"http": 80, "https": 443}
#: Servers reject longer URLs anyway. The limit stops a chain of pages whose URLs grow without end.
MAX_URL_CHARACTERS = 16_384
#: A link of a `Link` header with its parameters (RFC 8288).
_PARAMETER = r"""\s*;\s*[^\s;,="<>]+(?:\s*=\s*(?:"(?:[^"\\]|\\.)*"|[^\s;,"]*))?"""
_LINK = re.compile(rf"\s*<(?P<url>[^<>]*)>(?P<parameters>(?:{_PARAMETER})*)\s*(?:,|$)")
_NAMED = re.compile(
    r"""\s*;\s*(?P<name>[^\s;,="<>]+)(?:\s*=\s*(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s;,"]*)))?"""
)
_NAMES_NEXT = re.compile(r"""\brel\s*=\s*["']?[^"',;]*\bnext\b""", re.IGNORECASE)
#: Shorter values are too frequent in URLs to be secrets.
_MIN_SECRET = 4


@dataclass(frozen=True, slots=True)
class PageRule:
    """Where a response names the next page.

    Attributes:
        url_path: The path of its URL in the JSON of the response: names and array indexes; None: see the others.
        cursor_path: The path of its cursor in the JSON; None: see the others. With neither of them, the URL is in the
            `Link` header.
        cursor_param: The query parameter that gets the cursor.
    """

    url_path: tuple[str, ...] | None = None
    cursor_path: tuple[str, ...] | None = None
    cursor_param: str = "cursor"

    @property
    def needs_json(self) -> bool:
        return self.url_path is not None or self.cursor_path is not None


def find_next_page(rule: PageRule, url: str, body: object, link: str | None) -> str | None:
    """Return the URL of the page that follows a page; None: it is the last one.

    Args:
        rule: Where the response names it.
        url: The URL of the page.
        body: The decoded JSON of the response.
        link: The result of `find_next_link`.

    Raises:
        TypeError: The value has the wrong type.
        ValueError: The next page is at another host, or its URL is malformed or too long.

    Example:
        >>> find_next_page(PageRule(("paging", "next")), "http://a/items", {"paging": {"next": "?page=2"}}, None)
        'http://a/items?page=2'
        >>> find_next_page(PageRule(cursor_path=("after",)), "http://a/items?n=9", {"after": "x y"}, None)
        'http://a/items?n=9&cursor=x+y'
    """
    path = rule.url_path if rule.url_path is not None else rule.cursor_path
    found = link if path is None else find_value(body, path)
    if found is None or found == "" or found is False:
        return None
    if rule.url_path is None and rule.cursor_path is not None:
        if isinstance(found, bool) or not isinstance(found, str | int):
            raise TypeError(f"the cursor of the next page is of type {type(found).__name__}, not a string or a number")
        return _check_length(set_parameters(url, {rule.cursor_param: str(found)}))
    if not isinstance(found, str):
        raise TypeError(f"the URL of the next page is of type {type(found).__name__}, not a string")
    try:
        # A fragment is not sent, so pages that differ only by it are the same.
        following = urljoin(url, _check_length(found)).partition("#")[0]
        same_host = has_same_origin(following, url)
    except ValueError as error:
        raise ValueError(f"the URL of the next page is malformed: {error}") from None
    if not same_host:
        raise ValueError("the next page is at another host; its credentials may not be sent there")
    return following


def find_next_link(header: str | None) -> str | None:
    """Return the URL with the relation `next` in a `Link` header; None: there is none.

    Raises:
        ValueError: The header names a next page, but is malformed.

    Example:
        >>> find_next_link('</items?page=1>; rel="prev", </items?page=3>; title="a, b"; rel="next last"')
        '/items?page=3'
    """
    text, position = (header or "").strip(), 0
    while position < len(text):
        if text[position] in ", ":
            position += 1
            continue
        link = _LINK.match(text, position)
        if link is None:
            break
        if "next" in _find_relations(link["parameters"]):
            if not link["url"].strip():
                raise ValueError("its Link header names a next page without a URL")
            return link["url"].strip()
        position = link.end()
    if _NAMES_NEXT.search(text, position):
        raise ValueError("its Link header names a next page, but is malformed")
    return None


def _find_relations(parameters: str) -> list[str]:
    """Return the relations of a link; only its first parameter `rel` counts."""
    for parameter in _NAMED.finditer(parameters):
        if parameter["name"].lower() == "rel":
            return (parameter["quoted"] or parameter["bare"] or "").lower().split()
    return []


def hide_secrets(url: str, secrets: Mapping[str, str]) -> str:
    """Return a URL with secrets replaced by their names in braces, so that it can be stored; see `restore_secrets`.

    Example:
        >>> hide_secrets("http://a/items?key=hunter2&page=3", {"env:KEY": "hunter2"})
        'http://a/items?key={env:KEY}&page=3'
    """
    for form, mark in _list_forms(secrets):
        url = url.replace(form, mark)
    return url


def restore_secrets(url: str, secrets: Mapping[str, str]) -> str:
    """Return the URL that `hide_secrets` has changed as it was.

    Example:
        >>> restore_secrets("http://a/items?key={env:KEY}", {"env:KEY": "hunter2"})
        'http://a/items?key=hunter2'
    """
    for form, mark in reversed(_list_forms(secrets)):
        url = url.replace(mark, form)
    return url


def _list_forms(secrets: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the forms that secrets have in URLs, longest first because one may contain another, with their marks."""
    forms: dict[str, str] = {}
    for name, secret in secrets.items():
        if len(secret) >= _MIN_SECRET:
            forms.setdefault(quote(secret, safe=""), f"{{{name}}}")
            forms.setdefault(quote_plus(secret), f"{{{name}+}}")
            forms.setdefault(secret, f"{{{name}!}}")
    return sorted(forms.items(), key=lambda one: (-len(one[0]), one[1]))


def _check_length(url: str) -> str:
    if len(url) > MAX_URL_CHARACTERS:
        raise ValueError(f"it has {len(url):,} characters; at most {MAX_URL_CHARACTERS:,} are sent")
    return url


def find_value(document: object, path: tuple[str, ...]) -> object:
    """Return a value in a JSON document; None: it is missing.

    Example:
        >>> find_value({"a": [{"b": 7}]}, ("a", "0", "b"))
        7
    """
    found = document
    for step in path:
        if isinstance(found, Mapping):
            found = found.get(step)
        elif isinstance(found, list) and step.isascii() and step.isdigit() and int(step) < len(found):
            found = found[int(step)]
        else:
            return None
    return found


def set_parameters(url: str, parameters: Mapping[str, str]) -> str:
    """Return a URL with query parameters, in place of those of the same names."""
    parts = urlsplit(url)
    kept = [(name, value) for name, value in parse_qsl(parts.query, keep_blank_values=True) if name not in parameters]
    return parts._replace(query=urlencode([*kept, *parameters.items()])).geturl()


def has_same_origin(url: str, other: str) -> bool:
    """Return whether two URLs have the same scheme, host and port.

    Raises:
        ValueError: The port of one of them is not a number, or out of range.
    """
    return _find_origin(url) == _find_origin(other)


def _find_origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
