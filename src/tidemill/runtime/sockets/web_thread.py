"""Runs a web UI on a thread of its own, so that the start of the process does not wait for its import.

The caller opens the port early, so that an unusable port is refused before anything else starts. The room `web` depends
on this one; the process passes in the function that builds the server.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.errors import describe_error
from tidemill.runtime.sockets.ports import Purpose, format_address

log = structlog.get_logger(__name__)

WEB: Final = Purpose("debug", "web UI")
_KEY_BYTES: Final = 24
#: How long the process's exit waits for the server, which itself waits a second for open requests.
_END_SECONDS: Final = 3.0


class Server(Protocol):
    """The server that the room `web` builds."""

    def run(self) -> None:
        """Serve until the stop; does not raise."""

    def stop(self) -> None:
        """Request the end; from any thread."""


class WebThread:
    """The web UI of a process.

    Args:
        listener: A listening socket.
        settings: The section.
        build: Imports the web UI and returns the server, from the listener and the key.
        process: The process's kind, for messages: "pipeline".

    Attributes:
        address: The URL, with the key if one is needed; for the user who started the process only.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: DebugSettings,
        build: Callable[[socket.socket, str | None], Any],
        process: str,
    ) -> None:
        """Prepare the server; clients wait until `begin`."""
        is_open = not settings.users and not settings.tokens
        self._key = secrets.token_urlsafe(_KEY_BYTES) if is_open else None
        self._listener = listener
        self._build = build
        self._process = process
        self._server: Server | None = None
        self._lock = threading.Lock()
        self._is_ended = False
        self._thread = threading.Thread(target=self._run, name="tidemill-web", daemon=True)
        address = settings.debug_url.rstrip("/") or format_address(listener)
        self.address = f"{address}/?key={self._key}" if self._key is not None else f"{address}/"

    def begin(self) -> None:
        """Import the web UI and serve it, on its thread; a second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        with self._lock:
            self._is_ended = True
            server = self._server
        # Without a server the web UI is still being imported, which need not be waited for.
        if server is None:
            self._listener.close()
        else:
            server.stop()
            self._thread.join(_END_SECONDS)

    def _run(self) -> None:
        try:
            server: Server = self._build(self._listener, self._key)
        except Exception as error:
            if not self._is_ended:
                log.exception(
                    f"the web UI cannot be started; the {self._process} runs without it", error=describe_error(error)
                )
            self._listener.close()
            return
        with self._lock:
            if self._is_ended:
                return
            self._server = server
        server.run()
