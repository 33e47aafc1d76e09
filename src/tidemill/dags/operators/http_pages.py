"""A trigger that reads an API page by page, and fires an event for each page.

Invariants: a failing page is retried with backoff, up to a limit in a row; pages are requested one after the other, the
next one only when the event before it was taken; credentials go to the host of the first page only; URLs are shown
without user and query, which may contain secrets.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import random
import ssl
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import msgspec

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff, GiveUp, decide
from tidemill.core.triggers.http_pages import PageRule, find_next_page, set_parameters
from tidemill.core.triggers.http_poll import PollAnswer, judge_answer, parse_retry_after
from tidemill.dags.connection import Connection
from tidemill.runtime.sockets.http_proxy import find_proxy
from tidemill.triggers.base import BaseTrigger, TriggerEvent
from tidemill.triggers.builtin.arguments import resolve_environment
from tidemill.triggers.builtin.identities import compute_digest
from tidemill.triggers.builtin.selection import encode_bytes

if TYPE_CHECKING:
    import httpx

_BACKOFF: Final = Backoff(0.5, 60.0)
#: The longest Retry-After that is obeyed.
_MAX_RETRY_AFTER_SECONDS: Final = 3600.0
_GOOD: Final = range(200, 300)

JsonPath = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class _Page:
    body: Any
    link: str | None


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str
    retry_after: str | None = None


class HttpPagesTrigger(BaseTrigger):
    """Fires an event for each page of an API.

    The payload has `number` (from 0), `url` (without user and query) and `body`, which is decoded if it is JSON and
    text otherwise. The identity is the number with a digest of the page's URL: a triggerer that takes the trigger over
    stores each page once.

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
        max_body_bytes: The limit for a page; a larger one is an error.

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
    ) -> None:
        """Check the arguments; do not connect yet."""
        super().__init__()
        if conn_id is None:
            _check_url(url)
        if next_url is not None and next_cursor is not None:
            raise ValueError("next_url and next_cursor are both set; leave one of them out")
        for name, value in {"timeout_seconds": timeout_seconds, "max_body_bytes": max_body_bytes}.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if max_pages is not None and max_pages <= 0:
            raise ValueError(f"max_pages must be positive, got {max_pages}")
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries}")
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
        url, headers = await self._prepare()
        httpx, verify = await asyncio.to_thread(_load_client)
        seen: set[str] = set()
        number, most = 0, self._kwargs["max_pages"]
        async with httpx.AsyncClient(
            verify=verify, timeout=None, trust_env=False, proxy=find_proxy(url), headers=headers
        ) as client:
            following: str | None = url
            while following is not None and (most is None or number < most):
                url = following
                page = await self._read_page(httpx, client, url)
                seen.add(url)
                try:
                    following = find_next_page(self._rule, url, page.body, page.link)
                except (TypeError, ValueError) as error:
                    raise RemoteError(f"{_mask_url(url)}: {error}", retryable=False) from None
                if following in seen:
                    raise RemoteError(
                        f"{_mask_url(url)}: the next page is one that was read before; correct the path of the next "
                        "page",
                        retryable=False,
                    )
                payload = {"number": number, "url": _mask_url(url), "body": page.body}
                yield TriggerEvent(payload, identity=f"{number}#{compute_digest(url)}")
                number += 1

    async def _prepare(self) -> tuple[str, dict[str, str]]:
        """Return the URL of the first page, and the headers of all requests."""
        given = self._kwargs
        url, headers = given["url"], {}
        if given["conn_id"] is not None:
            connection = await asyncio.to_thread(Connection.get, given["conn_id"])
            url, headers = _complete_url(url, connection), _build_headers(connection)
            _check_url(url)
        headers |= resolve_environment(given["headers"])
        if given["params"]:
            params = resolve_environment(given["params"])
            url = set_parameters(url, {name: str(value) for name, value in params.items()})
        return url, headers

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
                    return _Failure(f"status {answer.status_code}", answer.headers.get("retry-after"))
                if meaning is not PollAnswer.EXPECTED:
                    raise RemoteError(
                        f"{_mask_url(url)} responded with status {answer.status_code}, which a retry will not change; "
                        "correct the URL or the credentials",
                        retryable=False,
                    )
                body = await self._read(url, answer)
                return _Page(self._decode(url, body), answer.links.get("next", {}).get("url"))
        except TimeoutError:
            return _Failure(f"no response within {seconds:g} s")
        except httpx.TransportError as error:
            # The text of the error may contain the URL.
            return _Failure(type(error).__name__)
        except (httpx.InvalidURL, httpx.DecodingError) as error:
            raise RemoteError(f"{_mask_url(url)}: {type(error).__name__}", retryable=False) from None

    def _decode(self, url: str, body: bytes) -> Any:
        try:
            return msgspec.json.decode(body) if body else None
        except (ValueError, RecursionError):
            if self._rule.needs_json:
                raise RemoteError(
                    f"{_mask_url(url)} responded with a page that is not JSON, so it names no next page; leave out "
                    "next_url and next_cursor to follow the Link header",
                    retryable=False,
                ) from None
            return encode_bytes(body)

    async def _read(self, url: str, answer: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > self._kwargs["max_body_bytes"]:
                raise RemoteError(
                    f"{_mask_url(url)} responded with more than {self._kwargs['max_body_bytes']:,} bytes; request "
                    "smaller pages",
                    retryable=False,
                )
        return bytes(body)

    async def _back_off(self, url: str, failures: int, failure: _Failure) -> None:
        decision = decide(failures, self._kwargs["max_retries"], _BACKOFF, random.getrandbits(JITTER_BITS))
        if isinstance(decision, GiveUp):
            raise RemoteError(f"{_mask_url(url)} failed {failures} times in a row; the last failure: {failure.text}")
        self.log.info("a page failed; retrying", url=_mask_url(url), error=failure.text)
        asked = parse_retry_after(failure.retry_after, _MAX_RETRY_AFTER_SECONDS)
        await asyncio.sleep(max(decision.delay_seconds, asked))


def _split(path: JsonPath | None) -> tuple[str, ...] | None:
    if path is None:
        return None
    return tuple(path.split(".")) if isinstance(path, str) else tuple(path)


def _check_url(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must start with http:// or https:// and a host, got {_mask_url(url)!r}")


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


@functools.cache
def _load_client() -> tuple[Any, ssl.SSLContext]:
    """Return httpx and a TLS context; both are slow to load, so load them once, in a thread."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ConfigError("pages of an API need the package httpx; install tidemill[http]") from error
    return httpx, ssl.create_default_context()


def _mask_url(url: str) -> str:
    """Return a URL without user, query and fragment."""
    shown = redact_text(url.partition("#")[0])
    base, mark, _ = shown.partition("?")
    return f"{base}?***" if mark else base
