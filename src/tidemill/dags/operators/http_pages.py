"""A trigger that reads an API page by page, and fires an event for each page.

Invariants: a failing page is retried with backoff, up to a limit in a row; pages are requested one after the other, the
next one only when the event before it was taken; credentials go to the host of the first page only, and redirects are
not followed; URLs are shown without user and query, which may contain secrets, and those in payloads have no secret
that the trigger was given; a page that cannot be read is an error, never the last page; no response needs more memory
than `max_body_bytes`, whatever it decompresses to.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidemill.config.redaction import find_url_secrets, is_secret, redact_text
from tidemill.core.delivery.http_delivery import parse_retry_after
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.triggers.http_pages import (
    PageRule,
    find_next_link,
    find_next_page,
    has_same_origin,
    hide_secrets,
    restore_secrets,
    set_parameters,
)
from tidemill.core.triggers.http_poll import PollAnswer, judge_answer
from tidemill.core.wording import shorten
from tidemill.dags.context.connection import Connection
from tidemill.runtime.json.codec import EncodingError, encode
from tidemill.triggers.base import BaseTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import resolve_environment
from tidemill.triggers.builtin.http_client import (
    MAX_RETRY_AFTER_SECONDS,
    build_client,
    check_url,
    find_delay,
    load_client,
    mask_url,
)
from tidemill.triggers.builtin.identities import compute_digest
from tidemill.triggers.builtin.selection import encode_bytes

if TYPE_CHECKING:
    import httpx

_GOOD: Final = range(200, 300)
#: The only compression that is asked for: its output can be bounded.
_PACKED: Final = ("gzip", "x-gzip")
#: Makes zlib read the header of gzip.
_GZIP: Final = 31
_SHOWN_CHARACTERS: Final = 60
#: The limit of the store for the payload of an event.
_MAX_PAYLOAD_BYTES: Final = 1 << 20

JsonPath = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class _Page:
    body: Any
    link: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    pause_seconds: float = 0.0


class HttpPagesTrigger(BaseTrigger):
    """Fires an event for each page of an API.

    The payload has `number` (from 0), `url` (without user and query), `body`, which is decoded if it is JSON and text
    otherwise, and `next`: the URL of the next page, with secrets replaced by their names, or None after the last page.
    The identity is the number with a digest of the page's URL: a triggerer that takes the trigger over stores each page
    once.

    Args:
        url: The URL of the first page; with a connection, it may be a path.
        params: The query parameters of the first page; write secrets as `{"env": NAME}`.
        headers: The headers of all requests; write secrets as `{"env": NAME}`.
        conn_id: A connection: its `host`, `port` and `schema` (http or https) complete a path; `login` and `password`
            authenticate with HTTP Basic, a `password` alone as a bearer token; `headers` in `extra` are sent, too.
        next_url: The path of the next page's URL in the JSON of a page: names and array indexes, as a list or separated
            by dots.
        next_cursor: The path of the next page's cursor, instead; with neither of them, the `Link` header is followed.
        cursor_param: The query parameter that gets the cursor.
        timeout_seconds: The timeout for a whole request and its response.
        max_retries: How many requests for a page may fail in a row after the first one (no connection, no response in
            time, 408, 429, 5xx), with a growing delay, or the server's `Retry-After`, before each.
        max_pages: The number of pages after which it ends; None: no limit.
        max_body_bytes: The limit for a page, decompressed; a larger one is an error.
        start: The page to begin with instead: its `number`, and its URL as `next`, both from the payload of the page
            before it. If `next` is None, no page is left.

    Raises:
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        url: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        conn_id: str | None = None,
        next_url: JsonPath | None = None,
        next_cursor: JsonPath | None = None,
        cursor_param: str = "cursor",
        timeout_seconds: float = 60.0,
        max_retries: int = 8,
        max_pages: int | None = None,
        max_body_bytes: int = 1 << 20,
        start: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the arguments; do not connect yet."""
        super().__init__()
        if conn_id is None:
            check_url(url)
        if next_url is not None and next_cursor is not None:
            raise ValueError("next_url and next_cursor are both set; leave one of them out")
        for name, value in {"timeout_seconds": timeout_seconds, "max_body_bytes": max_body_bytes}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if max_pages is not None and max_pages <= 0:
            raise ValueError(f"max_pages must be positive, got {max_pages}")
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries}")
        if start is not None and not is_start(start):
            raise ValueError("start must have a number and the URL of the next page: pass the checkpoint of the stream")
        self._rule = PageRule(_split(next_url), _split(next_cursor), cursor_param)
        self._kwargs: dict[str, Any] = {
            "url": url,
            "params": None if params is None else dict(params),
            "headers": dict(headers or {}),
            "conn_id": conn_id,
            "next_url": next_url if next_url is None or isinstance(next_url, str) else list(next_url),
            "next_cursor": next_cursor if next_cursor is None or isinstance(next_cursor, str) else list(next_cursor),
            "cursor_param": cursor_param,
            "timeout_seconds": timeout_seconds,
            "max_retries": max_retries,
            "max_pages": max_pages,
            "max_body_bytes": max_body_bytes,
            "start": None if start is None else dict(start),
        }

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        return "tidemill.dags.operators.http_pages.HttpPagesTrigger", dict(self._kwargs)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Fire the pages.

        Raises:
            ConfigError: httpx is not installed, or a secret is not in the environment.
            RemoteError: The server refused a page, failed too often, or names a next page that cannot be followed.
        """
        url, headers, secrets = await self._prepare()
        following, number = self._find_start(url, secrets)
        if following is None:
            return
        httpx, verify = await asyncio.to_thread(load_client)
        seen: set[str] = set()
        most = self._kwargs["max_pages"]
        async with _open_client(httpx, verify, url, headers) as client:
            while following is not None and (most is None or number < most):
                url = following
                page = await self._read_page(httpx, client, url)
                digest = compute_digest(url)
                seen.add(digest)
                try:
                    following = find_next_page(self._rule, url, page.body, page.link)
                except (TypeError, ValueError) as error:
                    raise RemoteError(f"{mask_url(url)}: {error}", retryable=False) from None
                if following is not None and compute_digest(following) in seen:
                    raise RemoteError(
                        f"{mask_url(url)}: the next page is one that was read before; correct the path of the next "
                        "page",
                        retryable=False,
                    )
                hidden = None if following is None else hide_secrets(following, secrets)
                payload = {"number": number, "url": mask_url(url), "body": page.body, "next": hidden}
                _check_payload(url, payload)
                yield TriggerEvent(payload, identity=f"{number}#{digest}")
                number += 1

    def _find_start(self, url: str, secrets: Mapping[str, str]) -> tuple[str | None, int]:
        """Return the URL and the number of the page to begin with."""
        start = self._kwargs["start"]
        if start is None:
            return url, 0
        if start["next"] is None:
            return None, start["number"]
        following = restore_secrets(start["next"], secrets)
        try:
            same_host = has_same_origin(following, url)
        except ValueError:
            same_host = False
        if not same_host:
            raise RemoteError(
                f"the page to continue with is not at {mask_url(url)}; clear the task to begin from the first page",
                retryable=False,
            )
        return following, start["number"]

    async def _prepare(self) -> tuple[str, dict[str, str], dict[str, str]]:
        """Return the URL of the first page, the headers of all requests, and the secrets in them by name."""
        given = self._kwargs
        url, headers, secrets = given["url"], {}, {}
        if given["conn_id"] is not None:
            connection = await asyncio.to_thread(Connection.get, given["conn_id"])
            url, headers = _complete_url(url, connection), _build_headers(connection)
            secrets = {name: str(value) for name in ("login", "password") if (value := getattr(connection, name))}
            check_url(url)
        headers |= resolve_environment(given["headers"])
        params = resolve_environment(given["params"] or {})
        for values, resolved in ((given["headers"], headers), (given["params"] or {}, params)):
            for name, value in values.items():
                if isinstance(value, Mapping) and list(value) == ["env"]:
                    secrets[f"env:{value['env']}"] = str(resolved[name])
                elif is_secret(name):
                    secrets[f"given:{name}"] = str(value)
        secrets |= {f"url:{number}": value for number, value in enumerate(sorted(find_url_secrets(url)))}
        if params:
            url = set_parameters(url, {name: str(value) for name, value in params.items()})
        return url, headers, secrets

    async def _read_page(self, httpx: Any, client: httpx.AsyncClient, url: str) -> _Page:
        failures = 0
        while True:
            answered = await self._ask(httpx, client, url)
            if isinstance(answered, _Page):
                return answered
            failures += 1
            await self._back_off(url, failures, answered)

    async def _ask(self, httpx: Any, client: httpx.AsyncClient, url: str) -> _Page | _Failure:
        """Return the page, or a failure that a retry may change.

        Raises:
            RemoteError: The server refused the request, or the page is too large.
        """
        seconds = self._kwargs["timeout_seconds"]
        try:
            async with asyncio.timeout(seconds), client.stream("GET", url) as answer:
                meaning = judge_answer(answer.status_code, _GOOD)
                if meaning is PollAnswer.FAILED:
                    return _Failure(f"status {answer.status_code}", _find_pause(answer))
                if meaning is not PollAnswer.EXPECTED:
                    raise RemoteError(_describe_refusal(url, answer), retryable=False)
                body = await self._read(url, answer)
                if body is None:
                    return _Failure("the compressed body ended too early")
                return _Page(self._decode(url, body, answer), self._find_link(url, answer))
        except TimeoutError:
            return _Failure(f"no response within {seconds:g} s")
        except httpx.LocalProtocolError:
            # The text of the error may contain the header.
            raise ConfigError(
                f"the request for {mask_url(url)} has a header that HTTP does not allow; correct the headers, and "
                "the login and password of the connection"
            ) from None
        except httpx.TransportError as error:
            # The text of the error may contain the URL.
            return _Failure(type(error).__name__)
        except httpx.InvalidURL as error:
            raise RemoteError(f"{mask_url(url)}: {type(error).__name__}", retryable=False) from None

    def _find_link(self, url: str, answer: httpx.Response) -> str | None:
        if self._rule.needs_json:
            return None
        try:
            return find_next_link(answer.headers.get("link"))
        except ValueError as error:
            raise RemoteError(f"{mask_url(url)}: {error}; correct it on the server", retryable=False) from None

    def _decode(self, url: str, body: bytes, answer: httpx.Response) -> Any:
        try:
            return msgspec.json.decode(body) if body else None
        except (ValueError, RecursionError):
            content_type = answer.headers.get("content-type", "")
            says_json = "json" in content_type.partition(";")[0].lower()
            if not (self._rule.needs_json or says_json):
                return encode_bytes(body)
            said = redact_text(shorten(content_type, _SHOWN_CHARACTERS)) or "unknown"
            advice = "correct it on the server"
            if not says_json:
                advice = "leave out next_url and next_cursor to follow the Link header, or correct the URL"
            raise RemoteError(
                f"{mask_url(url)} responded with a page that is not JSON, or not JSON that can be read (its content "
                f"type is {said!r}); {advice}",
                retryable=False,
            ) from None

    async def _read(self, url: str, answer: httpx.Response) -> bytes | None:
        """Return the body, decompressed; None: it is not complete."""
        packed = answer.headers.get("content-encoding", "").strip().lower()
        if packed not in ("", "identity", *_PACKED):
            raise RemoteError(
                f"{mask_url(url)} responded with the content encoding {shorten(packed, _SHOWN_CHARACTERS)!r}, "
                "although only gzip was asked for; correct it on the server",
                retryable=False,
            )
        unpacker = _Unpacker() if packed in _PACKED else None
        body, most = bytearray(), self._kwargs["max_body_bytes"]
        async for chunk in answer.aiter_raw():
            try:
                body += chunk if unpacker is None else unpacker.unpack(chunk, most + 1 - len(body))
            except zlib.error:
                raise RemoteError(
                    f"{mask_url(url)} responded with a body that is not gzip, although it says so; correct it on the "
                    "server",
                    retryable=False,
                ) from None
            if len(body) > most:
                raise RemoteError(
                    f"{mask_url(url)} responded with more than {most:,} bytes; request smaller pages",
                    retryable=False,
                )
        return None if unpacker is not None and not unpacker.is_complete else bytes(body)

    async def _back_off(self, url: str, failures: int, failure: _Failure) -> None:
        delay = find_delay(url, failures, self._kwargs["max_retries"], failure.text)
        self.log.info("a page failed; retrying", url=mask_url(url), error=failure.text)
        await asyncio.sleep(max(delay, failure.pause_seconds))


