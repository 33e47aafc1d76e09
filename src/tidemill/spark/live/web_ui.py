"""Opens a pipeline's web UI; if it is off, its modules are not imported.

The port is bound before Spark starts, so that an unusable port is refused early. The UI itself is imported on its own
thread once the engines have been requested, so that it does not delay the start of the pipeline. It is imported by
name, because the package `web` depends on this one.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tidemill.config.sections.debug_settings import DebugSettings
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

if TYPE_CHECKING:  # imported only if something is recorded
    from tidemill.spark.live.run_recorder import RunRecorder

log = structlog.get_logger(__name__)

_BUILDER = "tidemill.web.pipeline.start"


class EngineQuestions(Protocol):
    """Requests to the engines of a pipeline; implemented by `LinkedEngines`."""

    def find_message(self, topic: str, partition: int, offset: int) -> OpenMessage | None:
        """Return where an open message is; blocks.

        Raises:
            RemoteError: Its engine does not respond.
        """

    def probe(self, message: SourceMessage, seconds: float) -> ProbeReport:
        """Run a message through an engine's handler without side effects; blocks.

        Raises:
            UserActionError: No engine can probe the message now.
            RemoteError: The engine does not respond.
        """
        ...

    def watch(self, take: TakeLive, seconds: float) -> None:
        """Make all engines report their running tasks for some seconds; see `LinkServer.watch`."""


@dataclass(frozen=True, slots=True)
class Watched:
    """The state and actions of a pipeline that the web UI uses, from its own thread.

    Attributes:
        asked: The source of the metrics.
        settings: The settings that the pipeline uses.
        configured: The settings as they were read, before `on_startup`.
        worker: The worker name.
        control: The actions of users; blocks.
        engines: Requests to the engines.
        drain: Requests a clean end.
        metrics_address: The URL of the metrics; None if there are none.
        config: The configuration file; None if there is none.
    """

    asked: Monitored
    settings: Settings
    configured: Settings
    worker: str
    control: Control
    engines: EngineQuestions
    drain: Callable[[], None]
    metrics_address: str | None = None
    config: Path | None = None


class WebUi(WebThread):
    """The web UI of a pipeline.

    Args:
        listener: A listening socket.
        settings: The `debug` section.
        watched: The pipeline.
        recorder: The recorder of the run; None if nothing is recorded.
    """

    def __init__(
        self, listener: socket.socket, settings: DebugSettings, watched: Watched, recorder: RunRecorder | None
    ) -> None:
        """Prepare; clients that connect wait until the UI is ready."""

        def build(listener: socket.socket, key: str | None) -> Any:
            builder: Any = importlib.import_module(_BUILDER)
            return builder.build_server(listener, key, watched, recorder)

        super().__init__(listener, settings, build, "pipeline")


@contextlib.contextmanager
def serve_web(watched: Watched, recorder: RunRecorder | None = None) -> Iterator[WebUi | None]:
    """Bind the address during the block; yield None if there is no web UI.

    Args:
        watched: The pipeline.
        recorder: The recorder of the run; None if nothing is recorded.

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
            log.info("serving the web UI", web=web.address)
            yield web
        finally:
            web.close()
