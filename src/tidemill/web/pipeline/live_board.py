"""Collects the state of the executors of all engines while the live page is open.

Engines report on the link's thread and pages read on the server's; one lock protects all state. Memory is bounded:
entries older than a minute are dropped. An engine that has not reported for a while is no longer shown.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from tidemill.runtime.link import live_tasks
from tidemill.web.pipeline import live_models as models

#: How much of the past a page shows.
KEPT_SECONDS = 60.0
#: How long engines report after each request; requests are repeated before that.
LEASE_SECONDS = 5.0
#: An engine that has not reported for this long is no longer shown.
SILENT_SECONDS = 5.0
MOST_ENDED = 4_000
MOST_LISTED = 20


class LiveBoard:
    """The states of all engines.

    Args:
        clock: Returns the time in seconds since the epoch.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._states: dict[int, tuple[float, live_tasks.LiveState]] = {}
        self._ended: deque[models.LiveTaskView] = deque(maxlen=MOST_ENDED)
        self._ids = 0
        self._told = 0
        self._number = 0
        self._left_out = 0

    def take(self, slot: int, engine_id: str, state: live_tasks.LiveState) -> None:
        """Store the state of an engine; see `LinkServer.watch`."""
        with self._lock:
            self._states[slot] = self._clock(), state
            self._left_out += state.left_out
            for task in state.ended:
                self._ids += 1
                self._ended.append(_describe(slot, task, self._ids))

    def describe_news(self) -> models.LivePicture:
        """Return the current state, and the tasks that ended since the last call; this is the next update."""
        with self._lock:
            self._number += 1
            told, self._told = self._told, self._ids
            return self._describe([task for task in self._ended if task.id > told])

    def describe_all(self) -> models.LivePicture:
        """Return the current state, and all tasks that ended within `KEPT_SECONDS`."""
        with self._lock:
            since = self._clock() - KEPT_SECONDS
            return self._describe([task for task in self._ended if task.at + task.seconds >= since])

    def _describe(self, ended: list[models.LiveTaskView]) -> models.LivePicture:
        now = self._clock()
        for slot in [slot for slot, (at, _) in self._states.items() if now - at > SILENT_SECONDS]:
            del self._states[slot]
        states = [(slot, state) for slot, (_, state) in sorted(self._states.items())]
        windows = [_describe_window(slot, window) for slot, state in states for window in state.windows]
        return models.LivePicture(
            number=self._number,
            at=now,
            engines=[
                models.LiveEngineView(
                    slot=slot,
                    executors=state.executors,
                    running=len(state.running),
                    queued=state.queued,
                    retrying=state.retrying,
                )
                for slot, state in states
            ],
            running=[_describe(slot, task) for slot, state in states for task in state.running],
            ended=ended,
            left_out=self._left_out,
            waiting=_list_first(_describe(slot, task) for slot, state in states for task in state.waiting),
            backing_off=_list_first(_describe(slot, task) for slot, state in states for task in state.backing_off),
            windows=sorted(windows, key=lambda window: window.at)[:MOST_LISTED],
        )


def _list_first(tasks: Iterable[models.LiveTaskView]) -> list[models.LiveTaskView]:
    return sorted(tasks, key=lambda task: task.at)[:MOST_LISTED]


def _describe(slot: int, task: live_tasks.LiveTask, number: int = 0) -> models.LiveTaskView:
    return models.LiveTaskView(
        id=number,
        engine=slot,
        executor=task.slot,
        task_id=task.task_id,
        label=task.label,
        attempt=task.attempt,
        topic=task.topic,
        partition=task.partition,
        offset=task.offset,
        at=task.at,
        seconds=task.seconds,
        outcome=task.outcome,
        of=task.of,
    )


def _describe_window(slot: int, window: live_tasks.LiveWindow) -> models.LiveWindowView:
    return models.LiveWindowView(
        engine=slot,
        topic=window.topic,
        partition=window.partition,
        number=window.number,
        first=window.first,
        messages=window.messages,
        tasks=window.tasks,
        at=window.at,
    )
