"""What an HTTP request is made of, from what a payload gives: its place below a configured address, headers and forms.

Invariants, each a property test:
1. A path that is added leads nowhere but below the address: no part of it is, or becomes by decoding or normalising it
   once more, a step up, an empty part or another host. It is text and is encoded here, so one that is encoded already
   is refused.
2. What the address says in its own query stays as it is, and is said once.
3. No header has a character by which it could become two, nor decides where the request ends.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

#: Servers take targets and headers of about 8 kB; many end the connection over more, as if they were down.
MAX_TARGET_CHARACTERS = 8_000
MAX_HEADER_CHARACTERS = 8_000
#: Of RFC 3986's characters of a path those that nothing takes apart; some servers cut parts at a semicolon.
_PATH_SAFE = "!$&'()*+,=:@"
_ENCODED = re.compile(r"%[0-9A-Fa-f]{2}")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")
_HEADER_VALUE = re.compile(r"(?:[\x21-\x7e](?:[\t\x20-\x7e]*[\x21-\x7e])?)?")
#: Made by the client from the request itself, or about its connection.
_OWNED_HEADERS = frozenset(
    {
        *("host", "content-length", "transfer-encoding", "connection", "keep-alive", "te", "trailer", "upgrade"),
        *("expect", "proxy-connection", "proxy-authorization"),
    }
)


def address(url: str, path: str = "", query: object = None) -> str:
    """Return an address below another one.

    Args:
        url: An address; its fragment is left out.
        path: Parts with / between them, as text; not encoded, and relative.
        query: A mapping, or pairs, of names to text, numbers, booleans or lists of those; added to the query of `url`.

    Raises:
        TypeError: `path` or `query` has something of the wrong type.
        ValueError: It would lead elsewhere, be too long, or say twice what `url` says.

    Example:
        >>> address("https://h/v1?key=k", "orders/a b", {"dry": True})
        'https://h/v1/orders/a%20b?key=k&dry=true'
    """
    parts = urlsplit(url)
    if not isinstance(path, str):
        raise TypeError(f"path has to be str, not {type(path).__name__}")
    added = _encoded_path(path)
    pairs = list(_pairs("query", query)) if query is not None else []
    if said := {name for name, _ in parse_qsl(parts.query, keep_blank_values=True)} & {name for name, _ in pairs}:
        raise ValueError(f"query has {_shown(min(said))}, which is already in the sink's url; leave it out")
    more = _encoded("query", pairs, form=False)
    if len(added) + len(more) > MAX_TARGET_CHARACTERS:
        raise ValueError(f"path and query together are longer than {MAX_TARGET_CHARACTERS} characters when encoded")
    whole = f"{parts.path.rstrip('/')}/{added}" if added else parts.path
    return urlunsplit((parts.scheme, parts.netloc, whole, "&".join(filter(None, (parts.query, more))), ""))


def _encoded_path(path: str) -> str:
    if not path:
        return ""
    if len(path) > MAX_TARGET_CHARACTERS:
        raise ValueError(f"path is longer than {MAX_TARGET_CHARACTERS} characters")
    if problem := _problem(path):
        raise ValueError(f"path {_shown(path)} {problem}")
    try:
        return "/".join(quote(part, safe=_PATH_SAFE) for part in path.split("/"))
    except UnicodeEncodeError:
        raise ValueError(f"path {_shown(path)} has a lone surrogate, which UTF-8 has no form for") from None


def _problem(path: str) -> str | None:
    """Return why a path cannot be added."""
    if _CONTROL.search(path):
        return "has a control character"
    if _ENCODED.search(path):
        return "is encoded already; give it as text"
    # What servers may make of it: fullwidth dots and slashes become plain ones.
    folded = unicodedata.normalize("NFKC", path)
    if "\\" in folded or folded.count("/") != path.count("/"):
        return "has a character that servers may take for /"
    if _ENCODED.search(folded):
        return "is encoded already; give it as text"
    parts = folded.split("/")
    # Some servers leave out what follows a semicolon, and blanks.
    bare = [part.partition(";")[0].strip() for part in parts]
    if "" in bare[:-1] or (parts[-1] and not bare[-1]):
        return "begins with / or has an empty part; it is relative to the sink's url"
    if any(part in (".", "..") for part in bare):
        return "leads out of the sink's url, or nowhere"
    return None


def form(data: object) -> bytes:
    """Return a body of the type application/x-www-form-urlencoded.

    Args:
        data: As for the query of `address`.

    Raises:
        TypeError: It has something of the wrong type.
        ValueError: It has something without a form.

    Example:
        >>> form({"a": "x y", "n": [1, 2]})
        b'a=x+y&n=1&n=2'
    """
    return _encoded("data", list(_pairs("data", data)), form=True).encode()


def _encoded(field: str, pairs: Sequence[tuple[str, str]], *, form: bool) -> str:
    try:
        return urlencode(pairs) if form else urlencode(pairs, quote_via=quote, safe="")
    except UnicodeEncodeError:
        raise ValueError(f"{field} has a lone surrogate, which UTF-8 has no form for") from None


def _pairs(field: str, given: object) -> Iterator[tuple[str, str]]:
    items = given.items() if isinstance(given, Mapping) else given
    if not isinstance(given, (Mapping, Sequence)) or isinstance(given, (str, bytes)):
        raise TypeError(f"{field} has to be a mapping, or pairs of name and value, not {type(given).__name__}")
    for pair in items:  # type: ignore[attr-defined]  # one of both
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise TypeError(f"{field} has to be pairs of name and value, not {_shown(pair)}")
        name, value = pair
        if not isinstance(name, str):
            raise TypeError(f"{field} has a name of the type {type(name).__name__}; it has to be str")
        for each in value if isinstance(value, (list, tuple)) else (value,):
            yield name, _text(f"{_shown(name)} of {field}", each)


def _text(place: str, value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{place} is {value}, which is not a finite number")
        return repr(value)
    raise TypeError(f"{place} has to be str, int, float, bool or a list of those, not {type(value).__name__}")


def request_headers(given: object, reserved: str) -> dict[str, str]:
    """Return headers by their names in lower case.

    Args:
        given: A mapping of names to values.
        reserved: One more name that is not allowed.

    Raises:
        TypeError: It is not a mapping of text to text.
        ValueError: A name or value is not allowed in a header, or the headers are too long.

    Example:
        >>> request_headers({"X-Trace": "4bf9"}, "Idempotency-Key")
        {'x-trace': '4bf9'}
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"headers have to be a mapping, not {type(given).__name__}")
    headers: dict[str, str] = {}
    size = 0
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(f"headers have to be str, not {type(name).__name__} with {type(value).__name__}")
        size += len(name) + len(value)
        if size > MAX_HEADER_CHARACTERS:
            raise ValueError(f"headers are longer than {MAX_HEADER_CHARACTERS} characters together")
        lower = name.lower()
        if not _HEADER_NAME.fullmatch(name):
            raise ValueError(f"{_shown(name)} is not a valid header name")
        if lower in _OWNED_HEADERS or lower == reserved.lower():
            raise ValueError(f"header {name} may not be set here: the client sets it")
        if lower in headers:
            raise ValueError(f"header {name} is given twice")
        if not _HEADER_VALUE.fullmatch(value):
            raise ValueError(f"header {name} has a character that a header cannot have, or a space at either end")
        headers[lower] = value
    return headers


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
