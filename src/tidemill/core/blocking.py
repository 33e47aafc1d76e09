"""Tells a blocked event loop from a machine that gives it no CPU.

The loop is late by some time. Part of it the operating system may have let the thread wait for a CPU: nobody's code is
to blame for that part. The rest somebody did not give the loop back: computing, or waiting in a call that blocks.
Code that keeps the interpreter to itself (a regular expression, large JSON) holds up the watching thread as well: what
the loop's thread has computed tells it from a busy machine.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Cause(enum.Enum):
    """Why a loop is late.

    COMPUTING: something computes and gives nothing back. WAITING: something waits in a call that blocks. STARVED: the
    machine gave the thread no CPU.
    """

    COMPUTING = "computing"
    WAITING = "waiting"
    STARVED = "starved"


@dataclass(frozen=True, slots=True)
class Usage:
    """What a thread has used, in seconds; only differences mean something.

    Attributes:
        cpu_seconds: Computing.
        queued_seconds: Ready to compute, and waiting for a CPU.
    """

    cpu_seconds: float
    queued_seconds: float


def judge_block(
    late_seconds: float, before: Usage, now: Usage, threshold_seconds: float, overslept_seconds: float = 0.0
) -> Cause:
    """Say why a loop is late that is later than the threshold.

    Args:
        late_seconds: For how long the loop has done nothing else.
        before: What its thread had used then.
        now: What it has used.
        threshold_seconds: What somebody may take.
        overslept_seconds: How much later than it wanted the watching thread itself woke up. A thread that waits for
            a CPU has its wait counted only once it got one; but then its neighbour waits as well.

    Example:
        >>> judge(0.5, Usage(1.0, 0.0), Usage(1.1, 0.4), 0.2)
        <Cause.STARVED: 'starved'>
        >>> judge(0.5, Usage(1.0, 0.0), Usage(1.0, 0.0), 0.2)
        <Cause.WAITING: 'waiting'>
        >>> judge(0.5, Usage(1.0, 0.0), Usage(1.4, 0.0), 0.2, overslept_seconds=0.4)
        <Cause.COMPUTING: 'computing'>
    """
    computed = now.cpu_seconds - before.cpu_seconds
    if computed >= threshold_seconds:
        return Cause.COMPUTING
    own_seconds = late_seconds - max(now.queued_seconds - before.queued_seconds, overslept_seconds)
    if own_seconds < threshold_seconds:
        return Cause.STARVED
    return Cause.COMPUTING if computed >= own_seconds / 2 else Cause.WAITING