class _Unpacker:
    """Decompresses gzip, in steps with a bounded result."""

    def __init__(self) -> None:
        self._member = zlib.decompressobj(wbits=_GZIP)
        self._began = False

    def unpack(self, data: bytes, most: int) -> bytes:
        """Return at most `most` bytes of what the data contains; the rest is dropped.

        Raises:
            zlib.error: It is not gzip.
        """
        found = b""
        while data and len(found) < most:
            if self._member.eof:  # a body may have several parts
                self._member = zlib.decompressobj(wbits=_GZIP)
            self._began = True
            found += self._member.decompress(data, most - len(found))
            data = self._member.unused_data
        return found

    @property
    def is_complete(self) -> bool:
        return self._member.eof or not self._began


def _check_payload(url: str, payload: Mapping[str, Any]) -> None:
    """Refuse a page that cannot be stored, with its address."""
    try:
        size = len(encode(payload, "the page").encode("utf-8", "replace"))
    except EncodingError as error:
        raise RemoteError(
            f"{mask_url(url)} responded with a page that cannot be stored: {error}", retryable=False
        ) from None
    if size > _MAX_PAYLOAD_BYTES:
        raise RemoteError(
            f"{mask_url(url)} responded with a page of {size:,} bytes as JSON; at most {_MAX_PAYLOAD_BYTES:,} are "
            "stored; request smaller pages",
            retryable=False,
        )


