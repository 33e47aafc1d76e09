"""What an engine's executors do, for somebody who watches: sent a few times a second, only while somebody does."""

from __future__ import annotations

from typing import Protocol

import msgspec


class LiveTask(msgspec.Struct, frozen=True, array_like=True):
    """An attempt of a task that runs, waits or has ended.

    Attributes:
        slot: The executor; -1: none.
        task_id: The task.
        label: Its labels, as one text.
        attempt: Which attempt it is.
        topic: The topic of its first message.
        partition: The partition.
        offset: The offset; -1: it works for no single message.
        at: When it started, or is due, or was queued; in seconds since the epoch.
        seconds: How long it ran; 0: it has not ended.
        outcome: `ok`, or the kind of its error; '': it has not ended.
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
    """A window with tasks that are not over.

    Attributes:
        topic: Its topic.
        partition: Its partition.
        number: Its number in the engine.
        first: The offset of its first message.
        messages: How many messages it has.
        tasks: How many of its tasks are not over.
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
    """What the executors of one engine do, and what ended since the last state.

    Attributes:
        executors: How many there are.
        running: What runs now, by executor.
        ended: What ended; fast tasks are sampled.
        left_out: How many that ended are neither shown nor sampled.
        queued: How many tasks wait for an executor.
        waiting: The first of them.
        retrying: How many wait for their next attempt.
        backing_off: The next of them.
        windows: Windows with tasks that are not over, the oldest first.
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
    """What an engine's link takes states from."""

    def renew(self, seconds: float) -> None:
        """Provide states for this long from now on."""

    def take_state(self) -> LiveState | None:
        """Return the next state; None: nobody watches."""
