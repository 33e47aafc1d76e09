"""HTTP as a sink: one request per payload, over persistent connections.

The sink itself retries a temporary failure a few times, because it knows the server's `Retry-After`; then the
delivery's own backoff takes over. Invariants: all requests of a payload have the same idempotency key. With a
concurrency of 1, no payload is sent before the previous one is confirmed or given a final answer. The hook or
`pipeline/delivery` sets the key in the payload; only a payload without one gets a random key here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import ClassVar
from urllib.parse import urlsplit

import httpx
import msgspec

from tidemill.config.redaction import PUBLIC_HEADERS, find_url_secrets, mask_secrets, redact_text
from tidemill.config.sections.sink_settings import HttpSinkSettings
from tidemill.core.delivery.http_delivery import HttpVerdict, describe_body, judge_response, parse_retry_after
from tidemill.core.delivery.http_request import build_headers, build_url, encode_form
from tidemill.core.errors import ConfigError, RemoteError, describe_error
from tidemill.core.retry import Backoff, GiveUp, decide
from tidemill.core.wording import shorten
from tidemill.runtime.sockets.http_proxy import find_proxy
from tidemill.sinks.base import CHECK, WAITS, Encoded, Refusal, Sink, close_within
from tidemill.sinks.payloads import HttpPayload

CONNECT_SECONDS = 10.0
CLOSE_SECONDS = 5.0
#: The longest pause that a server's `Retry-After` can cause.
MAX_PAUSE_SECONDS = 60.0
#: How much of a response is read so that its connection can be reused; a longer response closes the connection.
MAX_ANSWER_BYTES = 256 * 1024
#: How much of a response's text messages show.
SHOWN_CHARACTERS = 300
METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
BODIES = ("json", "form")
#: Consecutive requests in one batch, per connection.
ROUNDS = 4
BACKOFF = Backoff(0.1, 2.0)
_KEY_CHARACTERS = frozenset(map(chr, range(0x21, 0x7F)))
#: Servers accept up to about 8 kB of headers; above that, many close the connection as if they were down.
MAX_KEY_CHARACTERS = 1_000


class _Outcome(msgspec.Struct, frozen=True):
    """The outcome of one request.

    Attributes:
        verdict: See `HttpVerdict`.
        text: Why the payload is not delivered.
        pause_seconds: How long the server asks the client to wait.
        oversize: Whether the body is larger than the server accepts.
    """

    verdict: HttpVerdict
    text: str = ""
    pause_seconds: float = 0.0
    oversize: bool = False


_DELIVERED = _Outcome(HttpVerdict.DELIVERED)


class _Request(msgspec.Struct, frozen=True, gc=False):
    """A payload's request.

    Attributes:
        method: The method, in upper case.
        url: The URL; None is the sink's.
        headers: All headers except the sink's own.
        content: The body, or None.
    """

    method: str
    url: str | None
    headers: dict[str, str]
    content: bytes | None


class HttpSink(Sink):
    """One `sinks.http.<name>`.

    Args:
        name: The instance's name.
        settings: The instance's section.
    """

    type: ClassVar[str] = "http"
    takes_idempotency_key: ClassVar[bool] = True

    def __init__(self, name: str, settings: HttpSinkSettings) -> None:
        super().__init__(name)
        self._settings = settings
        parts = urlsplit(settings.url)
        self._address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        self._secure = parts.scheme == "https"
        # Path and query can be secrets too, so messages show only the server.
        self._where = f"{parts.scheme}://{self._address[0]}:{self._address[1]}"
        self._secrets = find_url_secrets(settings.url) | {
            value for value in settings.headers.values() if len(value) > 5
        }
        self._secrets |= {part for part in (parts.path, parts.query) if len(part) > 5}
        self._url = httpx.URL()
        self._headers = {name.lower(): value for name, value in settings.headers.items()}
        self._content_type = self._headers.pop("content-type", "application/json")
        # One key for all payloads keeps them in order.
        self._order = name if settings.concurrency == 1 else None
        self.max_batch_count = ROUNDS * settings.concurrency
        # Each request has a timeout of its own; this one applies if the requests fail to end in time.
        seconds = (settings.max_retries + 1) * (settings.timeout_seconds + MAX_PAUSE_SECONDS)
        self.send_timeout_seconds = ROUNDS * seconds
        self._not_before = 0.0
        self._client: httpx.AsyncClient | None = None

    async def connect(self) -> None:
        """Check that the server accepts connections; nothing is sent.

        Raises:
            ConfigError: The URL is wrong.
            RemoteError: The server does not accept connections.
        """
        # httpx logs every request with its whole URL.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        settings = self._settings
        try:
            proxy = find_proxy(settings.url)
            self._client = httpx.AsyncClient(
                trust_env=False,  # it would refuse unrelated hosts of NO_PROXY
                proxy=proxy,
                # Only the start of a response is read, as text.
                headers={"accept-encoding": "identity", **self._headers},
                timeout=settings.timeout_seconds,
                # Loading the system's certificates is slow.
                verify=await asyncio.to_thread(ssl.create_default_context) if self._secure else False,
                limits=httpx.Limits(
                    max_connections=settings.concurrency, max_keepalive_connections=settings.concurrency
                ),
            )
            self._url = self._client.build_request(settings.method, settings.url).url
            _ = httpx.Headers({"content-type": self._content_type})
        except (httpx.InvalidURL, ValueError) as error:
            raise ConfigError(
                f"{self.section}: {self._where}: {self._describe(error)}; correct url or headers"
            ) from None
        if proxy is None:  # a proxy resolves names and connects in its own way
            await self._check_reachable()

    async def _check_reachable(self) -> None:
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                _, writer = await asyncio.open_connection(*self._address)
            writer.close()
        except TimeoutError:
            raise RemoteError(
                f"{self.section}: {self._where}: no answer within {CONNECT_SECONDS:g} s; {CHECK} url"
            ) from None
        except OSError as error:
            raise RemoteError(f"{self.section}: {self._where}: {self._describe(error)}; {CHECK} url") from None

    def _describe(self, error: BaseException) -> str:
        return mask_secrets(describe_error(error), self._secrets)

    def encode(self, payload: HttpPayload) -> Encoded:
        """Return the request.

        Raises:
            TypeError: `data` cannot be encoded as JSON, or a field has a value of the wrong type.
            ValueError: A field has a value that is invalid in a request, or would lead outside the sink's URL.
        """
        settings = self._settings
        key = payload.idempotency_key
        if not key:
            key = uuid.uuid4().hex
        elif not isinstance(key, str):
            raise TypeError(f"idempotency_key must be a string, not {type(key).__name__}")
        elif len(key) > MAX_KEY_CHARACTERS or not _KEY_CHARACTERS.issuperset(key):
            raise ValueError(
                "idempotency_key is too long, or has characters that a header cannot have: use letters, digits and - "
                f"only, {MAX_KEY_CHARACTERS} of them at most"
            )
        method, content, content_type = self._build_body(payload)
        headers = {settings.idempotency_header: key}
        if content is not None:
            headers["content-type"] = content_type
        if payload.headers is not None:
            headers |= build_headers(payload.headers, settings.idempotency_header)
        url = None
        if payload.path != "" or payload.query is not None:
            url = build_url(settings.url, payload.path, payload.query)
        size = len(content or b"") + sum(len(name) + len(value) for name, value in headers.items()) + len(url or "")
        return Encoded(self._order, _Request(method, url, headers, content), size)

    def _build_body(self, payload: HttpPayload) -> tuple[str, bytes | None, str]:
        """Return the method, the body and its content type."""
        method = payload.method.upper() if isinstance(payload.method, str) else payload.method
        method = method or self._settings.method
        if method not in METHODS:
            raise ValueError(f"unknown method {shorten(repr(method), 60)}; use one of {', '.join(METHODS)}")
        if payload.body not in BODIES:
            raise ValueError(f"unknown body {shorten(repr(payload.body), 60)}; use one of {', '.join(BODIES)}")
        data = payload.data
        if data is None and method in ("GET", "DELETE"):
            return method, None, ""
        if method == "GET":
            raise ValueError("a GET has no body: give query instead of data")
        if payload.body == "json":
            return method, self.to_json(data), self._content_type
        dump = getattr(data, "model_dump", None)
        content = data if isinstance(data, bytes) else encode_form(data if dump is None else dump(mode="json"))
        return method, content, "application/x-www-form-urlencoded"

    # -- sending ------------------------------------------------------------------------------------------------

    async def send(self, batch: Sequence[Encoded]) -> Sequence[Refusal | None]:
        """Send a request per payload.

        Raises:
            RemoteError: The server accepted none of the payloads, or all others wait behind the first one.
        """
        outcomes: list[_Outcome | None] = [None] * len(batch)
        if self._order is not None:
            for index, item in enumerate(batch):
                outcome = outcomes[index] = await self._deliver(item)
                if outcome is not _DELIVERED:
                    break
        else:
            indexes = iter(range(len(batch)))
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._settings.concurrency, len(batch))):
                    group.create_task(self._work(batch, outcomes, indexes))
        known = [outcome for outcome in outcomes if outcome is not None]
        # With a concurrency of 1, nothing is sent while the first payload fails for any reason; the later ones did not
        # fail.
        failing = (HttpVerdict.OVERLOADED,) if self._order is None else (HttpVerdict.OVERLOADED, HttpVerdict.AGAIN)
        if len(known) == len(batch) and all(outcome.verdict in failing for outcome in known):
            raise RemoteError(f"{self.section}: {known[0].text}")
        return [_build_answer(outcome) for outcome in outcomes]

    async def _work(self, batch: Sequence[Encoded], outcomes: list[_Outcome | None], indexes: Iterator[int]) -> None:
        for index in indexes:
            outcomes[index] = await self._deliver(batch[index])

    async def _deliver(self, item: Encoded) -> _Outcome:
        """Send requests until the payload is accepted or refused, or attempts run out."""
        started, attempt = time.monotonic(), 0
        while True:
            attempt += 1
            # Another response may extend the pause during the sleep.
            while (pause := self._not_before - time.monotonic()) > 0:  # noqa: ASYNC110
                await asyncio.sleep(pause)
            outcome = await self._request(item.body, again=attempt > 1)
            if outcome.verdict in (HttpVerdict.DELIVERED, HttpVerdict.REFUSED):
                return outcome
            # The server asked for a pause, so all requests wait.
            self._not_before = max(self._not_before, time.monotonic() + outcome.pause_seconds)
            decision = decide(
                attempt,
                self._settings.max_retries,
                BACKOFF,
                random.getrandbits(32),
                elapsed_seconds=time.monotonic() - started,
            )
            if isinstance(decision, GiveUp):
                return outcome
            await asyncio.sleep(max(decision.delay_seconds, outcome.pause_seconds))

    async def _request(self, wanted: _Request, *, again: bool) -> _Outcome:
        client, settings = self._client, self._settings
        if client is None:
            raise RemoteError(f"{self.section} is not connected")
        request = client.build_request(
            wanted.method, wanted.url or self._url, content=wanted.content, headers=wanted.headers
        )
        try:
            # The client's own timeouts apply to each step: a server that sends a byte now and then would hold it
            # forever.
            async with asyncio.timeout(settings.timeout_seconds):
                answer = await client.send(request, stream=True)
                try:
                    content = await _read_content(answer)
                finally:
                    await answer.aclose()
        except TimeoutError:
            text = f"{self._where}: no answer within {settings.timeout_seconds:g} s"
            return _Outcome(HttpVerdict.OVERLOADED, text)
        except httpx.LocalProtocolError as error:
            # Nothing was sent, and a retry would fail in the same way.
            return _Outcome(HttpVerdict.REFUSED, f"{self._where}: {self._describe(error)}")
        except (httpx.TransportError, httpx.StreamError, OSError) as error:
            return _Outcome(HttpVerdict.OVERLOADED, f"{self._where}: {self._describe(error)}")
        return self._judge(wanted, answer, content, again=again)

    def _judge(self, wanted: _Request, answer: httpx.Response, content: bytes, *, again: bool) -> _Outcome:
        verdict = judge_response(answer.status_code, deleting=wanted.method == "DELETE", again=again)
        if verdict is HttpVerdict.DELIVERED:
            return _DELIVERED
        headers = answer.headers
        body = describe_body(content, headers.get("content-type"), headers.get("content-encoding"))
        # Masked before it is cut, because half a secret would not be found.
        body = shorten(mask_secrets(body, self._collect_secrets(wanted)), SHOWN_CHARACTERS)
        reason = shorten(describe_body(answer.reason_phrase.encode()), 60)
        text = f"{self._where} answered {answer.status_code} {reason}{': ' if body else ''}{body}"
        if answer.is_redirect:
            text = f"{self._where} redirects ({answer.status_code}), which is not followed; correct url"
            text += f" (it says: {body})" if body else ""
        text = mask_secrets(text, self._secrets)
        pause_seconds = parse_retry_after(
            answer.headers.get("retry-after"), answer.headers.get("date"), time.time(), MAX_PAUSE_SECONDS
        )
        return _Outcome(verdict, redact_text(text), pause_seconds, answer.status_code == 413)

    def _collect_secrets(self, wanted: _Request) -> set[str]:
        """Return the parts of a request that a response may repeat but no message may show."""
        public = PUBLIC_HEADERS | {self._settings.idempotency_header}
        given = {value for name, value in wanted.headers.items() if name not in public and len(value) > 5}
        return given | self._secrets | (find_url_secrets(wanted.url) if wanted.url is not None else set())

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await close_within(CLOSE_SECONDS, client.aclose())


async def _read_content(answer: httpx.Response) -> bytes:
    """Read a response, or its beginning, without decompression: a compressed response can grow without limit."""
    content = bytearray()
    async for chunk in answer.aiter_raw():
        content += chunk
        if len(content) > MAX_ANSWER_BYTES:
            break
    return bytes(content)


def _build_answer(outcome: _Outcome | None) -> Refusal | None:
    if outcome is None:
        return WAITS
    if outcome.verdict is HttpVerdict.DELIVERED:
        return None
    return Refusal(outcome.text, outcome.verdict is not HttpVerdict.REFUSED, outcome.oversize)
