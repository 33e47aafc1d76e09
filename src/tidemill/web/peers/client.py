"""Queries one peer over HTTP: one request, one response.

Invariants: only GET is sent. The token goes to the configured address and nowhere else, since redirects are not
followed and no proxy is used. The response has a limited size, and the connection is closed at the deadline, however
slowly the peer sends.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlencode, urlsplit

from tidemill.config.sections.web_settings import PeerSettings

#: The response header with the identity of the recordings; equal for all servers of one folder.
IDENTITY = "Tidemill-Recordings"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = 64 * 1024


class PeerError(Exception):
    """A peer did not respond as expected; the text never contains its token."""


class PeerClient:
    """A client of one peer.

    Args:
        settings: The peer's address and token.
    """

    def __init__(self, settings: PeerSettings) -> None:
        parts = urlsplit(settings.url)
        self.host = parts.hostname or ""
        self.name = parts.netloc
        self.address = settings.url.rstrip("/")
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")
        self._token = settings.token
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def ask(self, path: str, query: Sequence[tuple[str, str]], seconds: float, own: str = "") -> bytes:
        """Return the JSON document at a path of the peer's API; blocks.

        Args:
            path: The path below `/api/v1`.
            query: Parameters of the query.
            seconds: How long the request may take.
            own: The identity of the recordings shown by this server.

        Raises:
            PeerError: The peer did not respond as expected, or it shows the same recordings as this server.
        """
        ends_at = time.monotonic() + seconds
        connection = self._connect(seconds)
        timer, is_over = None, threading.Event()

        def end() -> None:
            is_over.set()
            _break(connection.sock)

        try:
            connection.connect()
            # A socket's timeout applies to each read; this timer limits the whole request.
            timer = threading.Timer(max(0.0, ends_at - time.monotonic()), end)
            timer.daemon = True
            timer.start()
            headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
            asked = f"?{urlencode(query, errors='replace')}" if query else ""
            connection.request("GET", f"{self._prefix}/api/v1{path}{asked}", headers=headers)
            body = _read(connection.getresponse(), own)
        except PeerError as error:
            raise (PeerError(f"no answer within {seconds:g} s") if is_over.is_set() else error) from None
        except TimeoutError:
            raise PeerError(f"no answer within {seconds:g} s") from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            if is_over.is_set():
                raise PeerError(f"no answer within {seconds:g} s") from None
            raise PeerError(_describe(error)) from None
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()
        if is_over.is_set():  # the body ends where the timer closed the connection
            raise PeerError(f"no answer within {seconds:g} s")
        return body

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self.host, self._port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(self.host, self._port, timeout=seconds)


def _read(response: http.client.HTTPResponse, own: str) -> bytes:
    if 300 <= response.status < 400:
        raise PeerError("the peer redirects, which is not followed; configure the address it redirects to")
    if response.status in (401, 403):
        raise PeerError("the peer rejects the token; compare debug.peers here with debug.tokens of the peer")
    if response.status != 200:
        raise PeerError(f"the peer responded with status {response.status}")
    if own and response.headers.get(IDENTITY) == own:
        raise PeerError("the peer shows the same folder of recordings as this server; remove it from debug.peers")
    parts, size = [], 0
    while piece := response.read1(_PIECE_BYTES):
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise PeerError(f"the response is larger than {MAX_ANSWER_BYTES:,} bytes")
        parts.append(piece)
    if response.length:  # fewer bytes than announced
        raise PeerError("the response is incomplete")
    return b"".join(parts)


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is not valid: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "the peer's host name cannot be resolved"
    text = error.strerror if isinstance(error, OSError) else None
    return text or f"the response is not HTTP ({type(error).__name__})"


def _break(connection: socket.socket | None) -> None:
    with contextlib.suppress(OSError):
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
