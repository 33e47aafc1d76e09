"""Starts the web UI for DAGs. If it is disabled, none of its modules are imported.

The store belongs to the event loop of the process; the threads of the web UI send their calls to that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import structlog

from tidemill.config.settings import Settings
from tidemill.runtime.loop.loop_calls import await_on_loop
from tidemill.runtime.sockets.port_owners import PortOwners
from tidemill.runtime.sockets.ports import is_port_chosen, listen
from tidemill.runtime.sockets.web_thread import WEB, WebThread
from tidemill.store.calls.call import Call
from tidemill.store.database import StoreCalls

if TYPE_CHECKING:
    from tidemill.services.dev.metrics import DagMetrics

log = structlog.get_logger(__name__)

T = TypeVar("T")
Check = Callable[[], list[str]]
_BUILDER = "tidemill.web.dags.start"
#: A store that does not answer for this long counts as unreachable.
STORE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class WatchedDags:
    """The process and store behind the web UI, for use from its threads.

    Attributes:
        settings: The settings.
        worker: The worker's name.
        name: The folder of DAGs, shown in the head of every page.
        store: Answers calls, on the loop only.
        loop: The event loop of the store.
        find_dead: Returns reasons to restart the process.
        find_unready: Returns reasons why the process is not ready.
        metrics_address: The URL of the metrics; None if they are disabled.
    """

    settings: Settings
    worker: str
    name: str
    store: StoreCalls
    loop: asyncio.AbstractEventLoop
    find_dead: Callable[[], list[str]] = field(default=list)
    find_unready: Callable[[], list[str]] = field(default=list)
    metrics_address: str | None = None

    def ask(self, request: Call[T]) -> T:
        """Return the answer to a call; blocks.

        Raises:
            CallRefusedError: The store refused the call.
            RemoteError: The store failed.
            TimeoutError: The store or the loop does not answer.
        """
        return await_on_loop(self.loop, self.store.call(request), STORE_SECONDS)

    def ask_all(self, requests: list[Call[T]]) -> list[T]:
        """Return the answers to concurrent calls; see `ask`."""

        async def call_all() -> list[T]:
            return list(await asyncio.gather(*map(self.store.call, requests)))

        return await_on_loop(self.loop, call_all(), STORE_SECONDS)


@contextlib.contextmanager
def serve_dags_web(watched: WatchedDags) -> Iterator[WebThread | None]:
    """Serve the web UI while the block runs; yields None if it is disabled.

    Must be called on the event loop of the process, and does not block it for long.

    Args:
        watched: The process to show. The section `debug` of its settings has the address and the access rules.

    Raises:
        ConfigError: The address cannot be used.
    """
    debug = watched.settings.debug
    if not debug.enabled:
        yield None
        return
    with PortOwners(debug.db_dir) as owners:
        listener = listen(debug, is_chosen=is_port_chosen(debug, debug), purpose=WEB, owners=owners)
        if listener is None:
            yield None
            return
        with _serve(listener, watched) as web:
            yield web


@contextlib.contextmanager
def _serve(listener: socket.socket, watched: WatchedDags) -> Iterator[WebThread]:
    def build(listener: socket.socket, key: str | None) -> Any:
        builder: Any = importlib.import_module(_BUILDER)
        return builder.build_server(listener, key, watched)

    web = WebThread(listener, watched.settings.debug, build, "process")
    try:
        log.info("serving the web UI", web=web.address)
        web.begin()
        yield web
    finally:
        web.close()


@contextlib.contextmanager
def serve_dags_metrics(
    settings: Settings, metrics: DagMetrics, find_dead: Check = list, find_unready: Check = list
) -> Iterator[str | None]:
    """Serve metrics and health while the block runs; yields the URL, or None if they are disabled.

    Args:
        settings: Provides `metrics`.
        metrics: The metrics to serve.
        find_dead: Returns reasons to restart the process.
        find_unready: Returns reasons why the process is not ready.

    Raises:
        ConfigError: The address cannot be used.
    """
    if not settings.metrics.enabled:
        yield None
        return
    from tidemill.runtime.metrics.endpoint import MetricsEndpoint

    with PortOwners(settings.debug.db_dir) as owners:
        chosen = is_port_chosen(settings.metrics, settings.metrics)
        listener = listen(settings.metrics, is_chosen=chosen, owners=owners)
        if listener is None:
            yield None
            return
        with MetricsEndpoint(listener, metrics.collect, find_dead, find_unready) as endpoint:
            log.info("serving metrics and health", metrics=f"{endpoint.address}/metrics")
            yield endpoint.address