def is_start(value: object) -> bool:
    """Return whether a value may be the `start` of the trigger."""
    if not isinstance(value, Mapping) or not {"number", "next"} <= value.keys():
        return False
    number, following = value["number"], value["next"]
    return type(number) is int and number >= 0 and (following is None or isinstance(following, str))


def _find_pause(answer: httpx.Response) -> float:
    """Return the seconds that the server asks to wait."""
    headers = answer.headers
    return parse_retry_after(headers.get("retry-after"), headers.get("date"), time.time(), MAX_RETRY_AFTER_SECONDS)


def _describe_refusal(url: str, answer: httpx.Response) -> str:
    said = f"{mask_url(url)} responded with status {answer.status_code}, which a retry will not change; "
    if not answer.has_redirect_location:
        return f"{said}correct the URL or the credentials"
    to = shorten(mask_url(answer.headers["location"]), 4 * _SHOWN_CHARACTERS)
    return f"{said}it redirects to {to}, which is not followed; correct the URL"


def _open_client(library: Any, verify: ssl.SSLContext, url: str, headers: Mapping[str, Any]) -> httpx.AsyncClient:
    sent = {"accept-encoding": "gzip", **{name.lower(): value for name, value in headers.items()}}
    try:
        return build_client(library, verify, url, sent)
    except (TypeError, UnicodeError, AttributeError):
        # The text of the error may contain the header.
        raise ConfigError(
            f"the headers for {mask_url(url)} have a value that is not ASCII text; correct the headers of the task "
            "and of the connection"
        ) from None


def _split(path: JsonPath | None) -> tuple[str, ...] | None:
    if path is None:
        return None
    return tuple(path.split(".")) if isinstance(path, str) else tuple(path)


def _complete_url(url: str, connection: Connection) -> str:
    """Return the URL of a path at the host of a connection; a whole URL stays."""
    if "://" in url or not connection.host:
        return url
    scheme = connection.schema or ("http" if connection.conn_type == "http" else "https")
    base = connection.host if "://" in connection.host else f"{scheme}://{connection.host}"
    if connection.port is not None:
        base = f"{base.rstrip('/')}:{connection.port}"
    return f"{base.rstrip('/')}/{url.lstrip('/')}"


def _build_headers(connection: Connection) -> dict[str, str]:
    """Return the headers that a connection asks for."""
    extra = connection.extra_dejson.get("headers")
    headers = {str(name): str(value) for name, value in extra.items()} if isinstance(extra, Mapping) else {}
    if connection.login:
        credentials = f"{connection.login}:{connection.password or ''}".encode()
        headers["authorization"] = f"Basic {base64.b64encode(credentials).decode()}"
    elif connection.password:
        headers["authorization"] = f"Bearer {connection.password}"
    return headers
