"""Distinguishes a blocked event loop from a machine that gives it no CPU.

Part of a loop's delay may be due to its thread waiting for a CPU; no code is to blame for that part. During the rest,
some code did not return to the loop: it was computing, or waiting in a blocking call. Code that holds the GIL (a
regular expression, large JSON) delays the watching thread as well; the CPU time of the loop's thread then distinguishes
it from a busy machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BlockCause(enum.Enum):
    """Why a loop is late.

    COMPUTING: code computes without returning to the loop. WAITING: code waits in a blocking call. STARVED: the thread
    got no CPU.
    """

    COMPUTING = "computing"
    WAITING = "waiting"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class Usage:
    """The time that a thread has used, in seconds; only differences are meaningful.

    Attributes:
        cpu_seconds: Time on a CPU.
        queued_seconds: Time in the run queue, waiting for a CPU; a wait counts when it is over.
        is_runnable: Whether it is running or waiting for a CPU at this moment, and not in a blocking call.
    """

    cpu_seconds: float
    queued_seconds: float
    is_runnable: bool = False


class Standstill:
    """Measures how long one step of a loop has been running, as seen by a thread that checks regularly.

    A loop can be late for long although each of its steps is short. Only a step that is found again and again, with no
    report of the loop in between, has really taken that long. Time in which the thread itself did not check does not
    count.

    Args:
        pulse_seconds: The interval between checks; the loop reports at least twice in that time.

    Example:
        >>> standstill, step = Standstill(1.0), object()
        >>> [standstill.look(7, step, 1.0) for _ in range(3)]
        [0.0, 1.0, 2.0]
    """

    __slots__ = ("_beats", "_most", "_seconds", "_step")

    def __init__(self, pulse_seconds: float) -> None:
        self._most = 2 * pulse_seconds
        self._beats = -1
        self._step: object = None
        self._seconds = 0.0

    def look(self, beats: int, step: object, passed_seconds: float) -> float:
        """Return for how many seconds the step has been running.

        Args:
            beats: The number of the loop's reports so far.
            step: The step that the loop is running.
            passed_seconds: The time since the last check.
        """
        if beats == self._beats and step is self._step:
            self._seconds += min(passed_seconds, self._most)
        else:
            self._beats, self._step, self._seconds = beats, step, 0.0
        return self._seconds


def judge_block(
    late_seconds: float, before: Usage, now: Usage, threshold_seconds: float, overslept_seconds: float = 0.0
) -> BlockCause:
    """Return why a loop is late by more than the threshold.

    Args:
        late_seconds: The time since the loop last ran.
        before: The usage of its thread at that time.
        now: The usage of its thread now.
        threshold_seconds: How long one callback may take.
        overslept_seconds: The delay with which the watching thread itself woke up. The kernel counts a wait for a CPU
            only when it is over; but while the loop's thread waits, the watching thread usually waits too.

    Example:
        >>> judge_block(0.5, Usage(1.0, 0.0), Usage(1.1, 0.4), 0.2)
        <BlockCause.STARVED: 'starved'>
        >>> judge_block(0.5, Usage(1.0, 0.0), Usage(1.0, 0.0), 0.2)
        <BlockCause.WAITING: 'waiting'>
        >>> judge_block(0.5, Usage(1.0, 0.0), Usage(1.0, 0.0, is_runnable=True), 0.2)
        <BlockCause.STARVED: 'starved'>
        >>> judge_block(0.5, Usage(1.0, 0.0), Usage(1.4, 0.0), 0.2, overslept_seconds=0.4)
        <BlockCause.COMPUTING: 'computing'>
    """
    computed = now.cpu_seconds - before.cpu_seconds
    if computed >= threshold_seconds:
        return BlockCause.COMPUTING
    queued = now.queued_seconds - before.queued_seconds
    if now.is_runnable:
        queued = max(queued, late_seconds - computed)  # includes the wait that is not over yet
    own_seconds = late_seconds - max(queued, overslept_seconds)
    if own_seconds < threshold_seconds:
        return BlockCause.STARVED
    return BlockCause.COMPUTING if computed >= own_seconds / 2 else BlockCause.WAITING
