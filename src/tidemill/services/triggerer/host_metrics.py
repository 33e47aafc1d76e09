"""The metrics of a trigger host, from the report that its loop makes.

Invariant: the key of a stream and the names of triggers are the user's, so they are in no label; of a lane only a topic
and a partition are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import Metric

from tidemill.runtime.metrics.definitions import Definition, Kind
from tidemill.runtime.metrics.families import Sample, build_family
from tidemill.triggers.shared_stream import StreamReport

WORKER = Definition("worker_info", Kind.INFO, "The worker: the value is always 1.", ("worker_id", "version", "list"))


@dataclass(frozen=True, slots=True)
class HostState:
    """A trigger host at one moment.

    Attributes:
        active: Whether this process runs the list; other hosts of it stand by.
        store_open: Whether the store can be written to.
        triggers: How many triggers run, or wait to run again.
        streams: The shared streams.
        now: The time, of the clock of the streams.
        advanced: Events that producers were told about.
        standby: Whether another process runs the list.
    """

    active: bool = False
    store_open: bool = False
    triggers: int = 0
    streams: Sequence[StreamReport] = ()
    now: float = 0.0
    advanced: int = 0
    standby: bool = False


Read = Callable[[HostState], Iterable[Sample]]


def _read_head_ages(state: HostState) -> list[Sample]:
    """Return the age of the oldest event of each lane; of lanes that are not partitions, the oldest of all."""
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
        Definition("triggers", Kind.GAUGE, "Triggers that run, or wait to run again."),
        lambda state: [((), state.triggers)],
    ),
    (
        Definition("stream_subscribers", Kind.GAUGE, "Triggers that take part in shared streams."),
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
        Definition("stream_advances_total", Kind.COUNTER, "Events of shared streams that are done upstream."),
        lambda state: [((), state.advanced)],
    ),
)

#: All metrics of a trigger host.
DEFINITIONS: tuple[Definition, ...] = (WORKER, *(definition for definition, _ in HOST_METRICS))


def collect_metrics(worker: tuple[str, str, str], state: HostState) -> Iterator[Metric]:
    """Yield all metrics of a moment.

    Args:
        worker: The values of the labels of `worker_info`.
        state: The moment.
    """
    yield build_family(WORKER, [(worker, 1)])
    for definition, read in HOST_METRICS:
        yield build_family(definition, read(state))
