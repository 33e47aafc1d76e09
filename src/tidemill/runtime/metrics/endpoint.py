"""Answers `/metrics`, `/healthz` and `/readyz` over HTTP, on threads of its own.

Invariants: no other part of the process waits for the endpoint, and it never keeps the process from exiting. A slow
client holds up no other for longer than the timeout. Clients that have not sent a request give way to later ones, so
that idle connections make no health check fail. There is no login, so no response may contain a secret.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from socketserver import ThreadingMixIn
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIEnvironment

import structlog
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder, gzip_accepted

from tidemill.core.errors import describe_error
from tidemill.runtime.log.setup import throttle
from tidemill.runtime.metrics.exposition import write_families
from tidemill.runtime.metrics.families import Family
from tidemill.runtime.sockets.ports import format_address

log = structlog.get_logger(__name__)

#: How long a client may take to send its request, and to receive the response.
CLIENT_SECONDS = 10.0
#: How many clients may be connected. A further client replaces the one that has been silent for longest; if all of them
#: are being answered, the further client is disconnected.
MAX_CLIENTS = 32
#: How long a silent client may take to give way.
_GIVE_WAY_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_GZIP_LEVEL = 1

#: Returns the reasons why a check fails; empty if it passes.
Check = Callable[[], list[str]]
Headers = list[tuple[str, str]]
ValueT = TypeVar("ValueT")


class _RequestHandler(WSGIRequestHandler):
    timeout = CLIENT_SECONDS

    def parse_request(self) -> bool:
        """Read the request; from then on, the client is answered and does not give way."""
        is_valid = super().parse_request()
        assert isinstance(self.server, _Server)
        self.server.note_asked(self.connection)
        return is_valid

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because probes arrive every few seconds."""

    def address_string(self) -> str:
        """Return the client's address; its name would need a DNS query."""
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket) -> None:
        super().__init__(listener.getsockname()[:2], _RequestHandler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.server_name, self.server_port = "localhost", listener.getsockname()[1]
        self.setup_environ()
        self._free = threading.BoundedSemaphore(MAX_CLIENTS)
        # Clients without a request so far, the oldest first; every access is one call, which is atomic.
        self._silent: dict[socket.socket, None] = {}
        self.ended = threading.Event()

    def get_request(self) -> Any:
        """Accept a client; without a free descriptor, pause before the next attempt."""
        try:
            return super().get_request()
        except OSError:
            self.ended.wait(_PAUSE_SECONDS)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False) or self._make_room():
            self._silent[request] = None
            try:
                super().process_request(request, client_address)
            except BaseException:  # no thread can be started
                self._forget(request)
                raise
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._silent.pop(request, None)
        self._free.release()

    def note_asked(self, request: socket.socket) -> None:
        """Record that a client has sent its request."""
        self._silent.pop(request, None)

    def _make_room(self) -> bool:
        """Disconnect the client that has been silent for longest; return whether that made room."""
        for client in list(self._silent):
            self._silent.pop(client, None)
            with contextlib.suppress(OSError):  # it has disconnected by itself
                client.shutdown(socket.SHUT_RDWR)  # wakes its thread
            return self._free.acquire(timeout=_GIVE_WAY_SECONDS)
        return False

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a client, which has disconnected or was too slow."""


class MetricsEndpoint:
    """Answers while the block runs.

    Args:
        listener: A listening socket; it is closed at the end.
        collect: Returns the metrics; called for each scrape, on any thread.
        find_dead: Returns why the process should be restarted, for `/healthz`.
        find_unready: Returns why the process is not ready, for `/readyz`.

    Attributes:
        address: The URL without a path.
    """

    def __init__(
        self, listener: socket.socket, collect: Callable[[], Iterable[Family]], find_dead: Check, find_unready: Check
    ) -> None:
        self.address = format_address(listener)
        self._listener = listener
        self._collect = collect
        self._process = CollectorRegistry(auto_describe=True)
        ProcessCollector(registry=self._process)
        self._checks = {"/healthz": find_dead, "/readyz": find_unready}
        self._server = _Server(listener)
        self._server.set_app(self._answer)
        self._thread = threading.Thread(target=self._serve, name="tidemill-metrics", daemon=True)

    def __enter__(self) -> Self:
        """Start to answer."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop answering, without waiting for clients."""
        self._server.ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join()
        self._server.server_close()

    def _serve(self) -> None:
        while not self._server.ended.is_set():
            try:
                self._server.handle_request()
            except Exception as error:  # for example, no descriptors or threads are left
                throttle(log, 60.0).warning("a client of the metrics could not be served", error=describe_error(error))

    def _answer(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path, method = environ.get("PATH_INFO", ""), environ["REQUEST_METHOD"]
        if method not in ("GET", "HEAD"):
            return _answer_text(start_response, "405 Method Not Allowed", "use GET\n", [("Allow", "GET, HEAD")])
        try:
            if path == "/metrics":
                body = self._answer_metrics(environ, start_response)
            elif path in self._checks:
                body = _answer_check(start_response, self._checks[path]())
            else:
                text = "tidemill: /metrics, /healthz, /readyz\n"
                body = _answer_text(start_response, "200 OK" if path in ("", "/") else "404 Not Found", text)
        except Exception as error:
            throttle(log, 60.0).error("a request could not be answered", path=path, error=describe_error(error))
            body = _answer_text(start_response, "500 Internal Server Error", "see the log of the process\n")
        return [] if method == "HEAD" else body

    def _answer_metrics(self, environ: WSGIEnvironment, start_response: StartResponse) -> list[bytes]:
        write_process, content_type = choose_encoder(environ.get("HTTP_ACCEPT", ""))
        is_openmetrics = content_type.startswith("application/openmetrics-text")
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]", [])
        families = _choose_families(self._collect(), names)
        # The process's metrics come last, because their text contains OpenMetrics' end marker.
        process = self._process.restricted_registry(names) if names else self._process
        body = write_families(families, is_openmetrics=is_openmetrics) + write_process(process)
        headers = [("Content-Type", content_type)]
        if gzip_accepted(environ.get("HTTP_ACCEPT_ENCODING", "")):
            # Higher levels take far longer and hardly reduce the size of such repetitive text.
            body = gzip.compress(body, _GZIP_LEVEL)
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        return [body]


def _choose_families(families: Iterable[Family], names: Collection[str]) -> Iterable[Family]:
    """Return the metrics of the series with these names; all metrics without names."""
    return [one for one in families if set(names) & set(one.definition.list_series())] if names else families


def _answer_check(start_response: StartResponse, reasons: list[str]) -> list[bytes]:
    body = json.dumps({"ok": not reasons, "reasons": reasons}).encode() + b"\n"
    headers = [("Content-Type", "application/json"), ("Cache-Control", "no-store")]
    start_response("503 Service Unavailable" if reasons else "200 OK", headers)
    return [body]


def _answer_text(start_response: StartResponse, status: str, text: str, headers: Headers | None = None) -> list[bytes]:
    start_response(status, [("Content-Type", "text/plain; charset=utf-8"), *(headers or [])])
    return [text.encode()]
