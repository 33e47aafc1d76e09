"""The state of a trigger host at one moment, for metrics and health."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tidemill.runtime.loop.durations import Durations
from tidemill.triggers.shared_stream import StreamReport


@dataclass(frozen=True, slots=True)
class HostState:
    """A trigger host at one moment.

    Attributes:
        store_known: Whether the store has been opened.
        active: Whether this process runs the list; its other hosts stand by.
        started: Whether all of its triggers have been started.
        store_open: Whether the store can be written to.
        triggers: The number of triggers that run or wait to restart.
        streams: The shared streams.
        failed_streams: The number of shared streams that have failed and are not being read again yet.
        now: The time of the streams' clock.
        advanced: Events that were acknowledged to producers.
        redelivered: Events that were delivered again.
        dead_lettered: Events with a confirmed dead letter, by kind.
        lags: How late the event loop was.
        recorder_dropped: Events that could not be recorded.
        standby: Whether another process runs the list.
    """

    store_known: bool = False
    active: bool = False
    started: bool = False
    store_open: bool = False
    triggers: int = 0
    streams: Sequence[StreamReport] = ()
    failed_streams: int = 0
    now: float = 0.0
    advanced: int = 0
    redelivered: int = 0
    dead_lettered: Mapping[str, int] = field(default_factory=dict)
    lags: Durations = field(default_factory=Durations)
    recorder_dropped: int = 0
    standby: bool = False
