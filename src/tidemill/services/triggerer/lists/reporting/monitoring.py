"""Serves the metrics and the health of a trigger host; if both are off, their modules are not imported.

The state of a host belongs to its event loop. The endpoint's threads query the loop, so `/healthz` also shows a loop
that does not answer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import structlog

from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.core.triggers.group_commit import ProducerStanding
from tidemill.core.wording import format_count
from tidemill.runtime.log.setup import version
from tidemill.runtime.loop.loop_calls import call_on_loop
from tidemill.services.triggerer.hosting.host_book import HostBook
from tidemill.services.triggerer.lists.replica import Replica
from tidemill.services.triggerer.lists.reporting.host_state import HostState

if TYPE_CHECKING:
    from tidemill.runtime.metrics.families import Family
    from tidemill.services.triggerer.lists.reporting.host_recorder import HostRecorder

log = structlog.get_logger(__name__)

#: A loop that does not answer within this time hangs. The log names a blocking trigger after a fraction of a second.
LOOP_SECONDS = 5.0
_HANGS = f"the event loop has not answered for {LOOP_SECONDS:g} s; the log names the trigger that blocks it"


class HostMonitor:
    """The endpoint of a trigger host.

    Args:
        settings: The section `metrics`.
        worker: The worker's name.
        list_name: The name of the trigger list.
        db_dir: The folder of its recordings; '': it has none.

    Attributes:
        worker: The worker's name.
        list_name: The name of the trigger list.
        book: The statistics of the host.
        replica: Runs the list, or waits for it; None: the store is not open yet.
        recorder: Records the host; None: nothing is recorded.
        address: The URL; None: there is no endpoint.
    """

    def __init__(self, settings: MetricsSettings, worker: str, list_name: str, db_dir: str = "") -> None:
        """Bind to the running loop, which owns the state."""
        self._settings = settings
        self._db_dir = db_dir
        self._about = (worker, version(), list_name)
        self._loop = asyncio.get_running_loop()
        self.worker, self.list_name = worker, list_name
        self.book = HostBook()
        self.replica: Replica | None = None
        self.recorder: HostRecorder | None = None
        self.address: str | None = None

    @contextlib.contextmanager
    def serve(self) -> Iterator[None]:
        """Serve while the block runs.

        Raises:
            ConfigError: The address cannot be listened on.
        """
        if not self._settings.enabled:
            yield
            return
        from tidemill.runtime.metrics.endpoint import MetricsEndpoint
        from tidemill.runtime.sockets.port_owners import PortOwners
        from tidemill.runtime.sockets.ports import is_port_chosen, listen
        from tidemill.services.triggerer.lists.reporting.host_metrics import collect_metrics

        def collect() -> Iterator[Family]:
            return collect_metrics(self._about, self._ask())

        with PortOwners(self._db_dir) as owners:
            is_chosen = is_port_chosen(self._settings, self._settings)
            listener = listen(self._settings, is_chosen=is_chosen, owners=owners)
            if listener is None:
                yield
                return
            with MetricsEndpoint(listener, collect, self.find_dead, self.find_unready) as endpoint:
                self.address = endpoint.address
                log.info("serving metrics and health", metrics=f"{endpoint.address}/metrics")
                yield

    def find_dead(self) -> list[str]:
        """Return why the process should be restarted. Callable from any thread but the loop's."""
        try:
            self._ask()
        except TimeoutError:
            return [_HANGS]
        return []

    def find_unready(self) -> list[str]:
        """Return why the process is not ready. Callable from any thread but the loop's."""
        try:
            return find_reasons(self._ask())
        except TimeoutError:
            return [_HANGS]

    def _ask(self) -> HostState:
        """Return the state, from another thread.

        Raises:
            TimeoutError: The loop does not answer.
        """
        return call_on_loop(self._loop, self.read_state, LOOP_SECONDS)

    def read_state(self, *, reports: bool = True) -> HostState:
        """Return the state, with or without reports of the streams. Call it on the loop."""
        replica, counts = self.replica, self.book.counts
        state = HostState(
            store_known=replica is not None,
            advanced=counts.advanced,
            redelivered=counts.upstream.redelivered,
            dead_lettered=dict(counts.upstream.dead_lettered),
            lags=self.book.lags.copy(),
            recorder_dropped=0 if self.recorder is None else self.recorder.writer.statistics.lost_events,
        )
        if replica is None:
            return state
        host, standby = replica.host, replica.report()["waits_for"] is not None
        if host is None or standby:
            return replace(state, standby=standby)
        return replace(
            state,
            active=True,
            started=self.book.is_started,
            store_open=host.events.standing is not ProducerStanding.DOWN,
            triggers=host.running,
            streams=host.report() if reports else (),
            failed_streams=host.manager.count_failed(),
            now=host.now(),
        )


def find_reasons(state: HostState) -> list[str]:
    """Return why a trigger host is not ready; a host that stands by for another one is ready.

    The reasons contain no user data, because they can be read without a login.
    """
    if state.standby:
        return []
    if not state.store_known:
        return ["it is starting: its store is not open yet"]
    if not state.active:
        return ["it is starting: it waits for its list"]
    reasons = [] if state.started else ["it is starting: not all triggers have been started"]
    if not state.store_open:
        reasons.append("its store cannot be reached")
    if state.failed_streams:
        streams = format_count(state.failed_streams, "shared stream")
        reasons.append(f"{streams} failed, and will be read again when the triggers restart")
    return reasons
