"""Finds the next page of an API from a response: by a URL or a cursor in its JSON, or by a URL in its `Link` header.

Invariant: all pages have the scheme, host and port of the first one, because requests carry credentials.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urljoin, urlsplit

_PORTS = {"http": 80, "https": 443}


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
        link: The URL with the relation `next` in its `Link` header; None: there is none.

    Raises:
        TypeError: The value has the wrong type.
        ValueError: The next page is at another host.

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
        return set_parameters(url, {rule.cursor_param: str(found)})
    if not isinstance(found, str):
        raise TypeError(f"the URL of the next page is of type {type(found).__name__}, not a string")
    following = urljoin(url, found)
    if _find_origin(following) != _find_origin(url):
        raise ValueError("the next page is at another host; its credentials may not be sent there")
    return following


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


def _find_origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or _PORTS.get(parts.scheme)
