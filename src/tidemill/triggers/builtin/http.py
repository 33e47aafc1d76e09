"""Polls a URL until the response is as expected.

Invariants: transient failures are retried with backoff, up to a limit in a row; permanent failures raise at once; no
response is read beyond a limit; URLs are shown without user and query, which may contain secrets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tidemill.core.errors import RemoteError
from tidemill.core.retry import JITTER_BITS
from tidemill.core.triggers.http_poll import PollAnswer, judge_answer, parse_retry_after
from tidemill.core.triggers.json_condition import parse_condition
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
from tidemill.triggers.builtin.identities import compute_digest, shorten_middle
from tidemill.triggers.builtin.selection import encode_bytes

if TYPE_CHECKING:
    import httpx

#: The jitter of the pause between polls, as a fraction in both directions.
_SPREAD: Final = 0.1


@dataclass(frozen=True, slots=True)
class _HttpAnswer:
    status: int
    retry_after: str | None
    body: bytes


class HttpTrigger(BaseTrigger):
    """Fires once, when a URL responds as expected.

    The payload has `url` (without user and query), `status` and `body`, which is decoded if it is JSON and text
    otherwise. The identity is `url` and a digest of the request, the response and the expectation: with `restart:
    always`, each distinct response is stored once. Headers are not part of the digest, and of secrets in `params` only
    the names are.

    Args:
        url: An http:// or https:// URL.
        method: The HTTP method.
        params: The query parameters, which replace a query in `url`; write secrets as `{"env": NAME}`.
        headers: The request headers; write secrets as `{"env": NAME}`.
        json: A body to send as JSON; None: no body.
        status: The expected status, or several. Any other 2xx, and 404, 409, 410, 423 and 425, mean "not yet".
        where: A condition on the JSON of the response, see `core.triggers.json_condition`; None: the status is enough.
        poll_seconds: The time between an unexpected response and the next request, with a jitter of 10 %.
        timeout_seconds: The timeout for a whole request and its response.
        max_retries: How many requests in a row may fail after the first one (no connection, no response in time, 408,
            429, 5xx), with a growing delay before each.
        max_body_bytes: The limit for a response; a larger one is an error.

    Raises:
        TypeError: A value has the wrong type.
        ValueError: A value is not allowed.
    """

    def __init__(
        self,
        url: str,
        *,
        method: str = "GET",
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, Any] | None = None,
        json: Any = None,
        status: int | Sequence[int] = 200,
        where: Mapping[str, Any] | None = None,
        poll_seconds: float = 60.0,
        timeout_seconds: float = 10.0,
        max_retries: int = 8,
        max_body_bytes: int = 1 << 20,
    ) -> None:
        """Check the arguments; do not connect yet."""
        super().__init__()
        check_url(url)
        positive = {"poll_seconds": poll_seconds, "timeout_seconds": timeout_seconds, "max_body_bytes": max_body_bytes}
        for name, value in positive.items():
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if max_retries < 0:
            raise ValueError(f"max_retries must not be negative, got {max_retries}")
        self._expected = frozenset([status] if isinstance(status, int) else status)
        if not self._expected or not all(100 <= one <= 599 for one in self._expected):
            raise ValueError(f"status must be an HTTP status from 100 to 599, or a list of them, got {status!r}")
        self._condition = None if where is None else parse_condition(where)
        self._kwargs: dict[str, Any] = {
            "url": url,
            "method": method,
            "params": None if params is None else dict(params),
            "headers": dict(headers or {}),
            "json": json,
            "status": status if isinstance(status, int) else sorted(status),
            "where": where,
            "poll_seconds": poll_seconds,
            "timeout_seconds": timeout_seconds,
            "max_retries": max_retries,
            "max_body_bytes": max_body_bytes,
        }
        self._shown_url = mask_url(url)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the classpath and arguments of this trigger."""
        return "tidemill.triggers.builtin.http.HttpTrigger", dict(self._kwargs)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll, then fire.

        Raises:
            ConfigError: httpx is not installed, or a secret is not in the environment.
            RemoteError: The server refused the request, or failed too often.
        """
        headers = resolve_environment(self._kwargs["headers"])
        params = self._kwargs["params"]
        params = None if params is None else resolve_environment(params)
        failures, said = 0, ""
        while True:
            answered = await self._ask(headers, params)
            found = self._judge(answered) if isinstance(answered, _HttpAnswer) else PollAnswer.FAILED
            if isinstance(found, TriggerEvent):
                yield found
                return
            if found is PollAnswer.NOT_YET and isinstance(answered, _HttpAnswer):
                failures = 0
                if (why := self._explain(answered)) != said:
                    said = why
                    self.log.info("a polled URL does not respond as expected yet", url=self._shown_url, answer=why)
                spread = 1 + _SPREAD * (2 * random.getrandbits(JITTER_BITS) / (1 << JITTER_BITS) - 1)
                await asyncio.sleep(self._kwargs["poll_seconds"] * spread)
            else:
                failures += 1
                await self._back_off(failures, answered)

    def _judge(self, answered: _HttpAnswer) -> TriggerEvent | PollAnswer:
        answer = judge_answer(answered.status, self._expected)
        if answer is PollAnswer.REFUSED:
            raise RemoteError(
                f"{self._shown_url} responded with status {answered.status}, which a retry will not change; correct "
                f"the URL or the credentials, or add the status to `status`",
                retryable=False,
            )
        if answer is not PollAnswer.EXPECTED:
            return answer
        try:
            body = msgspec.json.decode(answered.body)
        except (ValueError, RecursionError):
            # Without JSON no condition can hold; without a condition any body will do.
            if self._condition is not None:
                return PollAnswer.NOT_YET
            body = encode_bytes(answered.body)
        if self._condition is not None and not self._condition.holds(body):
            return PollAnswer.NOT_YET
        payload = {"url": self._shown_url, "status": answered.status, "body": body}
        return TriggerEvent(payload, identity=self._build_identity(answered))

    def _explain(self, answered: _HttpAnswer) -> str:
        """Return why a response is not the expected one."""
        if answered.status not in self._expected:
            return f"status {answered.status}"
        try:
            msgspec.json.decode(answered.body)
        except (ValueError, RecursionError):
            return f"status {answered.status}, but the body is not JSON, so `where` is false"
        return f"status {answered.status}, but `where` is false"

    def _build_identity(self, answered: _HttpAnswer) -> str:
        given = self._kwargs
        request = (given["method"].upper(), given["url"], given["params"], given["json"])
        waited_for = (sorted(self._expected), given["where"])
        digest = compute_digest(request, waited_for, answered.status, answered.body)
        return f"{shorten_middle(self._shown_url)}#{digest}"

    async def _ask(self, headers: dict[str, Any], params: dict[str, Any] | None) -> _HttpAnswer | str:
        """Return the response, or a description of the failure."""
        httpx, verify = await asyncio.to_thread(load_client)
        given, seconds = self._kwargs, self._kwargs["timeout_seconds"]
        try:
            async with asyncio.timeout(seconds):
                # Polls are rare, so each request has its own client. The timeout around it covers everything.
                async with (
                    build_client(httpx, verify, given["url"]) as client,
                    client.stream(
                        given["method"], given["url"], params=params, headers=headers, json=given["json"]
                    ) as answer,
                ):
                    body = await self._read(answer)
                    return _HttpAnswer(answer.status_code, answer.headers.get("retry-after"), body)
        except TimeoutError:
            return f"no response within {seconds:g} s"
        except httpx.TransportError as error:
            # The text of the error may contain the URL.
            return type(error).__name__
        except (httpx.InvalidURL, httpx.DecodingError) as error:
            raise RemoteError(f"{self._shown_url}: {type(error).__name__}", retryable=False) from None

    async def _read(self, answer: httpx.Response) -> bytes:
        body = bytearray()
        async for chunk in answer.aiter_bytes():
            body += chunk
            if len(body) > self._kwargs["max_body_bytes"]:
                raise RemoteError(
                    f"{self._shown_url} responded with more than {self._kwargs['max_body_bytes']} bytes; poll a "
                    f"smaller resource, or raise max_body_bytes",
                    retryable=False,
                )
        return bytes(body)

    async def _back_off(self, failures: int, answered: _HttpAnswer | str) -> None:
        if isinstance(answered, _HttpAnswer):
            how = f"status {answered.status}"
            asked = parse_retry_after(answered.retry_after, MAX_RETRY_AFTER_SECONDS)
        else:
            how, asked = answered, 0.0
        delay = find_delay(self._kwargs["url"], failures, self._kwargs["max_retries"], how)
        self.log.info("a polled URL failed; retrying", url=self._shown_url, error=how)
        await asyncio.sleep(max(delay, asked))
