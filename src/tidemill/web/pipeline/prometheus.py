"""Ready-made Prometheus queries for a pipeline's metrics, with links to Prometheus."""

from __future__ import annotations

from urllib.parse import urlencode

from pydantic import BaseModel, Field

from tidemill.config.sections.debug_settings import DebugSettings

#: Common queries in PromQL, by title; SELECTOR and INTERVAL are placeholders.
_QUERIES = {
    "Messages read per second": "sum(rate(tidemill_messages_consumed_total{SELECTOR}[INTERVAL]))",
    "Messages committed per second": "sum(rate(tidemill_offsets_committed_total{SELECTOR}[INTERVAL]))",
    "Lag by partition": "topk(10, sum by (partition) (tidemill_offset_lag{SELECTOR}))",
    "Messages in flight": "sum by (engine) (tidemill_in_flight_messages{SELECTOR})",
    "Tasks per second, by outcome": "sum by (status) (rate(tidemill_executor_tasks_total{SELECTOR}[INTERVAL]))",
    "Retries per second": "sum(rate(tidemill_task_retries_total{SELECTOR}[INTERVAL]))",
    "Task duration, 95th percentile": (
        "histogram_quantile(0.95, sum by (le) (rate(tidemill_executor_duration_seconds_bucket{SELECTOR}[INTERVAL])))"
    ),
    "Wait for an executor, 95th percentile": (
        "histogram_quantile(0.95, sum by (le) (rate(tidemill_queue_wait_seconds_bucket{SELECTOR}[INTERVAL])))"
    ),
    "Executors in use": "sum by (engine) (tidemill_executor_pool_active{SELECTOR})",
    "Payloads delivered per second, by sink": (
        "sum by (sink) (rate(tidemill_sink_payloads_delivered_total{SELECTOR}[INTERVAL]))"
    ),
    "Errors of sinks per second": "sum by (sink) (rate(tidemill_sink_deliver_errors_total{SELECTOR}[INTERVAL]))",
    "Dead letters, by kind": "sum by (kind) (increase(tidemill_dead_letters_total{SELECTOR}[INTERVAL]))",
    "Stalled partitions": "sum by (partition) (tidemill_partition_stalled{SELECTOR}) > 0",
}
_RANGE = "1h"


class PrometheusQuery(BaseModel):
    """A query for the pipeline's metrics."""

    title: str
    query: str = Field(description="The query in PromQL.")
    url: str = Field(description="The query's address in Prometheus; '' without debug.prometheus_url.")


def list_queries(settings: DebugSettings, worker: str, cluster: str) -> list[PrometheusQuery]:
    """Return ready-made queries.

    Args:
        settings: The address of Prometheus, and the names of its labels.
        worker: The worker's name.
        cluster: The name of the installation; may be ''.

    Example:
        >>> settings = DebugSettings(prometheus_url="https://prom.example/", prometheus_worker_label="worker")
        >>> list_queries(settings, "host-1", "")[0].query
        'sum(rate(tidemill_messages_consumed_total{worker="host-1"}[5m]))'
    """
    wanted = {settings.prometheus_worker_label: worker, settings.prometheus_cluster_label: cluster}
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in wanted.items() if name and value)
    selector = f"{{{labels}}}" if labels else ""
    found = []
    for title, template in _QUERIES.items():
        # Replace INTERVAL first: a label value may contain the word.
        query = template.replace("INTERVAL", settings.prometheus_rate_interval).replace("{SELECTOR}", selector)
        found.append(PrometheusQuery(title=title, query=query, url=_link(settings.prometheus_url, query)))
    return found


def _escape(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _link(address: str, query: str) -> str:
    if not address:
        return ""
    asked = urlencode({"g0.expr": query, "g0.tab": "0", "g0.range_input": _RANGE}, errors="replace")
    return f"{address.rstrip('/')}/graph?{asked}"
