"""Opens a pipeline's web UI, unless it is off: then nothing of it is imported.

The port is taken before Spark starts, so that one that cannot be used is refused early; the UI itself is imported on
its own thread once the engines have been asked for, so that the start of the pipeline does not wait for it. It is found
by its name, since the room `web` stands on this one.
"""

from __future__ import annotations

import contextlib
import importlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tidemill.config.debug_settings import DebugSettings
from tidemill.config.settings import Settings
from tidemill.core.errors import describe_error
from tidemill.runtime.listening import Purpose, format_address, is_port_chosen, listen
from tidemill.runtime.open_message import OpenMessage
from tidemill.spark.live.monitoring import Monitored
from tidemill.spark.live.user_requests import Control

if TYPE_CHECKING:  # loaded only where something is recorded
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)

_BUILDER = "tidemill.web.pipeline.start"
_WEB = Purpose("debug", "web UI")
_KEY_BYTES = 24
#: How long the end of the process waits for the server, which waits a second for answers under way.
_END_SECONDS = 3.0


def _find_nothing(topic: str, partition: int, offset: int) -> OpenMessage | None:
    return None


@dataclass(frozen=True, slots=True)
class Watched:
    """What the web UI shows of a pipeline, and may ask it for, from its own thread.

    Attributes:
        asked: What metrics are made of, too.
        settings: As the pipeline uses them.
        configured: As they were read, before `on_startup`.
        worker: The worker's name.
        control: What users may do to it; blocks.
        drain: Asks for a clean end.
        metrics_address: The URL of the metrics; None: there is none.
        find_message: Returns where an open message is, by topic, partition and offset; blocks, and may raise a
            RemoteError.
    """

    asked: Monitored
    settings: Settings
    configured: Settings
    worker: str
    control: Control
    drain: Callable[[], None]
    metrics_address: str | None = None
    find_message: Callable[[str, int, int], OpenMessage | None] = _find_nothing


class Server(Protocol):
    """What the room `web` builds."""

    def run(self) -> None:
        """Serve until the stop; does not raise."""

    def stop(self) -> None:
        """Ask for the end; from any thread."""


class WebUi:
    """The web UI of a pipeline.

    Args:
        listener: A listening socket.
        settings: The section.
        watched: What is shown.
        recorder: What is recorded goes there; None: nothing is.

    Attributes:
        address: Where it is opened, with the key if one is needed: for the user who started the pipeline only.
    """

    def __init__(
        self, listener: socket.socket, settings: DebugSettings, watched: Watched, recorder: RunRecorder | None
    ) -> None:
        """Answer nothing yet; clients wait."""
        is_open = not settings.users and not settings.tokens
        self._key = secrets.token_urlsafe(_KEY_BYTES) if is_open else None
        self._listener = listener
        self._watched = watched
        self._recorder = recorder
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
            builder: Any = importlib.import_module(_BUILDER)
            server: Server = builder.build_server(self._listener, self._key, self._watched, self._recorder)
        except Exception as error:
            if not self._is_ended:
                log.exception("the web UI cannot be started; the pipeline runs without it", error=describe_error(error))
            self._listener.close()
            return
        with self._lock:
            if self._is_ended:
                return
            self._server = server
        server.run()


@contextlib.contextmanager
def serve_web(watched: Watched, recorder: RunRecorder | None = None) -> Iterator[WebUi | None]:
    """Have the address while the block runs; yields None if there is no web UI.

    Args:
        watched: What is shown.
        recorder: What is recorded goes there; None: nothing is.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    settings = watched.settings.debug
    if not settings.enabled:
        yield None
        return
    is_chosen = is_port_chosen(watched.configured.debug, settings)
    listener = listen(settings, is_chosen=is_chosen, purpose=_WEB)
    if listener is None:
        yield None
        return
    web = WebUi(listener, settings, watched, recorder)
    try:
        log.info("the web UI is served", web=web.address)
        yield web
    finally:
        web.close()
