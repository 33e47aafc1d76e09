"""Builds HTTP requests from payloads: URLs below the configured one, headers and forms.

Invariants, each a property test:
1. A path leads nowhere but below the configured URL: none of its segments is, or becomes when decoded or normalised
   once more, a step up, an empty segment or another host. Paths are given as text and encoded here; a path that is
   already percent-encoded is refused.
2. The query of the configured URL is preserved, and none of its names is repeated.
3. No header contains a character that could split it in two, and no header decides where the request ends.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

#: Servers accept request targets and headers of about 8 kB. For longer ones many close the connection, which looks like
#: an outage.
MAX_TARGET_CHARACTERS = 8_000
MAX_HEADER_CHARACTERS = 8_000
#: The characters that RFC 3986 allows in a path segment, except the semicolon: some servers cut segments there.
_PATH_SAFE = "!$&'()*+,=:@"
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
#: The client sets these: they follow from the request itself or belong to its connection.
_OWNED_HEADERS = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade"),
        *("expect", "proxy-connection", "proxy-authorization"),
    }
)


def build_url(url: str, path: str = "", query: object = None) -> str:
    """Return a URL below another one.

    Args:
        url: The configured URL; its fragment is dropped.
        path: A relative path as plain text, not percent-encoded, with / between segments.
        query: A mapping or pairs of names and text, numbers, booleans, or lists of those; added to the query of `url`.

    Raises:
        TypeError: `path`, `query` or a value in them has the wrong type.
        ValueError: The result would lead elsewhere, be too long, or repeat a name in the query of `url`.

    Example:
        >>> build_url("https://h/v1?key=k", "orders/a b", {"dry": True})
        'https://h/v1/orders/a%20b?key=k&dry=true'
    """
    parts = urlsplit(url)
    if not isinstance(path, str):
        raise TypeError(f"path must be str, not {type(path).__name__}")
    added = _encode_path(path)
    pairs = list(_read_pairs("query", query)) if query is not None else []
    if known := {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} & {name for name, _ in pairs}:
        raise ValueError(f"query has {_abbreviate(min(known))}, which is already in the sink's url")
    more = _encode_pairs("query", pairs, form=False)
    if len(added) + len(more) > MAX_TARGET_CHARACTERS:
        raise ValueError(f"path and query are longer than {MAX_TARGET_CHARACTERS} characters when encoded")
    whole = f"{parts.path.rstrip('/')}/{added}" if added else parts.path
    return urlunsplit((parts.scheme, parts.netloc, whole, "&".join(filter(None, (parts.query, more))), ""))


def _encode_path(path: str) -> str:
    if not path:
        return ""
    if len(path) > MAX_TARGET_CHARACTERS:
        raise ValueError(f"path is longer than {MAX_TARGET_CHARACTERS} characters")
    if problem := _find_problem(path):
        raise ValueError(f"path {_abbreviate(path)} {problem}")
    try:
        return "/".join(quote(part, safe=_PATH_SAFE) for part in path.split("/"))
    except UnicodeEncodeError:
        raise ValueError(f"path {_abbreviate(path)} has a lone surrogate, which UTF-8 cannot encode") from None


def _find_problem(path: str) -> str | None:
    """Return why a path is not allowed, or None."""
    if _CONTROL.search(path):
        return "has a control character"
    if _ENCODED.search(path):
        return "is encoded already; give it as text"
    # Some servers normalise paths, which turns fullwidth dots and slashes into plain ones.
    folded = unicodedata.normalize("NFKC", path)
    if "\\" in folded or folded.count("/") != path.count("/"):
        return "has a character that servers may treat as /"
    if _ENCODED.search(folded):
        return "is encoded already; give it as text"
    parts = folded.split("/")
    # Some servers drop everything after a semicolon, and surrounding blanks.
    bare = [part.partition(";")[0].strip() for part in parts]
    if "" in bare[:-1] or (parts[-1] and not bare[-1]):
        return "begins with / or has an empty segment; give it relative to the sink's url"
    if any(part in (".", "..") for part in bare):
        return "has a segment . or .., which could lead out of the sink's url"
    return None


def encode_form(data: object) -> bytes:
    """Return a body of the type application/x-www-form-urlencoded.

    Args:
        data: Names and values, as in the `query` of `build_url`.

    Raises:
        TypeError: `data` or a value in it has the wrong type.
        ValueError: A value cannot be encoded.

    Example:
        >>> encode_form({"a": "x y", "n": [1, 2]})
        b'a=x+y&n=1&n=2'
    """
    return _encode_pairs("data", list(_read_pairs("data", data)), form=True).encode()


def _encode_pairs(field: str, pairs: Sequence[tuple[str, str]], *, form: bool) -> str:
    try:
        return urlencode(pairs) if form else urlencode(pairs, quote_via=quote, safe="")
    except UnicodeEncodeError:
        raise ValueError(f"{field} has a lone surrogate, which UTF-8 cannot encode") from None


def _read_pairs(field: str, given: object) -> Iterator[tuple[str, str]]:
    items = given.items() if isinstance(given, Mapping) else given
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, (str, bytes)):
        raise TypeError(f"{field} must be a mapping, or pairs of name and value, not {type(given).__name__}")
    for pair in items:  # type: ignore[attr-defined]  # a mapping or a sequence, as checked
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{field} must be pairs of name and value, not {_abbreviate(pair)}")
        name, value = pair
        if not isinstance(name, str):
            raise TypeError(f"{field} has a name of type {type(name).__name__}; it must be str")
        for each in value if isinstance(value, (list, tuple)) else (value,):
            yield name, _format_value(f"{_abbreviate(name)} of {field}", each)


def _format_value(field: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{field} is {value}, which is not a finite number")
        return repr(value)
    raise TypeError(f"{field} must be str, int, float, bool or a list of those, not {type(value).__name__}")


def build_headers(given: object, reserved: str) -> dict[str, str]:
    """Return headers with lower-case names.

    Args:
        given: A mapping of names to values.
        reserved: An additional name that is not allowed.

    Raises:
        TypeError: `given` is not a mapping of text to text.
        ValueError: A name or value is not allowed in a header, or the headers are too long.

    Example:
        >>> build_headers({"X-Trace": "4bf9"}, "Idempotency-Key")
        {'x-trace': '4bf9'}
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"headers must be a mapping, not {type(given).__name__}")
    headers: dict[str, str] = {}
    size = 0
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers must map str to str, not {type(name).__name__} to {type(value).__name__}")
        size += len(name) + len(value)
        if size > MAX_HEADER_CHARACTERS:
            raise ValueError(f"headers are longer than {MAX_HEADER_CHARACTERS} characters in total")
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{_abbreviate(name)} is not a valid header name")
        if lower in _OWNED_HEADERS or lower == reserved.lower():
            raise ValueError(f"header {name} cannot be set here: the client sets it")
        if lower in headers:
            raise ValueError(f"header {name} is given twice")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(
                f"header {name} contains a character that headers do not allow, or starts or ends with whitespace"
            )
        headers[lower] = value
    return headers


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
