"""Runs a web UI on a thread of its own, so that the start of the process does not wait for its import.

The port is taken by the caller, early, so that one that cannot be used is refused before anything else starts. The room
`web` stands on this one: the process finds what builds the server by its name.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any, Final, Protocol

import structlog

from tidemill.config.debug_settings import DebugSettings
from tidemill.core.errors import describe_error
from tidemill.runtime.listening import Purpose, format_address

log = structlog.get_logger(__name__)

WEB: Final = Purpose("debug", "web UI")
_KEY_BYTES: Final = 24
#: How long the end of the process waits for the server, which waits a second for answers under way.
_END_SECONDS: Final = 3.0


class Server(Protocol):
    """What the room `web` builds."""

    def run(self) -> None:
        """Serve until the stop; does not raise."""

    def stop(self) -> None:
        """Ask for the end; from any thread."""


class WebThread:
    """The web UI of a process.

    Args:
        listener: A listening socket.
        settings: The section.
        build: Imports what is needed and returns the server, from the listener and the key.
        process: What runs here, for messages: "pipeline".

    Attributes:
        address: Where it is opened, with the key if one is needed: for the user who started the process only.
    """

    def __init__(
        self,
        listener: socket.socket,
        settings: DebugSettings,
        build: Callable[[socket.socket, str | None], Any],
        process: str,
    ) -> None:
        """Answer nothing yet; clients wait."""
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
        """Stop serving."""
        with self._lock:
            self._is_ended = True
            server = self._server
        # Without a server it is still being imported, which nobody waits for.
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
