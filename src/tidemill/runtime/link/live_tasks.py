"""The live state of an engine's executors, sent a few times a second while a viewer watches."""

from __future__ import annotations

from typing import Protocol

import msgspec


class LiveTask(msgspec.Struct, frozen=True, array_like=True):
    """An attempt of a task that runs, waits or has ended.

    Attributes:
        slot: The executor; -1 for none.
        task_id: The task.
        label: The task's labels, as one text.
        attempt: The attempt's number.
        topic: The topic of its first message.
        partition: The partition.
        offset: The offset; -1 if it works for no single message.
        at: When it started, is due, or was queued, in seconds since the epoch.
        seconds: How long it ran; 0 if it has not ended.
        outcome: `ok`, or the kind of its error; '' if it has not ended.
        of: How many tasks it stands for.
    """

    slot: int
    task_id: str
    label: str
    attempt: int
    topic: str
    partition: int
    offset: int
    at: float
    seconds: float = 0.0
    outcome: str = ""
    of: int = 1


class LiveWindow(msgspec.Struct, frozen=True, array_like=True):
    """A window with unfinished tasks.

    Attributes:
        topic: The topic.
        partition: The partition.
        number: The window's number in the engine.
        first: The offset of its first message.
        messages: How many messages it has.
        tasks: How many of its tasks are unfinished.
        at: When it was arranged, in seconds since the epoch.
    """

    topic: str
    partition: int
    number: int
    first: int
    messages: int
    tasks: int
    at: float


class LiveState(msgspec.Struct, frozen=True):
    """The state of one engine's executors, with the tasks that ended since the last state.

    Attributes:
        executors: The number of executors.
        running: The running attempts, by executor.
        ended: The ended attempts; fast tasks are sampled.
        left_out: How many ended attempts are neither shown nor sampled.
        queued: How many tasks wait for an executor.
        waiting: The first of them.
        retrying: How many tasks wait for their next attempt.
        backing_off: The next of them.
        windows: Windows with unfinished tasks, the oldest first.
    """

    executors: int
    running: list[LiveTask]
    ended: list[LiveTask]
    left_out: int
    queued: int
    waiting: list[LiveTask]
    retrying: int
    backing_off: list[LiveTask]
    windows: list[LiveWindow]


class LiveSource(Protocol):
    """Provides an engine's link with states."""

    def renew(self, seconds: float) -> None:
        """Provide states for this long from now on."""

    def take_state(self) -> LiveState | None:
        """Return the next state; None if there is no viewer."""
