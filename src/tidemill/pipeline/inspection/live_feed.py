"""Reports what the executors do, while a client watches.

Without a watch the feed does not listen to the pool. A watch is a lease that the driver renews, so that the feed stops
by itself when the driver no longer asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from tidemill.config.sections.debug_settings import DebugSettings
from tidemill.core.pipeline.task_sample import TaskSample
from tidemill.pipeline.partition import OwnedPartition
from tidemill.pipeline.tasks.pool import TaskPool
from tidemill.pipeline.tasks.process import ProcessOutcome
from tidemill.pipeline.tasks.task_in_flight import TaskInFlight
from tidemill.pipeline.windows.window import WindowInFlight
from tidemill.recorder.format.recordable_text import clean_error, clean_name
from tidemill.runtime.link.live_tasks import LiveState, LiveTask, LiveWindow
from tidemill.sources.base import TopicPartition

#: The limits of one state, per kind of task and for windows.
MOST_ENDED = 200
MOST_RUNNING = 256
MOST_WAITING = 20
MOST_WINDOWS = 20
_MAX_LABEL_CHARS = 100
MOST_LABELS = 5
#: Topic, partition and first offset.
_Position = tuple[str, int, int]
#: An attempt that ended: task, position, slot, attempt number, time of its end, duration in seconds, and outcome.
_Ended = tuple[TaskInFlight, _Position, int, int, float, float, str]


class LiveFeed:
    """The live states of one engine.

    Args:
        pool: Runs the tasks.
        executors: How many tasks can run at once.
        partitions: The owned partitions; a live view.
        settings: The sampling of tasks.
        clock: The loop's clock.
    """

    def __init__(
        self,
        pool: TaskPool,
        executors: int,
        partitions: Mapping[TopicPartition, OwnedPartition],
        settings: DebugSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._executors = executors
        self._partitions = partitions
        self._clock = clock
        self._until = 0.0
        self._ended: TaskSample[_Ended] = TaskSample(settings.ws_min_duration_ms / 1000, MOST_ENDED)

    def renew(self, seconds: float) -> None:
        """Provide states for this many seconds from now on."""
        self._until = self._clock() + seconds
        self._pool.on_ended = self._note_ended

    def take_state(self) -> LiveState | None:
        """Return the running tasks, and those that ended since the last state; None: no client watches."""
        now = self._clock()
        if now >= self._until:
            if self._pool.on_ended is not None:
                self._pool.on_ended = None
                self._ended.take()
            return None
        pool, behind = self._pool, time.time() - now
        ended, left_out = self._ended.take()
        statistics = pool.statistics()
        return LiveState(
            self._executors,
            [
                _describe(flight, _find_position(flight), flight.slot or 0, flight.attempts, behind + started_at)
                for flight, started_at in pool.list_running(MOST_RUNNING)
            ],
            [
                _describe(flight, position, slot, attempt, at - seconds, seconds, outcome, of)
                for (flight, position, slot, attempt, at, seconds, outcome), of in ended
            ],
            left_out,
            statistics.queued,
            [
                _describe(flight, _find_position(flight), -1, flight.attempts + 1, behind + flight.queued_at)
                for flight in pool.list_first_queued(MOST_WAITING)
            ],
            statistics.retrying,
            [
                _describe(flight, _find_position(flight), -1, flight.attempts + 1, behind + due)
                for flight, due in pool.list_retrying(MOST_WAITING)
            ],
            self._list_windows(),
        )

    def _note_ended(self, flight: TaskInFlight, outcome: ProcessOutcome) -> None:
        slot = flight.slot or 0
        kind, seconds = outcome.kind, outcome.duration_seconds
        how = "ok" if kind is None else kind.value
        item = flight, _find_position(flight), slot, flight.attempts, time.time(), seconds, how
        self._ended.add(slot, item, seconds, failed=kind is not None)

    def _list_windows(self) -> list[LiveWindow]:
        tasks: dict[WindowInFlight, int] = {}
        for owned in self._partitions.values():
            for flight in owned.pending.values():
                if isinstance(flight.owner, WindowInFlight):
                    tasks[flight.owner] = tasks.get(flight.owner, 0) + 1
        oldest = sorted(tasks, key=lambda window: window.times.started_at or 0)[:MOST_WINDOWS]
        return [
            LiveWindow(
                clean_name(window.partition.partition[0]),
                window.partition.partition[1],
                window.times.number or 0,
                window.messages[0].offset,
                len(window.messages),
                tasks[window],
                (window.times.started_at or 0) / 1_000_000,
            )
            for window in oldest
        ]


def _find_position(flight: TaskInFlight) -> _Position:
    offsets = flight.find_offsets()
    return *flight.owner.topic_partition, offsets[0] if offsets else -1


def _describe(
    flight: TaskInFlight,
    position: _Position,
    slot: int,
    attempt: int,
    at: float,
    seconds: float = 0.0,
    outcome: str = "",
    of: int = 1,
) -> LiveTask:
    topic, partition, offset = position
    label = ", ".join(f"{name}={value}" for name, value in list(flight.task.labels.items())[:MOST_LABELS])
    return LiveTask(
        slot,
        clean_name(flight.task.task_id),
        clean_error(label)[:_MAX_LABEL_CHARS],
        attempt,
        clean_name(topic),
        partition,
        offset,
        round(at, 3),
        round(seconds, 4),
        outcome,
        of,
    )
