"""Opens a pipeline's endpoint for metrics and health; if it is off, its modules are not imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from tidemill.config.sections.metrics_settings import MetricsSettings
from tidemill.config.settings import Settings
from tidemill.config.sink_types import name_sink_section
from tidemill.runtime.log.setup import version
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunState

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Monitored:
    """The functions that the endpoint calls, from its own threads.

    Attributes:
        progress: Returns the sums over all engines; the result does not change.
        state: Returns what the run is doing.
        find_orphans: Returns the partitions that have no owner.
        find_max_executors: Returns how many tasks an engine may run at once; a reload of the code may change it.
    """

    progress: Callable[[], PipelineProgress]
    state: Callable[[], RunState]
    find_orphans: Callable[[], Sequence[int]]
    find_max_executors: Callable[[], int]


@contextlib.contextmanager
def serve_metrics(
    configured: MetricsSettings, settings: Settings, worker: str, what: Monitored
) -> Iterator[str | None]:
    """Serve metrics during the block; yield the URL, or None if there is no endpoint.

    Args:
        configured: The section as it was read, before `on_startup`.
        settings: The settings of the pipeline.
        worker: The worker name.
        what: The functions that the endpoint calls.

    Raises:
        ConfigError: The address cannot be listened on.
    """
    if not settings.metrics.enabled:
        yield None
        return
    from tidemill.runtime.metrics.endpoint import MetricsEndpoint
    from tidemill.runtime.sockets.port_owners import PortOwners
    from tidemill.runtime.sockets.ports import is_port_chosen, listen
    from tidemill.spark.live.pipeline_metrics import PipelineMetrics
    from tidemill.spark.live.readiness import find_unready

    about = (worker, version(), settings.kafka.consumer_group)
    sinks = settings.sinks.group_by_type().items()
    sink_paths = [f"{name_sink_section(kind)}.{name}" for kind, named in sinks for name in named]
    metrics = PipelineMetrics(about, what.find_max_executors, what.progress, sink_paths)

    def find_reasons() -> list[str]:
        return find_unready(what.state(), what.progress(), what.find_orphans())

    with PortOwners(settings.debug.db_dir if settings.debug.enabled else "") as owners:
        listener = listen(settings.metrics, is_chosen=is_port_chosen(configured, settings.metrics), owners=owners)
        if listener is None:
            yield None
            return
        with MetricsEndpoint(listener, metrics.collect, find_dead=list, find_unready=find_reasons) as endpoint:
            log.info("serving metrics and health", metrics=f"{endpoint.address}/metrics")
            yield endpoint.address
