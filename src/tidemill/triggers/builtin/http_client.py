"""The HTTP client of triggers: its retries, and URLs for messages, which show no user, query or fragment.

httpx rejects some entries of NO_PROXY for unrelated hosts, so `find_proxy` reads the environment instead.
"""

from __future__ import annotations

import functools
import random
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from tidemill.config.redaction import redact_text
from tidemill.core.errors import ConfigError, RemoteError
from tidemill.core.retry import JITTER_BITS, Backoff, GiveUp, decide
from tidemill.runtime.sockets.http_proxy import find_proxy

if TYPE_CHECKING:
    import httpx

#: The longest Retry-After that is obeyed.
MAX_RETRY_AFTER_SECONDS: Final = 3600.0
_BACKOFF: Final = Backoff(0.5, 60.0)


@functools.cache
def load_client() -> tuple[Any, ssl.SSLContext]:
    """Return httpx and a TLS context; both are slow to load, so load them once, in a thread."""
    try:
        import httpx
    except ModuleNotFoundError as error:
        raise ConfigError("HTTP triggers need the package httpx; install tidemill[http]") from error
    return httpx, ssl.create_default_context()


def build_client(
    library: Any, verify: ssl.SSLContext, url: str, headers: Mapping[str, str] | None = None
) -> httpx.AsyncClient:
    """Return a client for a host.

    Args:
        library: httpx; see `load_client`.
        verify: The TLS context.
        url: A URL of the host.
        headers: The headers of all requests.

    Raises:
        TypeError, UnicodeError, AttributeError: A header is not ASCII text.
    """
    client: httpx.AsyncClient = library.AsyncClient(
        verify=verify, timeout=None, trust_env=False, proxy=find_proxy(url), headers=headers
    )
    return client


def check_url(url: str) -> None:
    """Check that a URL has a host and the scheme http or https.

    Raises:
        ValueError: It lacks one of them.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"url must start with http:// or https:// and a host, got {mask_url(url)!r}")


def mask_url(url: str) -> str:
    """Return a URL without user, query and fragment."""
    shown = redact_text(url.partition("#")[0])
    base, mark, _ = shown.partition("?")
    return f"{base}?***" if mark else base


def find_delay(url: str, failures: int, max_retries: int, failure: str) -> float:
    """Return the seconds to wait before the next try.

    Args:
        url: The URL, for the message.
        failures: The number of requests in a row that have failed.
        max_retries: The number of requests that may fail after the first one.
        failure: The last failure.

    Raises:
        RemoteError: More than `max_retries` failed.
    """
    decision = decide(failures, max_retries, _BACKOFF, random.getrandbits(JITTER_BITS))
    if isinstance(decision, GiveUp):
        raise RemoteError(f"{mask_url(url)} failed {failures} times in a row; the last failure: {failure}")
    return decision.delay_seconds
