"""Asks one peer over HTTP: one request, one answer.

Invariants: only GET is sent; the token goes to the configured address and nowhere else, since redirects are not
followed and no proxy is used; the answer has a limited size, and after the deadline the connection is closed, however
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

from tidemill.config.web_settings import PeerSettings

#: The header in which a server says whose recordings it shows; the same for all servers of a folder.
IDENTITY = "Tidemill-Recordings"
MAX_ANSWER_BYTES = 4 * 1024 * 1024
_PIECE_BYTES = 64 * 1024


class PeerError(Exception):
    """A peer has not answered, or not as expected; without its token."""


class PeerClient:
    """Asks a peer.

    Args:
        settings: Where it is.
    """

    def __init__(self, settings: PeerSettings) -> None:
        """Connect to nothing yet."""
        parts = urlsplit(settings.url)
        self.host = parts.hostname or ""
        self.name = parts.netloc
        self.address = settings.url.rstrip("/")
        self._port = parts.port
        self._prefix = parts.path.rstrip("/")
        self._token = settings.token
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None

    def ask(self, path: str, query: Sequence[tuple[str, str]], seconds: float, own: str = "") -> bytes:
        """Return the JSON document at a path of its API; blocks.

        Args:
            path: Behind `/api/v1`.
            query: Of the address.
            seconds: How long it may take.
            own: The identity of the recordings that are shown here.

        Raises:
            PeerError: It has not answered, or with something else, or it shows the same recordings.
        """
        ends_at = time.monotonic() + seconds
        connection = self._connect(seconds)
        timer, is_over = None, threading.Event()

        def end() -> None:
            is_over.set()
            _break(connection.sock)

        try:
            connection.connect()
            # The time limit of a socket is for each piece; this one is for all.
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
        if is_over.is_set():  # it ends where the connection was closed
            raise PeerError(f"no answer within {seconds:g} s")
        return body

    def _connect(self, seconds: float) -> http.client.HTTPConnection:
        if self._tls is not None:
            return http.client.HTTPSConnection(self.host, self._port, timeout=seconds, context=self._tls)
        return http.client.HTTPConnection(self.host, self._port, timeout=seconds)


def _read(response: http.client.HTTPResponse, own: str) -> bytes:
    if 300 <= response.status < 400:
        raise PeerError("it redirects, which is not followed; set the address that it redirects to")
    if response.status in (401, 403):
        raise PeerError("it does not know the token; see debug.peers here, and debug.tokens there")
    if response.status != 200:
        raise PeerError(f"it answers with status {response.status}")
    if own and response.headers.get(IDENTITY) == own:
        raise PeerError("it shows the recordings of this same folder, which are here already; leave it out")
    parts, size = [], 0
    while piece := response.read1(_PIECE_BYTES):
        size += len(piece)
        if size > MAX_ANSWER_BYTES:
            raise PeerError(f"its answer is larger than {MAX_ANSWER_BYTES:,} bytes")
        parts.append(piece)
    if response.length:  # what was announced and did not come
        raise PeerError("its answer is not complete")
    return b"".join(parts)


def _describe(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not valid: {error.verify_message}"
    if isinstance(error, socket.gaierror):
        return "its name is not known"
    text = error.strerror if isinstance(error, OSError) else None
    return text or f"its answer is not HTTP ({type(error).__name__})"


def _break(connection: socket.socket | None) -> None:
    with contextlib.suppress(OSError):
        if connection is not None:
            connection.shutdown(socket.SHUT_RDWR)
