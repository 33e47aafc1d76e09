"""Opens a pipeline's web UI, unless it is off: then nothing of it is imported.

The port is taken before Spark starts, so that one that cannot be used is refused early; the UI itself is imported on
its own thread once the engines have been asked for, so that the start of the pipeline does not wait for it. It is found
by its name, since the room `web` stands on this one.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tidemill.config.debug_settings import DebugSettings
from tidemill.config.settings import Settings
from tidemill.runtime.kafka.source_message import SourceMessage
from tidemill.runtime.link.open_message import OpenMessage
from tidemill.runtime.link.probe_report import ProbeReport
from tidemill.runtime.link.server import TakeLive
from tidemill.runtime.sockets.port_owners import PortOwners
from tidemill.runtime.sockets.ports import is_port_chosen, listen
from tidemill.runtime.sockets.web_thread import WEB, WebThread
from tidemill.spark.live.monitoring import Monitored
from tidemill.spark.live.user_requests import Control

if TYPE_CHECKING:  # loaded only where something is recorded
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)

_BUILDER = "tidemill.web.pipeline.start"


class Engines(Protocol):
    """What may be asked of the engines of a pipeline; `LinkedEngines` is it."""

    def find_message(self, topic: str, partition: int, offset: int) -> OpenMessage | None:
        """Return where an open message is; blocks.

        Raises:
            RemoteError: Its engine does not say.
        """

    def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through the handler of an engine, and leave nothing behind; blocks.

        Raises:
            UserActionError: That is not possible now.
            RemoteError: The engine does not answer.
        """
        ...

    def watch(self, take: TakeLive, seconds: float) -> None:
        """Have all engines say what their executors do for some seconds; see `LinkServer.watch`."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What the web UI shows of a pipeline, and may ask it for, from its own thread.

    Attributes:
        asked: What metrics are made of, too.
        settings: As the pipeline uses them.
        configured: As they were read, before `on_startup`.
        worker: The worker's name.
        control: What users may do to it; blocks.
        engines: What may be asked of its engines.
        drain: Asks for a clean end.
        metrics_address: The URL of the metrics; None: there is none.
    """

    asked: Monitored
    settings: Settings
    configured: Settings
    worker: str
    control: Control
    engines: Engines
    drain: Callable[[], None]
    metrics_address: str | None = None


class WebUi(WebThread):
    """The web UI of a pipeline.

    Args:
        listener: A listening socket.
        settings: The section.
        watched: What is shown.
        recorder: What is recorded goes there; None: nothing is.
    """

    def __init__(
        self, listener: socket.socket, settings: DebugSettings, watched: Watched, recorder: RunRecorder | None
    ) -> None:
        """Answer nothing yet; clients wait."""

        def build(listener: socket.socket, key: str | None) -> Any:
            builder: Any = importlib.import_module(_BUILDER)
            return builder.build_server(listener, key, watched, recorder)

        super().__init__(listener, settings, build, "pipeline")


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
    with PortOwners(settings.db_dir) as owners:
        listener = listen(settings, is_chosen=is_chosen, purpose=WEB, owners=owners)
        if listener is None:
            yield None
            return
        web = WebUi(listener, settings, watched, recorder)
        try:
            log.info("the web UI is served", web=web.address)
            yield web
        finally:
            web.close()
