"""Opens a trigger host's web UI; if it is off, its modules are not imported.

The displayed state belongs to the host's event loop: the threads of the web UI query that loop, which answers between
triggers.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from tidemill.config.settings import Settings
from tidemill.runtime.loop.loop_calls import call_on_loop
from tidemill.runtime.sockets.port_owners import PortOwners
from tidemill.runtime.sockets.ports import is_port_chosen, listen
from tidemill.runtime.sockets.web_thread import WEB, WebThread
from tidemill.services.triggerer.lists.reporting.monitoring import HostMonitor

if TYPE_CHECKING:
    from tidemill.services.triggerer.lists.reporting.host_recorder import HostRecorder
    from tidemill.services.triggerer.lists.reporting.host_view import HostView

log = structlog.get_logger(__name__)

T = TypeVar("T")
_BUILDER = "tidemill.web.triggers.start"
#: A loop that does not answer within this time is blocked; the log names the trigger that blocks it.
LOOP_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class WatchedHost:
    """A trigger host, as seen by the threads of its web UI.

    Attributes:
        settings: The settings of the host.
        worker: The worker's name.
        list_name: The name of the trigger list.
        view: Answers queries, on the loop of the host only.
        loop: The loop of the host.
        recorder: Records the host; None: nothing is recorded.
        metrics_address: The URL of the metrics; None: there is none.
        find_dead: Returns why the process should be restarted.
        find_unready: Returns why it is not ready.
    """

    settings: Settings
    worker: str
    list_name: str
    view: HostView
    loop: asyncio.AbstractEventLoop
    find_dead: Callable[[], list[str]]
    find_unready: Callable[[], list[str]]
    recorder: HostRecorder | None = None
    metrics_address: str | None = None

    def ask(self, question: Callable[[HostView], T]) -> T:
        """Return the answer to a query; blocks.

        Raises:
            TimeoutError: The loop does not answer.
        """
        return call_on_loop(self.loop, lambda: question(self.view), LOOP_SECONDS)


@contextlib.contextmanager
def serve_host_web(settings: Settings, monitor: HostMonitor) -> Iterator[WebThread | None]:
    """Serve the host of the running loop while the block runs; yields None if there is no web UI.

    Args:
        settings: Uses the section `debug`.
        monitor: The monitor of the process.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if not settings.debug.enabled:
        yield None
        return
    debug = settings.debug
    with PortOwners(debug.db_dir) as owners:
        listener = listen(debug, is_chosen=is_port_chosen(debug, debug), purpose=WEB, owners=owners)
        if listener is None:
            yield None
            return
        with _serve(listener, settings, monitor) as web:
            yield web


@contextlib.contextmanager
def _serve(listener: socket.socket, settings: Settings, monitor: HostMonitor) -> Iterator[WebThread]:
    from tidemill.services.triggerer.lists.reporting.host_view import HostView

    watched = WatchedHost(
        settings,
        monitor.worker,
        monitor.list_name,
        HostView(monitor),
        asyncio.get_running_loop(),
        monitor.find_dead,
        monitor.find_unready,
        monitor.recorder,
        monitor.address,
    )

    def build(listener: socket.socket, key: str | None) -> Any:
        builder: Any = importlib.import_module(_BUILDER)
        return builder.build_server(listener, key, watched)

    web = WebThread(listener, settings.debug, build, "trigger host")
    try:
        log.info("serving the web UI", web=web.address)
        web.begin()
        yield web
    finally:
        web.close()
