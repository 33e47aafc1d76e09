"""The metrics of a trigger host, from its state at one moment.

Invariant: stream keys and trigger names are the user's data, so no label contains them; for lanes, only topics and
partitions appear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tidemill.runtime.loop.durations import DURATION_BOUNDS
from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.families import Distribution, Family, Sample
from tidemill.services.triggerer.lists.reporting.host_state import HostState

WORKER = Definition("worker_info", Kind.INFO, "The worker: the value is always 1.", ("worker_id", "version", "list"))


#: Before the first sample.
_NO_LAGS = [0] * (len(DURATION_BOUNDS) + 1)

Read = Callable[[HostState], Iterable[Sample]]


def _read_head_ages(state: HostState) -> list[Sample]:
    """Return the age of the oldest event of each partition; all other lanes share one sample with the oldest of all."""
    ages: dict[str, float] = {}
    for stream in state.streams:
        for lane in stream.lanes:
            name = name_lane(lane.lane)
            ages[name] = max(ages.get(name, 0.0), state.now - lane.since)
    return [((name,), age) for name, age in ages.items()]


def name_lane(lane: object) -> str:
    """Return the value of the label `lane`.

    Example:
        >>> name_lane(("orders", 3)), name_lane("/home/me/secret.txt")
        ('orders/3', '')
    """
    match lane:
        case (str(topic), int(partition)):
            return f"{topic}/{partition}"
        case _:
            return ""


HOST_METRICS: tuple[tuple[Definition, Read], ...] = (
    (
        Definition("triggerer_active", Kind.GAUGE, "1: this process runs the list; 0: it does not, or not yet."),
        lambda state: [((), state.active)],
    ),
    (
        Definition("store_open", Kind.GAUGE, "1: the store can be written to; 0: it cannot, or is not open yet."),
        lambda state: [((), state.store_open)],
    ),
    (
        Definition("triggers", Kind.GAUGE, "Triggers that run or wait to restart."),
        lambda state: [((), state.triggers)],
    ),
    (
        Definition("stream_subscribers", Kind.GAUGE, "Triggers that are subscribed to shared streams."),
        lambda state: [((), sum(len(stream.subscribers) for stream in state.streams))],
    ),
    (
        Definition("stream_outstanding", Kind.GAUGE, "Events of shared streams that are not acknowledged yet."),
        lambda state: [((), sum(stream.outstanding for stream in state.streams))],
    ),
    (
        Definition(
            "stream_head_age_seconds",
            Kind.GAUGE,
            "How long the oldest event of a lane has not been acknowledged; only partitions have a name.",
            ("lane",),
        ),
        _read_head_ages,
    ),
    (
        Definition("stream_advances_total", Kind.COUNTER, "Events of shared streams that were acknowledged upstream."),
        lambda state: [((), state.advanced)],
    ),
    (
        Definition(
            "stream_redeliveries_total",
            Kind.COUNTER,
            "Events that were delivered again.",
        ),
        lambda state: [((), state.redelivered)],
    ),
    (
        Definition("stream_failed", Kind.GAUGE, "Shared streams that have failed and are not being read again yet."),
        lambda state: [((), state.failed_streams)],
    ),
    (
        Definition(
            "dead_letters_total",
            Kind.COUNTER,
            "Events in a dead-letter topic or a queue for rejected messages, by what happened to them.",
            ("kind",),
        ),
        lambda state: [((kind,), state.dead_lettered.get(kind, 0)) for kind in ("failed", "rejected")],
    ),
    (
        Definition("recorder_dropped_total", Kind.COUNTER, "Events that could not be recorded."),
        lambda state: [((), state.recorder_dropped)],
    ),
    (
        Definition(
            "loop_lag_seconds",
            Kind.HISTOGRAM,
            "How late the event loop was.",
        ),
        lambda state: [((), Distribution(DURATION_BOUNDS, state.lags.counts or _NO_LAGS, state.lags.seconds))],
    ),
)

#: All metrics of a trigger host.
DEFINITIONS: tuple[Definition, ...] = (WORKER, *(definition for definition, _ in HOST_METRICS))


def collect_metrics(worker: tuple[str, str, str], state: HostState) -> Iterator[Family]:
    """Yield all metrics of a host.

    Args:
        worker: The values of the labels of `worker_info`.
        state: The state to report.
    """
    yield Family(WORKER, [(worker, 1)])
    for definition, read in HOST_METRICS:
        yield Family(definition, read(state))
