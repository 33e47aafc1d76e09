"""Opens a pipeline's endpoint for metrics and health, unless it is off: then nothing of it is imported."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import structlog

from tidemill.config.metrics_settings import MetricsSettings
from tidemill.config.settings import Settings
from tidemill.config.sink_types import name_sink_section
from tidemill.runtime.log.setup import version
from tidemill.spark.progress import PipelineProgress
from tidemill.spark.run_state import RunState

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Monitored:
    """What the endpoint asks, from its own threads.

    Attributes:
        progress: Returns the sums over all engines, which nobody changes.
        state: Returns what the run does.
        find_orphans: Returns the partitions that have no owner.
        find_max_executors: Returns how many tasks an engine may run at a time; a reload of the code may change it.
    """

    progress: Callable[[], PipelineProgress]
    state: Callable[[], RunState]
    find_orphans: Callable[[], Sequence[int]]
    find_max_executors: Callable[[], int]


@contextlib.contextmanager
def serve_metrics(
    configured: MetricsSettings, settings: Settings, worker: str, what: Monitored
) -> Iterator[str | None]:
    """Answer while the block runs; yields the URL, or None if there is no endpoint.

    Args:
        configured: The section as it was read, before `on_startup`.
        settings: Of the pipeline.
        worker: The worker's name.
        what: What is asked.

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
    places = [f"{name_sink_section(kind)}.{name}" for kind, named in sinks for name in named]
    metrics = PipelineMetrics(about, what.find_max_executors, what.progress, places)

    def find_reasons() -> list[str]:
        return find_unready(what.state(), what.progress(), what.find_orphans())

    with PortOwners(settings.debug.db_dir if settings.debug.enabled else "") as owners:
        listener = listen(settings.metrics, is_chosen=is_port_chosen(configured, settings.metrics), owners=owners)
        if listener is None:
            yield None
            return
        with MetricsEndpoint(listener, metrics.collect, find_dead=list, find_unready=find_reasons) as endpoint:
            log.info("metrics and health are served", metrics=f"{endpoint.address}/metrics")
            yield endpoint.address
